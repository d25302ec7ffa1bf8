"""Causal attention, written out and fused, behind one signature.

Shapes: B sequences, nh heads, T queries, S keys (S >= T: the first S - T come from the cache), hs
channels a head.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F

from gpt_lightning.model.dropout import dropout

AttentionFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float
) -> torch.Tensor:
    """The definition: softmax(q k^T / sqrt(hs)) v, with the (T, S) matrix in memory.

    Args:
        q: queries, (B, nh, T, hs).
        k: keys, (B, nh, S, hs).
        v: values, (B, nh, S, hs).
        dropout_p: probability with which an attention weight is dropped; 0 in evaluation.

    Returns:
        (B, nh, T, hs). Query t sees the keys 0 .. S - T + t.
    """
    T, S = q.size(-2), k.size(-2)
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(q.size(-1)))  # (B, nh, T, S)
    # compiled, 25 million scores take 7.4 ms so, 12.5 with a division and int64
    keys = torch.arange(S, dtype=torch.int32, device=q.device)
    future = keys > keys[S - T :, None]  # (T, S)
    weights = scores.masked_fill(future, -math.inf).softmax(dim=-1)
    return dropout(weights, dropout_p) @ v


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float
) -> torch.Tensor:
    """The same function through `F.scaled_dot_product_attention`, which picks a fused kernel.

    `is_causal` aligns the mask to the first key, so it holds only for S == T; a single query (T ==
    1) sees every key and needs no mask. Nothing else occurs: the cache is filled once, then grows
    by one.
    """
    T, S = q.size(-2), k.size(-2)
    assert T in (1, S), "a cached prefix can be continued by one token only"
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=T > 1)


def auto_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout_p: float
) -> torch.Tensor:
    """The faster of the two: naive in compiled code for a CPU where that is cheap, else sdpa.

    There the matrix's scaling, mask, softmax and dropout become one loop between two products,
    while sdpa falls back to a slow path with dropout, and without it has a slow backward
    (benchmarks/speed.md). The matrix is kept for the backward: with dropout sdpa's slow path keeps
    more, up to any length tried; without, sdpa keeps next to nothing, so only short ones are naive.
    """
    compiled = torch.compiler.is_compiling() and q.device.type == "cpu"
    longest = 1024 if dropout_p > 0.0 else 256
    attention = naive_attention if compiled and k.size(-2) <= longest else sdpa_attention
    return attention(q, k, v, dropout_p)


ATTENTION: dict[str, AttentionFn] = {
    "auto": auto_attention,
    "sdpa": sdpa_attention,
    "naive": naive_attention,
}
