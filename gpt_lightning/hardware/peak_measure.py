"""The rate of matrix products on this machine, and the file that keeps measured rates."""

import json
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import synchronize

_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "tf32": torch.float32,
    "fp32": torch.float32,
    "fp64": torch.float64,
}
# A few hundred rows reach a CPU core's best rate, a large GPU needs several thousand.
_MEASURED_SIZES = (512, 1024, 2048, 4096, 8192)


def measure_peak(device: torch.device, dtype: str, seconds: float = 1.0) -> float:
    """The best rate of a product of two square matrices on this device, in FLOP/s (2 n^3 each).

    Sizes grow as long as a size fits into the time that is left. On CUDA it leaves its matrices in
    the memory statistics: measure before those are reset.

    Args:
        device: Where to measure.
        dtype: bf16, fp16, tf32, fp32 or fp64.
        seconds: Time to spend, start-up of the libraries aside; one size is always measured.

    Raises:
        UserError: The dtype is unknown, or is tf32 without CUDA.
    """
    if dtype not in _TORCH_DTYPES:
        raise UserError(f"dtype is {dtype!r}; use one of {', '.join(_TORCH_DTYPES)}")
    if dtype == "tf32" and device.type != "cuda":
        raise UserError(f"dtype is 'tf32', which {device.type} does not have; use 'fp32'")
    best = 0.0
    with _float32_matmul_precision("high" if dtype == "tf32" else "highest"):
        _product_rate(_MEASURED_SIZES[0], device, _TORCH_DTYPES[dtype], 0.0)  # loads the libraries
        deadline = time.perf_counter() + seconds
        for n in _MEASURED_SIZES:
            left = deadline - time.perf_counter()
            if best and 2 * (2 * n**3) / best > left:  # one product to warm up and one to time
                break
            share = seconds / len(_MEASURED_SIZES)
            best = max(best, _product_rate(n, device, _TORCH_DTYPES[dtype], share))
    return best


@contextmanager
def _float32_matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _product_rate(n: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """The best FLOP/s of a round of (n, n) @ (n, n), after one to warm up."""
    # Its own generator, so that a seed gives the same run whether or not the peak is measured.
    # Random numbers, because a GPU draws less power on zeros and clocks higher.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    out = a @ b
    synchronize(device)
    deadline = time.perf_counter() + seconds
    best, products = 0.0, 1
    while True:
        start = time.perf_counter()
        for _ in range(products):
            torch.mm(a, b, out=out)
        synchronize(device)
        elapsed = time.perf_counter() - start
        best = max(best, products * 2 * n**3 / elapsed)
        if time.perf_counter() + elapsed > deadline:
            return best
        if elapsed < 0.01:  # s; a round must hide the launch of its kernels and the wait
            products *= 2


def read_rates(path: Path) -> dict[str, float]:
    """FLOP/s by key; empty if there is no usable file."""
    try:
        rates = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(rates, dict) and all(_is_rate(rate) for rate in rates.values()):
            return rates
        problem = "it is not a map of names to positive numbers"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problem = str(error)
    warnings.warn(f"{path} is ignored, the peak is measured again: {problem}", stacklevel=2)
    return {}


def _is_rate(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def write_rates(path: Path, rates: dict[str, float]) -> None:
    """Replaces the file in one step; a cache that cannot be written costs a second next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # the same file system
            draft = Path(folder) / path.name
            draft.write_text(json.dumps(rates, indent=1), encoding="utf-8")
            os.replace(draft, path)
    except OSError as error:
        warnings.warn(f"the measured peak is not kept: {error}", stacklevel=2)
