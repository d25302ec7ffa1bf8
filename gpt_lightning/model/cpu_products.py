"""Matrix products in bfloat16, for models compiled for CPUs with AVX-512 BF16.

`torch.mm` and `torch.addmm` are the plain version. The kernel, products.cpp, packs operands in the
order in which its tiles read them. Subnormal numbers count as 0, as in PyTorch's own products.
Timings: benchmarks/speed.md.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast  # an operator to profilers, as aten::mm

SOURCE = Path(__file__).with_name("products.cpp")


@functools.cache
def kernel() -> Callable[[Tensor, Tensor, Tensor | None, Tensor, int], bool]:
    """Compile the kernel, once for all processes, and return its function.

    The function takes a (M, K), b (K, N), a bias (N) or None, out (M, N), and the number of
    threads. It returns whether it has written the product to out. It leaves to PyTorch what is not
    dense bfloat16 on the CPU, strides that its tiles do not read, and small matrices.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache  # takes a second

    module = CppPythonBindingsCodeCache.load_async(SOURCE.read_text())()
    function: Callable[[Tensor, Tensor, Tensor | None, Tensor, int], bool] = module.product
    return function


replaces_pytorchs = True  # in graphs that are compiled from now on


@contextlib.contextmanager
def left_to_pytorch() -> Iterator[None]:
    """Let graphs that are compiled meanwhile keep PyTorch's products: those of other programs."""
    global replaces_pytorchs
    replaces_pytorchs = False
    try:
        yield
    finally:
        replaces_pytorchs = True


class Products:
    """The functions that a compiled graph calls beside its own loops, with these products."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    def __getattr__(self, name: str) -> Any:
        return getattr(self.functions, name)

    def mm(self, a: Tensor, b: Tensor, *, out: Tensor) -> None:
        """Write a b to out."""
        if not multiply("gpt_lightning::mm", a, b, None, out):
            self.functions.mm(a, b, out=out)

    def addmm(
        self, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1, out: Tensor
    ) -> None:
        """Write beta bias + alpha a b to out."""
        plain_sum = alpha == 1 and beta == 1
        if not (plain_sum and multiply("gpt_lightning::addmm", a, b, bias, out)):
            self.functions.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)


def multiply(name: str, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> bool:
    """Call the kernel for tensors on the CPU, under a name where a profiler looks."""
    if not out.is_cpu:
        return False
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        with _RecordFunctionFast(name):
            return kernel()(a, b, bias, out, torch.get_num_threads())
    return kernel()(a, b, bias, out, torch.get_num_threads())
