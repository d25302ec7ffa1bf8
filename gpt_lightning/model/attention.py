"""Causal attention, written out and fused, behind one signature.

Shapes: B sequences, nh heads, T queries, S keys (S >= T: the first S - T come from a key-value
cache), hs channels per head.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

AttentionFn = Callable[[Tensor, Tensor, Tensor, float], Tensor]
DropoutFn = Callable[[Tensor, float], Tensor]
CHUNK = 512  # queries whose weights `chunked_attention` has in memory at a time


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
    return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout_p, is_causal=T > 1)


def chunked_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Return `naive_attention` by chunks of queries, each recomputed in the backward pass.

    Its memory is that of a (CHUNK, S) matrix. For devices without a fused kernel, such as MPS,
    where PyTorch trains with the whole (T, S) matrix (torch 2.13).
    """
    seen, chunks = k.size(-2) - q.size(-2), []
    for queries in q.split(CHUNK, dim=-2):
        seen += queries.size(-2)
        tensors = (queries, k[..., :seen, :], v[..., :seen, :])
        chunks.append(checkpoint(naive_attention, *tensors, dropout_p, use_reentrant=False))
    return torch.cat(chunks, dim=-2)


ATTENTION: dict[str, AttentionFn] = {
    "auto": sdpa_attention,
    "sdpa": sdpa_attention,
    "naive": naive_attention,
    "chunked": chunked_attention,
}
