"""Causal attention, written out and fused, behind one signature.

Shapes: B sequences, nh heads, T queries, S keys (S >= T: the first S - T come from a key-value
cache), hs channels per head.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

AttentionFn = Callable[[Tensor, Tensor, Tensor, float], Tensor]
DropoutFn = Callable[[Tensor, float], Tensor]
NO_KERNEL = ("no viable backend", "no available kernel")  # PyTorch's words


def naive_attention(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, dropout: DropoutFn = F.dropout
) -> Tensor:
    """Return softmax(q k^T / sqrt(hs)) v, with the (T, S) matrix in memory.

    Args:
        q: Queries, (B, nh, T, hs).
        k: Keys, (B, nh, S, hs).
        v: Values, (B, nh, S, hs).
        dropout_p: Probability with which an attention weight is dropped; 0 in evaluation.
        dropout: Function that drops them.

    Returns:
        (B, nh, T, hs). Query t sees the keys 0 .. S - T + t.
    """
    T, S = q.size(-2), k.size(-2)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.size(-1)))  # (B, nh, T, S)
    keys = torch.arange(S, dtype=torch.int32, device=q.device)  # (S,)
    future = keys > keys[S - T :, None]  # (T, S)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)  # (B, nh, T, S)
    return dropout(weights, dropout_p) @ v  # (B, nh, T, hs)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Return the same through `F.scaled_dot_product_attention`, which picks a fused kernel.

    `is_causal` aligns the mask to the first key, so it holds only for S == T; a single query (T ==
    1) sees every key and needs no mask. No other shape occurs: a prompt fills the key-value cache
    at once, then it grows by one token at a time.
    """
    T, S = q.size(-2), k.size(-2)
    assert T in (1, S), "a cached prefix can be continued by one token only"
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=bool(T > 1))


# PyTorch's fused kernels: name -> backend, and a part of the name of its node in the autograd graph
FUSED = {
    "flash": (SDPBackend.FLASH_ATTENTION, "FlashAttention"),
    "cudnn": (SDPBackend.CUDNN_ATTENTION, "CudnnAttention"),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, "EfficientAttention"),
}


class FusedAttention:
    """`sdpa_attention` restricted to one kernel of FUSED; a model with it can be pickled."""

    def __init__(self, kernel: str):
        self.kernel, self.__name__ = kernel, f"{kernel}_attention"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        with sdpa_kernel(FUSED[self.kernel][0]):
            return sdpa_attention(q, k, v, dropout_p)


ATTENTION: dict[str, AttentionFn] = {
    "auto": sdpa_attention,
    "sdpa": sdpa_attention,
    "naive": naive_attention,
    **{kernel: FusedAttention(kernel) for kernel in FUSED},
}


def naive_is_faster(S: int, dropout_p: float) -> bool:
    """Return whether `attention: auto` is naive for S keys in a model compiled for a CPU.

    Compiled for a CPU, the naive matrix's scaling, mask, softmax and dropout become one loop
    between two products, while sdpa takes a slow path with dropout and has a slow backward without
    it. The naive matrix is kept for the backward. With dropout sdpa's slow path keeps more than
    that; without, it keeps next to nothing, so that only short contexts are naive.
    """
    longest = 1024 if dropout_p > 0.0 else 256
    return longest >= S


# ---- the kernel that runs ------------------------------------------------------------------------


class NoKernelError(Exception):
    """PyTorch has no such kernel for a call; the message has its reasons."""


def find_kernel(attention: AttentionFn, like: Tensor, hs: int, dropout_p: float) -> str:
    """Return the kernel that computes attention here: flash, cudnn, efficient, or math without one.

    It is that of a small call: PyTorch chooses by device, dtype, channels per head and dropout.

    Args:
        attention: Function of ATTENTION.
        like: Tensor with the device and the dtype of the queries.
        hs: Channels per head.
        dropout_p: Probability with which an attention weight is dropped.

    Raises:
        NoKernelError: PyTorch has no such kernel here.
    """
    q, k, v = like.new_zeros(3, 1, 1, 128, hs).requires_grad_()  # 3 x (B, nh, T, hs)
    with torch.random.fork_rng(devices=[]):  # a CPU's dropout draws from the run's numbers
        nodes = graph_nodes(lambda: attention(q, k, v, dropout_p))
    found = (kernel for kernel, (_, node) in FUSED.items() if any(node in name for name in nodes))
    return next(found, "math")


def graph_nodes(call: Callable[[], Tensor]) -> set[str]:
    """Return the names of the autograd nodes behind the tensor that a call returns.

    Raises:
        NoKernelError: PyTorch has no kernel for the call.
    """
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            rest: list[Any] = [call().grad_fn]
        except RuntimeError as error:
            if not any(sign in str(error).lower() for sign in NO_KERNEL):
                raise
            said = [str(reason.message).partition(" (Triggered")[0] for reason in reasons]
            raise NoKernelError(" ".join([*said, str(error)])) from error
    names = set()
    while rest:
        node = rest.pop()
        if node:
            names.add(node.name())
            rest += [parent for parent, _ in node.next_functions]
    return names
