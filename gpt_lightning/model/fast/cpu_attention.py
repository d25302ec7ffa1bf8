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

from gpt_lightning.model.fast.compiled_code import kept_code, trusted_instructions

SOURCE = Path(__file__).with_name("causal_attention.cpp")
MULTIPLE = 32  # T and hs are multiples of it


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def cpu_has_kernel() -> bool:
    """Return whether this CPU has the kernel's instructions, and no faster ones.

    With AMX PyTorch's products are several times as fast; the kernel has no AMX instructions.
    """
    units: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # torch 2.10 has none
    return bool(units.get("avx512_bf16")) and not units.get("amx_bf16")


def fits(T: int, hs: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel is for T tokens of hs channels per head on this CPU."""
    whole = T % MULTIPLE == hs % MULTIPLE == 0
    return whole and dtype == torch.bfloat16 and cpu_has_kernel()


def runs(T: int, hs: int, dtype: torch.dtype) -> bool:
    """Return whether the kernel fits, and can be built."""
    return fits(T, hs, dtype) and not build_error()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def build_error() -> str:
    """Build the kernel; return why that failed, or an empty string. PyTorch's own runs then."""
    return library()[1]


class CausalAttention(torch.autograd.Function):
    """`naive_attention` of as many keys as queries. Not differentiable twice.

    Arguments are q, k and v in bfloat16, (B, nh, T, hs), the probability of dropout, and the seeds
    of its mask, int32 (2,), or None without dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, p: float, seeds: Tensor | None
    ) -> Tensor:
        y, lse = torch.ops.gpt_lightning.attention(q, k, v, p, seeds)
        ctx.save_for_backward(q, k, v, lse, seeds)
        ctx.p = p
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, lse, seeds = ctx.saved_tensors
        gradients = torch.ops.gpt_lightning.attention_backward(dy, q, k, v, lse, ctx.p, seeds)
        return *gradients, None, None


OPERATORS = torch.library.Library("gpt_lightning", "FRAGMENT")
OPERATORS.define(
    "attention(Tensor q, Tensor k, Tensor v, float p, Tensor? seeds) -> (Tensor, Tensor)"
)
OPERATORS.define(
    "attention_backward(Tensor dy, Tensor q, Tensor k, Tensor v, Tensor lse, float p, "
    "Tensor? seeds) -> (Tensor, Tensor, Tensor)"
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, p: float, seeds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return y, (B, nh, T, hs), and the logarithms of the rows' sums, float32 (B, nh, T)."""
    y, lse = outputs(q)
    library()[0].forward(numbers(seeds, lse, q, k, v, y), ctypes.c_double(p))
    return y, lse


def outputs(
    q: Tensor, k: Any = None, v: Any = None, p: float = 0.0, seeds: Any = None
) -> tuple[Tensor, Tensor]:
    """Return empty tensors for what `attention` returns."""
    return like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def attention_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, p: float, seeds: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, (B, nh, T, hs), from that of y."""
    gradients = gradients_like(dy, q)
    library()[0].backward(numbers(seeds, lse, dy, q, k, v, *gradients), ctypes.c_double(p))
    return gradients


def gradients_like(dy: Tensor, q: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return empty tensors for what `attention_backward` returns."""
    return like(q), like(q), like(q)


# torch.library.custom_op does the same with two more Python functions at each call
OPERATORS.impl("attention", attention, "CPU")
OPERATORS.impl("attention_backward", attention_backward, "CPU")
torch.library.register_fake("gpt_lightning::attention", outputs, lib=OPERATORS)
torch.library.register_fake("gpt_lightning::attention_backward", gradients_like, lib=OPERATORS)


def like(q: Tensor) -> Tensor:
    """Return an empty (B, nh, T, hs) whose heads are side by side in memory, as (B, T, C)."""
    B, nh, T, hs = q.shape
    return q.new_empty(B, T, nh, hs).transpose(1, 2)


@functools.cache
def library() -> tuple[Any, str]:
    """Compile the kernel, once for all processes; return its two functions, or None and why not."""
    try:
        from torch._inductor.codecache import CppCodeCache  # takes a second

        with kept_code(), trusted_instructions():
            return CppCodeCache.load(SOURCE.read_text(), "cpu"), ""
    except Exception as error:  # another PyTorch, or another compiler
        lines = [line.strip() for line in str(error).splitlines() if "error:" in line.lower()]
        return None, (lines or [f"{type(error).__name__}: {error}".splitlines()[0]])[0]


def numbers(seeds: Tensor | None, lse: Tensor, *views: Tensor) -> Any:
    """Return the kernel's numbers: shape, threads, addresses; address and strides of each view."""
    addresses = 0 if seeds is None else seeds.data_ptr(), lse.data_ptr()
    fields = [*views[0].shape, torch.get_num_threads(), *addresses]
    for x in views:
        *strides, last = x.stride()
        assert last == 1, "channels must be neighbours"
        fields += x.data_ptr(), *strides
    return (ctypes.c_long * len(fields))(*fields)
