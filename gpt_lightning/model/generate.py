"""Sampling from a GPT, one token at a time, with a key-value cache. Torch only."""

import torch
import torch.nn.functional as F

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT
from gpt_lightning.model.packed import prepack_for_decoding

PACKED_FROM = 64  # tokens that laying out the weights pays from: it takes as long as some 20


def filter_top_k(logits: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """Sets all but the top_k largest of each row of (B, V) to -inf; ties with the k-th stay."""
    if top_k is None or top_k >= logits.size(-1):
        return logits
    kth = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth, -torch.inf)


def generate(
    model: GPT,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Continues each sequence by max_new_tokens tokens.

    While the sequence fits into block_size, each step costs one token through the model (the cache
    holds the rest). Past that the window slides, every position embedding changes with it and
    nothing can be kept, so each step costs a forward over the last block_size tokens: nanoGPT's
    semantics, exactly.

    Args:
        model: the model; evaluated without dropout, in its weights' dtype whatever autocast says
            (it would cast all of them again for each token). Its mode stays.
        idx: prompts, int64 (B, T), T >= 1.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the most likely token.
        top_k: samples only among the k most likely tokens.
        generator: source of the random numbers, on the model's device.
        vocab_size: tokens that the tokenizer knows; rows beyond it (padding of the matrix) are
            never sampled.
        dtype: of the matrix products; None: the weights' own. bfloat16 reads half as much, which is
            what a token's time goes into, and rounds: the text is another one now and then.

    Returns:
        int64 (B, T + max_new_tokens), prompts included.
    """
    pack = max_new_tokens >= PACKED_FROM
    with torch.inference_mode(), torch.autocast(idx.device.type, enabled=False):
        twin = prepack_for_decoding(model, dtype, pack)
        tokens = _continue(twin, idx, max_new_tokens, temperature, top_k, generator, vocab_size)
    return tokens.clone()  # a tensor that autograd takes


def _continue(
    model: GPT,
    idx: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    vocab_size: int | None,
) -> torch.Tensor:
    B, T = idx.shape
    end, block_size = T + max_new_tokens, model.config.block_size
    tokens = torch.cat((idx, idx.new_empty(B, max_new_tokens)), dim=1)  # (B, end)
    caches = model.make_caches(min(end, block_size))
    for n in range(T, end):  # tokens so far
        if n > block_size:
            x = model.transformer(tokens[:, n - block_size : n])  # (B, block_size, C)
        else:
            x = model.transformer(tokens[:, len(caches[0]) : n], caches)  # (B, T or 1, C)
        # the head at the last position alone: before it nobody asks
        logits = model.lm_head(x[:, -1])[:, :vocab_size].float()  # (B, V)
        tokens[:, n : n + 1] = sample_token(logits, temperature, top_k, generator)
    return tokens


def sample_token(
    logits: torch.Tensor,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draws one token a row from (B, V) logits; returns int64 (B, 1)."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    probs = F.softmax(filter_top_k(logits / temperature, top_k), dim=-1)
    return torch.multinomial(probs, num_samples=1, generator=generator)


def check_sampling(temperature: float, top_k: int | None, prefix: str) -> None:
    """Refuses what cannot be sampled with; `prefix` is what the user's keys begin with."""
    if temperature < 0:
        raise UserError(f"{prefix}temperature is {temperature}; it must not be negative")
    if top_k is not None and top_k < 1:
        raise UserError(f"{prefix}top_k is {top_k}; it must be at least 1 (null: all tokens)")
