"""Rate of matrix products on this machine, and the file that caches measured rates."""

import json
import math
import time
import warnings
from pathlib import Path

import torch

from gpt_lightning.errors import UserError
from gpt_lightning.files import write_atomic
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
    """Return the best rate of a product of two square matrices on a device, in FLOP/s.

    A product is 2 n^3 FLOPs. The sizes grow while the next one fits into the time that is left. On
    CUDA the matrices count in the memory statistics: measure before those are reset.

    Args:
        device: Device to measure.
        dtype: bf16, fp16, tf32, fp32 or fp64.
        seconds: Time to spend, without the time to load libraries; one size is always measured.

    Raises:
        UserError: the dtype is unknown, or is tf32 without CUDA.
    """
    if dtype not in _TORCH_DTYPES:
        raise UserError(f"dtype is {dtype!r}; use one of {', '.join(_TORCH_DTYPES)}")
    if dtype == "tf32" and device.type != "cuda":
        raise UserError(f"dtype is 'tf32', which {device.type} does not have; use 'fp32'")
    best, before = 0.0, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        _product_rate(_MEASURED_SIZES[0], device, _TORCH_DTYPES[dtype], 0.0)  # loads the libraries
        deadline = time.perf_counter() + seconds
        for n in _MEASURED_SIZES:
            left = deadline - time.perf_counter()
            if best and 2 * (2 * n**3) / best > left:  # one product to warm up and one to time
                break
            share = seconds / len(_MEASURED_SIZES)
            best = max(best, _product_rate(n, device, _TORCH_DTYPES[dtype], share))
    finally:
        torch.set_float32_matmul_precision(before)
    return best


def _product_rate(n: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the best FLOP/s of a round of products (n, n) @ (n, n), after one to warm up."""
    # An own generator, so that a seed gives the same run whether or not the peak is measured.
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
        if elapsed < 0.01:  # too short to hide the kernel launches and the synchronization
            products *= 2


def read_rates(path: Path) -> dict[str, float]:
    """Return FLOP/s by key; empty if there is no usable file."""
    try:
        rates: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
        if all(isinstance(rate, float) and 0 < rate < math.inf for rate in rates.values()):
            return rates
        problem = "it is not a map of names to positive numbers"
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        problem = str(error)
    warnings.warn(f"{path} is ignored, the peak is measured again: {problem}", stacklevel=2)
    return {}


def write_rates(path: Path, rates: dict[str, float]) -> None:
    """Replace the file in one step; warn if that fails, and the next run measures again."""
    try:
        write_atomic(path, json.dumps(rates, indent=1).encode())
    except UserError as error:
        warnings.warn(f"the measured peak is not kept: {error}", stacklevel=2)
