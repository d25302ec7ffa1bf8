"""Sampling from a GPT, one token at a time."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from jsonargparse.typing import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_lightning.errors import UserError
from gpt_lightning.model.fast.decoder import Decoder, RecomputingDecoder
from gpt_lightning.model.gpt import GPT
from gpt_lightning.model.network import check_tokens
from gpt_lightning.parsing import TopP, checked

# one generator for all rows, or one for each row
Generators = torch.Generator | Sequence[torch.Generator] | None

# not cuDNN's kernel, which takes 23 to 37 ms to plan for each new length of the cache
EVERY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PACKED_FROM = 64  # tokens; laying out the weights takes as long as decoding some 20


@checked("")
@dataclass
class Sampling:
    """Numbers of `generate`, with their bounds."""

    max_new_tokens: NonNegativeInt
    temperature: NonNegativeFloat
    top_k: PositiveInt | None
    vocab_size: PositiveInt | None
    top_p: TopP | None
    min_p: TopP | None
    repetition_penalty: PositiveFloat


def generate(
    model: nn.Module | Decoder,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: Generators = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    top_p: float | None = None,
    on_tokens: Callable[[list[int]], object] | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    on_logits: Callable[[Tensor], object] | None = None,
) -> Tensor:
    """Continue each sequence by max_new_tokens tokens.

    While the sequence fits into block_size, each step computes one token (a cache holds the keys
    and values of the others). Past that the window slides, which changes every position embedding,
    so each step computes the last block_size tokens: nanoGPT's semantics, exactly.

    Args:
        model: The model; its mode and weights stay. It is evaluated without dropout and, in spite
            of autocast, in the dtype of its weights (autocast would cast them for each token). A
            Decoder of a model is prepared once for several calls.
        idx: Prompts, int64 (B, T), T >= 1.
        max_new_tokens: Number of tokens to add.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Sample only among the k most likely tokens.
        generator: Source of the random numbers, on the model's device; a list has one for each of
            the B rows, whose tokens then do not depend on the other rows.
        vocab_size: Size of the tokenizer's vocabulary; rows beyond it, padding, are not sampled.
        dtype: dtype of the matrix products; None: the weights' own, or the Decoder's. bfloat16 has
            half the bytes, which take most of the time, and occasionally changes a token.
        top_p: Sample only among the most likely tokens whose probabilities, after temperature and
            top_k, add up to top_p.
        on_tokens: Function that gets the B tokens of each step. A true result ends all rows.
        min_p: Sample only among those at least min_p times as probable as the likeliest token.
        repetition_penalty: Penalty of `penalized` for the tokens of the sequence; 1: none.
        on_logits: Function that gets the logits (B, V) of a step before its tokens are drawn.

    Returns:
        int64 (B, T + max_new_tokens), prompts included; fewer tokens if on_tokens has ended it.

    Raises:
        UserError: An argument is out of bounds, or a logit is NaN or infinite.
    """
    how = Sampling(max_new_tokens, temperature, top_k, vocab_size, top_p, min_p, repetition_penalty)
    if not isinstance(model, Decoder):  # a GPT, or a wrapper of torch.compile
        model = make_decoder(model, dtype, pack=how.max_new_tokens >= PACKED_FROM)
    check_tokens("idx", idx, model.config)
    T = idx.size(1)
    plain = torch.autocast(idx.device.type, enabled=False)
    with torch.inference_mode(), plain, sdpa_kernel(EVERY_LENGTH):
        block_size = model.config.block_size
        tokens = torch.cat([idx, idx.new_empty(len(idx), how.max_new_tokens)], dim=1)
        caches = model.new_caches(len(idx), min(tokens.size(1), block_size))
        for n in range(T, tokens.size(1)):  # tokens so far
            remembered = model.remembers and T < n <= block_size
            first = n - 1 if remembered else max(0, n - block_size)
            logits = model(tokens[:, first:n], first * remembered, caches).float()  # (B, V)
            logits = penalized(logits, tokens[:, :n], how.repetition_penalty)[:, : how.vocab_size]
            if on_logits is not None:
                on_logits(logits)
            filters = (how.top_p, how.min_p)
            drawn = sample_token(logits, how.temperature, how.top_k, generator, *filters)
            tokens[:, n : n + 1] = drawn
            if on_tokens is not None and on_tokens(drawn[:, 0].tolist()):
                tokens = tokens[:, : n + 1]
                break
    return tokens.clone()  # an inference tensor could not be trained on


def make_decoder(model: nn.Module, dtype: torch.dtype | None = None, pack: bool = True) -> Decoder:
    """Return the Decoder of a model; the arguments are those of Decoder."""
    if dtype and dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise UserError(f"dtype is {dtype}; expected torch.bfloat16, torch.float32, or None")
    if not hasattr(model, "config") or next(model.parameters(), None) is None:
        raise UserError(f"model is a {type(model).__name__}; expected a GPT, or a network's object")
    if type(getattr(model, "_orig_mod", model)) is GPT:  # also in torch.compile's wrapper
        return Decoder(cast(GPT, model), dtype, pack)
    return RecomputingDecoder(model, dtype)


def sample_token(
    logits: Tensor,
    temperature: float,
    top_k: int | None,
    generator: Generators = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """Draw one token per row of (B, V) logits; return int64 (B, 1).

    The filters and their order are those of transformers: temperature, top_k, top_p, min_p.
    """
    logits = logits / temperature if temperature else logits
    likeliest = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
    if not logits.gather(-1, likeliest).isfinite().all():
        raise UserError(
            "the logits over the temperature are not finite: raise the temperature, or take other "
            "weights"
        )
    if temperature == 0.0:
        return likeliest
    logits = filter_min_p(filter_top_p(filter_top_k(logits, top_k), top_p), min_p)
    return draw(F.softmax(logits, dim=-1), generator)


def penalized(logits: Tensor, tokens: Tensor, penalty: float) -> Tensor:
    """Make the tokens (B, T) of a sequence less likely in (B, V) logits.

    Positive logits are divided by the penalty, negative ones multiplied (Keskar et al. 2019, CTRL),
    as in transformers.
    """
    if penalty == 1.0:
        return logits
    old = logits.gather(-1, tokens)  # (B, T)
    return logits.scatter(-1, tokens, torch.where(old < 0.0, old * penalty, old / penalty))


def draw(probs: Tensor, generator: Generators) -> Tensor:
    """Draw one index per row of (B, V) probabilities; return int64 (B, 1).

    The plain version is torch.multinomial, which draws a random number for each probability: 1 ms
    a row for V = 50,257 on a CPU. This one draws a number u per row and takes the first index up to
    which the probabilities add up to u.
    """
    precise = torch.float32 if probs.device.type == "mps" else torch.float64  # MPS has no float64
    sums = probs.to(precise).cumsum(dim=-1)  # (B, V)
    how: dict[str, Any] = {"dtype": precise, "device": probs.device}
    if isinstance(generator, Sequence):
        rows = zip(probs, generator, strict=True)
        uniform = torch.cat([torch.rand(1, 1, generator=own, **how) for _, own in rows])
    else:
        uniform = torch.rand(len(probs), 1, generator=generator, **how)  # (B, 1), in [0, 1)
    # the threshold is in (0, total]: the index exists and has a probability above 0
    return torch.searchsorted(sums, (1.0 - uniform) * sums[:, -1:])


def filter_top_k(logits: Tensor, top_k: int | None) -> Tensor:
    """Set all but the top_k largest of each row of (B, V) to -inf; ties with the k-th stay."""
    if top_k is None or top_k >= logits.size(-1):
        return logits
    kth = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth, -torch.inf)


def filter_top_p(logits: Tensor, top_p: float | None) -> Tensor:
    """Keep the smallest set of likely tokens with a probability of top_p; set others to -inf.

    Sums run upwards from the least likely token of each row of (B, V), as in transformers: a token
    is left out if it and those below it have at most 1 - top_p together. The likeliest stays.
    """
    if top_p is None or top_p >= 1.0:
        return logits
    rising, order = logits.sort(dim=-1)  # (B, V)
    left_out = rising.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - top_p
    left_out[:, -1] = False
    return logits.masked_fill(left_out.scatter(-1, order, left_out), -torch.inf)


def filter_min_p(logits: Tensor, min_p: float | None) -> Tensor:
    """Set tokens of (B, V) to -inf that are less than min_p times as probable as the likeliest."""
    if min_p is None:
        return logits
    probs = logits.softmax(dim=-1)  # (B, V)
    return logits.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
