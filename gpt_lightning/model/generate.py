"""Sampling from a GPT, one token at a time, with a key-value cache and weights laid out for it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_lightning.model.attention import FUSED, AttentionFn, sdpa_attention
from gpt_lightning.model.gpt import GPT, CausalSelfAttention
from gpt_lightning.model.lora import plain

# not cuDNN's kernel, which takes 23 to 37 ms to plan for each new length of the cache
EVERY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PACKED_FROM = 64  # tokens; laying out the weights takes as long as decoding some 20


def generate(
    model: GPT,
    idx: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Continue each sequence by max_new_tokens tokens.

    While the sequence fits into block_size, each step computes one token (the cache holds the
    others). Past that the window slides, which changes every position embedding, so each step
    computes the last block_size tokens without a cache: nanoGPT's semantics, exactly.

    Args:
        model: The model; its mode and weights stay. It is evaluated without dropout and, in spite
            of autocast, in the dtype of its weights (autocast would cast them for each token).
        idx: Prompts, int64 (B, T), T >= 1.
        max_new_tokens: Number of tokens to add.
        temperature: Divisor of the logits; 0 takes the most likely token.
        top_k: Sample only among the k most likely tokens.
        generator: Source of the random numbers, on the model's device.
        vocab_size: Size of the tokenizer's vocabulary; rows beyond it (padding of the matrix) are
            never sampled.
        dtype: dtype of the matrix products; None: the weights' own. bfloat16 halves the bytes to
            read, which take most of the time; its rounding occasionally changes a token.

    Returns:
        int64 (B, T + max_new_tokens), prompts included.
    """
    T, end, block_size = idx.size(1), idx.size(1) + max_new_tokens, model.config.block_size
    cached_end = min(end, block_size + 1)  # the last token drawn from a full context
    with (
        torch.inference_mode(),
        torch.autocast(idx.device.type, enabled=False),
        sdpa_kernel(EVERY_LENGTH),
    ):
        twin = prepack_for_decoding(model, dtype, pack=max_new_tokens >= PACKED_FROM)
        tokens = torch.cat((idx, idx.new_empty(len(idx), max_new_tokens)), dim=1)  # (B, end)

        def draw(n: int, x: Tensor) -> None:
            # The head runs at the last position alone; the others are not sampled from.
            logits = twin.lm_head(x[:, -1])[:, :vocab_size].float()  # (B, V)
            tokens[:, n : n + 1] = sample_token(logits, temperature, top_k, generator)

        seen = 0
        with key_value_cache(twin, min(end, block_size)):
            for n in range(T, cached_end):  # tokens so far
                draw(n, twin.transformer(tokens[:, seen:n], start=seen))  # (B, n - seen, C)
                seen = n
        for n in range(max(T, cached_end), end):
            draw(n, twin.transformer(tokens[:, n - block_size : n]))  # (B, block_size, C)
    return tokens.clone()  # an inference tensor could not be trained on


def sample_token(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None = None
) -> Tensor:
    """Draw one token per row of (B, V) logits; return int64 (B, 1)."""
    if temperature == 0.0:
        return logits.argmax(dim=-1, keepdim=True)
    probs = F.softmax(filter_top_k(logits / temperature, top_k), dim=-1)  # (B, V)
    return torch.multinomial(probs, num_samples=1, generator=generator)


def filter_top_k(logits: Tensor, top_k: int | None) -> Tensor:
    """Set all but the top_k largest of each row of (B, V) to -inf; ties with the k-th stay."""
    if top_k is None or top_k >= logits.size(-1):
        return logits
    kth = logits.topk(top_k, dim=-1).values[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth, -torch.inf)


class CachedAttention:
    """Attention function of one layer that remembers the keys and values of earlier calls.

    Args:
        attention: Function that is called with all of them.
        size: Number of tokens S to make room for: one buffer that is filled in place, where
            appending would copy all keys and values at each token.
    """

    def __init__(self, attention: AttentionFn, size: int) -> None:
        self.attention, self.size, self.length = attention, size, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        B, nh, T, hs = k.shape
        if self.length == 0:
            self.k, self.v = (k.new_empty(B, nh, self.size, hs) for _ in range(2))
        start, self.length = self.length, self.length + T
        assert self.length <= self.size, "more tokens than the cache has room for"
        self.k[:, :, start : self.length] = k
        self.v[:, :, start : self.length] = v
        k, v = self.k[:, :, : self.length], self.v[:, :, : self.length]  # (B, nh, length, hs)
        return self.attention(q, k, v, dropout_p)  # (B, nh, T, hs)


@contextmanager
def key_value_cache(model: GPT, size: int) -> Iterator[list[CachedAttention]]:
    """Give each layer of an eager model an empty cache for `size` tokens inside the context.

    The first call of `model.transformer` takes the whole prompt (B, T), each later one the next
    tokens (B, 1) and the number of tokens before them as `start`.
    """
    layers = [module for module in model.modules() if isinstance(module, CausalSelfAttention)]
    caches = [CachedAttention(layer.attention, size) for layer in layers]
    for layer, cache in zip(layers, caches, strict=True):
        layer.attention = cache
    try:
        yield caches
    finally:
        for layer, cache in zip(layers, caches, strict=True):
            layer.attention = cache.attention


# ---- prepacked weights ---------------------------------------------------------------------------
#
# A decoded token reads every weight once and does one multiply-add with it, so its time is that of
# reading. On a CPU, oneDNN reads a matrix in its own layout up to twice as fast as a row-major one,
# and in bfloat16 there is half as much to read (benchmarks/speed.md).


class PackedLinear(nn.Module):
    """Linear layer with its weights in another dtype, another layout, or both.

    Args:
        linear: The layer; its parameters are shared and stay as they are.
        dtype: dtype of the product; the output has the dtype of the input.
        pack: Lay the weights out for oneDNN.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, pack: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.dtype, self.pack = dtype, pack
        weight = linear.weight.detach().to(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if pack else weight
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = x.to(self.dtype)
        if self.pack:
            y = torch.ops.mkldnn._linear_pointwise(h, self._packed, self._bias, "none", [], "")
        else:
            y = F.linear(h, self._packed, self._bias)
        return y.to(x.dtype)


def can_pack(weight: Tensor, dtype: torch.dtype) -> bool:
    """Return whether this build of PyTorch and this CPU have oneDNN's products of a dtype."""
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return bool(ops._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def prepack_for_decoding(model: GPT, dtype: torch.dtype | None = None, pack: bool = True) -> GPT:
    """Return an eager copy of the model in evaluation mode that reads its weights faster.

    The copy shares the parameters but does not follow later changes of them. Where the model is
    restricted to one of PyTorch's attention kernels, the copy takes any. The model, its mode and
    its compiled code stay as they are.

    Args:
        model: The model; a copy in the same dtype is returned as it is.
        dtype: dtype of the linear layers' products; None: the weights' own. The other layers keep
            theirs.
        pack: False keeps the plain layout, without a second copy of the weights in memory.
    """
    weight = model.lm_head.weight
    dtype = dtype or weight.dtype
    if isinstance(model.lm_head, PackedLinear) and model.lm_head.dtype == dtype:
        return model
    shared = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, shared).eval()  # a copy of a compiled module is not compiled
    if model.config.attention in FUSED:  # flash and cuDNN's kernel do not take float32 on CUDA
        for module in twin.modules():
            if isinstance(module, CausalSelfAttention):
                module.attention = sdpa_attention
    pack = pack and can_pack(weight, dtype)
    if pack or dtype != weight.dtype:
        for parent in list(twin.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, PackedLinear(plain(child), dtype, pack))
    return twin
