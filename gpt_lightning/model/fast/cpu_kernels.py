"""Layers of a GPT that are faster, or deterministic, in code compiled for a CPU.

`install` changes the classes of a model's layers; their parameters and names stay. Each class
computes the function of PyTorch's own layer (dropout: with another mask of the same distribution)
and calls PyTorch's own layer outside compiled code. Timings: benchmarks/speed.md.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.compiler import is_compiling

from gpt_lightning.model.attention import (
    ATTENTION,
    naive_attention,
    naive_is_faster,
    sdpa_attention,
)
from gpt_lightning.model.fast import cpu_attention
from gpt_lightning.model.fast.cpu_attention import OPERATORS
from gpt_lightning.model.gpt import GPT, CausalSelfAttention
from gpt_lightning.model.loss import NarrowHead, autocast_dtype, pad_columns
from gpt_lightning.model.network import has_our_head
from gpt_lightning.model.transforms import transform


def install(model: GPT, pad_head: bool = True) -> None:
    """Replace the layers of a model that will be compiled for a CPU, in place.

    A user's own layers, output head and functions for attention stay as they are.
    """
    transform(model, LAYERS)
    if pad_head:
        install_head(model)
    attention = model.config.attention
    for module in model.modules():
        if isinstance(module, CausalSelfAttention) and module.attention is ATTENTION[attention]:
            module.attention = KERNELS[attention]


def install_head(model: GPT) -> None:
    """Replace the output head of a model, in place."""
    if has_our_head(model):
        model.lm_head.__class__ = PaddedHead


# ---- dropout -------------------------------------------------------------------------------------
#
# PyTorch draws a CPU's masks from one serial generator, which takes longer than the matrix products
# of the layer. A hash of each element's index and two seeds has no such order: Inductor vectorizes
# it into the loop that uses it, and the backward computes the mask again instead of reading it.


class HashedDropout(nn.Dropout):
    """Dropout whose mask is a hash."""

    def forward(self, x: Tensor) -> Tensor:
        return dropout(x, self.p if self.training else 0.0)


def dropout(x: Tensor, p: float) -> Tensor:
    """Return x with each element zeroed with probability p and the others divided by 1 - p."""
    if p > 0.0 and is_compiling():
        return hashed_dropout(x, p, draw_seeds())
    return F.dropout(x, p)


def draw_seeds() -> Tensor:
    """Return two seeds, int32 (2,), from PyTorch's generator."""
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)


def hashed_dropout(x: Tensor, p: float, seeds: Tensor) -> Tensor:
    """Return `dropout` of x with a mask that is a function of two seeds.

    Args:
        x: Tensor of any shape with fewer than 2^31 elements.
        p: Probability of a zero, exact to 2^-32.
        seeds: int32 (2,), each uniform over all 2^32 values.
    """
    keep = hashed_numbers(x.shape, seeds) >= round(p * 2**32) - 2**31
    return torch.where(keep, x * (1.0 / (1.0 - p)), 0.0)


def hashed_numbers(shape: torch.Size, seeds: Tensor) -> Tensor:
    """Return int32 numbers that look independent and uniform in [-2^31, 2^31).

    The hash is Wellons' triple32, an integer hash with next to no bias
    (https://github.com/skeeto/hash-prospector), of the elements' indices. The first seed is added
    to the indices, the second is mixed in after the first round. The last round is left out: it
    changes the low 18 bits only.
    """
    h = torch.arange(shape.numel(), dtype=torch.int32, device=seeds.device).view(shape) + seeds[0]
    h = mixed(h, 17) * (0xED5AD4BB - 2**32) ^ seeds[1]  # int32 wraps
    h = mixed(h, 11) * (0xAC4C1B51 - 2**32)
    return mixed(h, 15) * 0x31848BAB


def mixed(h: Tensor, shift: int) -> Tensor:
    """Return h ^ (h >> shift) with a logical shift; int32's own repeats the sign bit."""
    low = (h >> shift) & (2 ** (32 - shift) - 1)
    return h ^ low


# ---- GELU ----------------------------------------------------------------------------------------
#
# x times the probability that a normal variable is below x (Hendrycks and Gimpel 2016). Inductor's
# tanh takes three times as long as an exponential, and the backward of exact GELU has one for the
# density and another in its error function.


class FastGELU(nn.GELU):
    """GELU from one exponential per pass."""

    def forward(self, x: Tensor) -> Tensor:
        if not is_compiling() or x.dtype == torch.float64:  # the forms below compute in float32
            return super().forward(x)
        if self.approximate == "tanh":
            return sigmoid_gelu(x)
        return ExactGELU.apply(x)  # type: ignore[no-untyped-call]


def sigmoid_gelu(x: Tensor) -> Tensor:
    """Return GELU's tanh approximation, with (1 + tanh u) / 2 written as sigmoid(2u)."""
    x32 = x.float()
    u = math.sqrt(2 / math.pi) * x32 * (1 + 0.044715 * x32 * x32)
    return (x32 * torch.sigmoid(2 * u)).to(x.dtype)


