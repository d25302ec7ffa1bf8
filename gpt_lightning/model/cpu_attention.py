"""Causal attention in one kernel, for models compiled for CPUs with AVX-512 BF16.

`attention.naive_attention` is the plain version. The kernel, causal_attention.cpp, computes only
the half of the (T, T) matrix that the mask leaves, and stores none of it. Its dropout has the masks
of `cpu_kernels.hashed_dropout`. Timings: benchmarks/speed.md.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("causal_attention.cpp")
MULTIPLE = 32  # of T and hs


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cpu_has_kernel() -> bool:
    """Return whether the kernel runs on this CPU, and is faster than PyTorch's products.

    With AMX PyTorch's products are several times as fast; the kernel has no AMX instructions.
    """
    units = torch.cpu.get_capabilities()
    return bool(units.get("avx512_bf16")) and not units.get("amx_bf16")


def runs(T: int, hs: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel computes T tokens of hs channels per head on this CPU."""
    whole = T % MULTIPLE == hs % MULTIPLE == 0
    return whole and dtype == torch.bfloat16 and cpu_has_kernel()


class CausalAttention(torch.autograd.Function):
    """`naive_attention` of as many keys as queries. Not differentiable twice.

    Arguments are q, k and v in bfloat16, (B, nh, T, hs), the probability of dropout, and the seeds
    of its mask, int32 (2,), or None without dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float, seeds: Tensor | None
    ) -> Tensor:
        y, lse = attention(q, k, v, p, seeds)
        ctx.save_for_backward(q, k, v, lse, seeds)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, lse, seeds = ctx.saved_tensors
        return *attention_backward(dy, q, k, v, lse, ctx.p, seeds), None, None


@torch.library.custom_op("gpt_lightning::attention", mutates_args=())
def attention(
    q: Tensor, k: Tensor, v: Tensor, p: float, seeds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y, (B, nh, T, hs), and the logarithms of the rows' sums, float32 (B, nh, T)."""
    y, lse = outputs(q)
    library().forward(*arguments(q, p, seeds), *map(view, (q, k, v, y)), pointer(lse))
    return y, lse


@attention.register_fake
def outputs(
    q: Tensor, k: Any = None, v: Any = None, p: float = 0.0, seeds: Any = None
) -> tuple[Tensor, Tensor]:
    """Return empty tensors for what `attention` returns."""
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("gpt_lightning::attention_backward", mutates_args=())
def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, p: float, seeds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, (B, nh, T, hs), from that of y."""
    gradients = like(q), like(q), like(q)
    given = *map(view, (dy, q, k, v)), pointer(lse)
    library().backward(*arguments(q, p, seeds), *given, *map(view, gradients))
    return gradients


@attention_backward.register_fake
def _(dy: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return like(q), like(q), like(q)


def like(q: Tensor) -> Tensor:
    """Return an empty (B, nh, T, hs) whose heads are side by side in memory, as (B, T, C)."""
    B, nh, T, hs = q.shape
    return q.new_empty(B, T, nh, hs).transpose(1, 2)


@functools.cache
def library() -> Any:
    """Compile the kernel, once for all processes, and return its two functions."""
    from torch._inductor.codecache import CppCodeCache  # takes a second

    return CppCodeCache.load(SOURCE.read_text(), "cpu")


def arguments(q: Tensor, p: float, seeds: Tensor | None) -> tuple[Any, ...]:
    """Return the first arguments of both functions: shape and threads, dropout, seeds."""
    return (
        (ctypes.c_long * 5)(*q.shape, torch.get_num_threads()),
        ctypes.c_double(p),
        pointer(seeds),
    )


def view(x: Tensor) -> Any:
    """Return address and strides, the fields of the kernel's View."""
    *strides, last = x.stride()
    assert last == 1, "channels must be neighbours"
    return (ctypes.c_long * 4)(x.data_ptr(), *strides)


def pointer(x: Tensor | None) -> ctypes.c_void_p:
    """Return the address of a contiguous tensor; a null pointer for None."""
    return ctypes.c_void_p(None if x is None else x.data_ptr())
