"""Peak FLOP/s of a device: published (peaks.yaml), measured here, or set by the user.

A dtype names the arithmetic of the matrix products: bf16, fp16, tf32 (fp32 tensors, CUDA only),
fp32 and, measured only, fp64. peaks.yaml names the document of each published number.
"""

import contextlib
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.files import write_atomic, yaml_beside
from gpt_lightning.hardware.device import device_name
from gpt_lightning.hardware.precision import DTYPES

# Dense bf16 tensor-core peak of one A100, in FLOP/s. nanoGPT divides by it on every device.
A100_BF16_PEAK_FLOPS = 312.0e12
# A few hundred rows reach a CPU core's best rate, a large GPU needs several thousand.
SIZES = (512, 1024, 2048, 4096, 8192)
_TABLE = yaml_beside(__file__)
CHIPS = _TABLE["chips"]  # rows: pattern of the name, label, rates in TFLOP/s, source
RATES = ("bf16", "fp16", "tf32", "fp32")  # dtypes of the rates


@dataclass(frozen=True)
class Peak:
    """Rate that MFU is relative to.

    Attributes:
        flops: FLOP/s of one device, dense, a multiply-add counted as 2.
        label: Name for people, e.g. "H100 SXM bf16 (dense)".
        source: URL of the document with the number, or the way in which it was measured or set.
    """

    flops: float
    label: str
    source: str


def lookup(device_name: str, dtype: str) -> Peak | None:
    """Return the published dense peak of a device.

    Args:
        device_name: Name from `device_name`. The whole name must match: a laptop's chip, a MIG
            slice and a chip with a longer number are different devices.
        dtype: bf16, fp16, tf32 or fp32.

    Returns:
        None if the table has no such chip, or no such number of the chip.
    """
    for pattern, label, *rates, source in CHIPS:
        match = re.fullmatch(rf"(?:NVIDIA )?(?:Tesla )?(?:{pattern})", device_name)
        tflops = dict(zip(RATES, rates, strict=True)).get(dtype)
        if match and tflops:
            flops = tflops * 1e12 * int(match.groupdict().get("cores", 1))
            source = _TABLE["sources"].get(source, source)
            return Peak(flops, f"{label} {dtype} (dense)", source)
    return None


def measured_peak(device: torch.device, dtype: str) -> Peak:
    """Return the best rate of matrix products that was ever measured on the device.

    The cache is a JSON file in the user's cache directory, keyed by the device's name (which
    includes the threads of a CPU), the dtype and torch's version. An unusable file is
    replaced. A busy machine measures too low a rate, so each run measures briefly again and a
    better rate replaces the cached one: the peak only grows.
    """
    name = device_name(device)
    key = f"{name} | {dtype} | torch {torch.__version__}"
    path = Path(platformdirs.user_cache_dir("gpt-lightning")) / "peaks.json"
    rates = read_rates(path)
    rate = measure_peak(device, dtype, seconds=0.3 if key in rates else 1.0)
    if rate > rates.get(key, 0.0):
        rates[key] = rate
        with contextlib.suppress(UserError):  # it is measured again
            write_atomic(path, json.dumps(rates, indent=1).encode())
    label = f"measured {dtype} matrix-product peak of {name}"
    return Peak(rates[key], label, f"torch.mm, torch {torch.__version__}")


def read_rates(path: Path) -> dict[str, float]:
    """Return FLOP/s by key; empty if there is no usable file."""
    with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
        rates = json.loads(path.read_bytes())
        if all(0 < rate < math.inf for rate in rates.values()):
            return rates
    return {}


def measure_peak(device: torch.device, dtype: str, seconds: float = 1.0) -> float:
    """Return the best rate of a product of two square matrices on a device, in FLOP/s.

    A product is 2 n^3 FLOPs. The sizes grow while the next one fits into the time that is left. On
    CUDA the matrices count in the memory statistics: measure before those are reset.

    Args:
        device: Device to measure.
        dtype: bf16, fp16, tf32 (CUDA only), fp32 or fp64.
        seconds: Time to spend, without the time to load libraries; one size is always measured.
    """
    best, before = 0.0, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        operands = DTYPES[dtype].operands
        product_rate(SIZES[0], device, operands, 0.0)  # loads the libraries
        deadline = time.perf_counter() + seconds
        for n in SIZES:
            left = deadline - time.perf_counter()
            if best and 2 * (2 * n**3) / best > left:  # one product to warm up and one to time
                break
            best = max(best, product_rate(n, device, operands, seconds / len(SIZES)))
    finally:
        torch.set_float32_matmul_precision(before)
    return best


def product_rate(n: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return the best FLOP/s of a block of products (n, n) @ (n, n), after one to warm up."""
    from torch.utils.benchmark import Timer  # most runs do not need it

    # An own generator, so that a seed gives the same run whether or not the peak is measured.
    # Random numbers, because a GPU draws less power on zeros and clocks higher.
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=generator).to(dtype) for _ in range(2))
    operands = {"mm": torch.mm, "a": a, "b": b, "out": torch.empty_like(a)}
    timer = Timer("mm(a, b, out=out)", globals=operands, num_threads=torch.get_num_threads())
    return 2 * n**3 / min(timer.blocked_autorange(min_run_time=seconds).times)


def resolve_peak(setting: str | float, device: torch.device, dtype: str) -> tuple[Peak | None, str]:
    """Return the peak that the setting `peak_flops` selects for a device.

    Args:
        setting: "auto": the published peak, if there is one. "measure": measured here, cached.
            "a100": nanoGPT's convention, an A100's bf16 peak on every device. A positive
            number, also as text: FLOP/s of one device.
        device: Device that trains.
        dtype: Arithmetic of its matrix products: bf16, fp16, tf32, fp32 or fp64.

    Returns:
        The peak, or None if it is unknown; and a line for people with the peak or the reason.

    Raises:
        UserError: the setting is none of these.
    """
    if setting == "auto":
        name = device_name(device)
        peak = lookup(name, dtype)
        if peak is None:
            reason = f"no published peak for {name!r} in {dtype}"
            return None, f"no MFU: {reason} (peak_flops: measure measures one)"
    elif setting == "measure":
        peak = measured_peak(device, dtype)
    elif setting == "a100":
        source = "https://github.com/karpathy/nanoGPT/blob/master/model.py"
        peak = Peak(A100_BF16_PEAK_FLOPS, "A100 bf16 (dense), nanoGPT's convention", source)
    else:
        try:
            flops = float(setting)
        except ValueError:
            flops = math.nan
        if isinstance(setting, bool) or not 0 < flops < math.inf:
            raise UserError(
                f"peak_flops is {setting!r}; use auto, measure, a100 or FLOP/s such as 312.0e12"
            )
        peak = Peak(flops, "peak_flops as set", "the run's configuration")
    return peak, f"MFU relative to {peak.flops / 1e12:.4g} TFLOP/s: {peak.label} ({peak.source})"