class ExactGELU(torch.autograd.Function):
    """Exact GELU with one exponential in the forward and one in the backward.

    Not differentiable twice. With torch 2.11, a compiled function of this kind whose result is a
    cast to the dtype that it has already gets a wrong gradient, off by up to 2 here.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        below, _ = normal_distribution(x.float())
        y = x.float() * below
        return y if y.dtype == x.dtype else y.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x = ctx.saved_tensors[0]
        below, density = normal_distribution(x.float())
        return (gradient.float() * (below + x.float() * density)).to(x.dtype)


def normal_distribution(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the standard normal's probability below x and density at x, from one exponential.

    The probability is off by at most 3e-7 in float32, 7.5e-8 of it by the formula: Abramowitz and
    Stegun 1964, 26.2.17.
    """
    density = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    t = 1 / (1 + 0.2316419 * x.abs())
    tail = -1.821255978 + 1.330274429 * t
    for coefficient in (1.781477937, -0.356563782, 0.319381530):
        tail = coefficient + tail * t
    above = density * t * tail  # the probability above |x|
    return torch.where(x > 0, 1 - above, above), density


# ---- embedding -----------------------------------------------------------------------------------
#
# Inductor's threads add the gradients of equal tokens atomically, in no fixed order: two runs of
# one seed part after a few steps, and a run cannot be resumed bit for bit. It is also slow where
# all tokens hit few rows. PyTorch's own kernel has neither fault.


class DeterministicEmbedding(nn.Embedding):
    """Embedding whose gradient has the same bits in each run."""

    def forward(self, idx: Tensor) -> Tensor:
        options = self.padding_idx, self.max_norm, self.scale_grad_by_freq
        if not is_compiling() or options != (None, None, False):
            return super().forward(idx)
        return Lookup.apply(idx, self.weight)  # type: ignore[no-untyped-call]


OPERATORS.define("embedding_gradient(Tensor gradient, Tensor idx, int rows) -> Tensor")


def embedding_gradient(gradient: Tensor, idx: Tensor, rows: int) -> Tensor:
    """Return the sum of the gradients (..., C) of each row, (rows, C)."""
    return torch.ops.aten.embedding_dense_backward(gradient, idx, rows, -1, False)


def empty_rows(gradient: Tensor, idx: Tensor, rows: int) -> Tensor:
    """Return an empty tensor for what `embedding_gradient` returns."""
    return gradient.new_empty(rows, gradient.size(-1))


OPERATORS.impl("embedding_gradient", embedding_gradient, "CPU")
torch.library.register_fake("gpt_lightning::embedding_gradient", empty_rows, lib=OPERATORS)


class Lookup(torch.autograd.Function):
    """`weight[idx]` with a gradient that the compiler calls as it is."""

    @staticmethod
    def forward(ctx: Any, idx: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(idx)
        ctx.rows = weight.size(0)
        return F.embedding(idx, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (idx,) = ctx.saved_tensors
        return None, torch.ops.gpt_lightning.embedding_gradient(gradient, idx, ctx.rows)


# ---- output head ---------------------------------------------------------------------------------


class PaddedHead(NarrowHead):
    """Output head without bias, multiplied in a multiple of 64 rows.

    oneDNN's gradient of a weight with 50,257 rows takes a fifth longer than of one with 50,304. The
    padded copy costs nothing where autocast copies the weight anyway.
    """

    def forward(self, x: Tensor) -> Tensor:
        x, weight = pad_columns(x, self.weight)
        V = len(weight)
        missing = -V % 64
        cast = autocast_dtype(weight) != weight.dtype
        if is_compiling() and 0 < missing < V / 100 and cast:
            return F.linear(x, F.pad(weight, (0, 0, 0, missing)))[..., :V]  # (B, T, V)
        return F.linear(x, weight)


# ---- attention -----------------------------------------------------------------------------------


def hashed_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Return `naive_attention` with the dropout of this module."""
    return naive_attention(q, k, v, dropout_p, dropout)


def auto_attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Return attention by the fastest method: one kernel; naive for short contexts; sdpa."""
    if not is_compiling():
        return sdpa_attention(q, k, v, dropout_p)
    (T, hs), S = q.shape[-2:], k.size(-2)
    if T == S and cpu_attention.runs(T, hs, q.dtype):
        seeds = draw_seeds() if dropout_p > 0.0 else None
        return cpu_attention.CausalAttention.apply(q, k, v, dropout_p, seeds)  # type: ignore[no-untyped-call]
    attention = hashed_attention if naive_is_faster(S, dropout_p) else sdpa_attention
    return attention(q, k, v, dropout_p)


KERNELS = ATTENTION | {"auto": auto_attention, "naive": hashed_attention}
LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Dropout: HashedDropout,
    nn.GELU: FastGELU,
    nn.Embedding: DeterministicEmbedding,
}
