"""Peak FLOP/s of a device: published (peaks.yaml), measured here, or set by the user.

A dtype names the arithmetic of the matrix products: bf16, fp16, tf32 (fp32 tensors, CUDA only),
fp32 and, measured only, fp64. peaks.yaml names the document of each published number.
"""

import functools
import json
import math
import platform
import re
import subprocess
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import torch
import yaml

from gpt_lightning.errors import UserError
from gpt_lightning.files import write_atomic
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.hardware.precision import DTYPES

# Dense bf16 tensor-core peak of one A100, in FLOP/s. nanoGPT divides by it on every device.
A100_BF16_PEAK_FLOPS = 312.0e12
# A few hundred rows reach a CPU core's best rate, a large GPU needs several thousand.
_MEASURED_SIZES = (512, 1024, 2048, 4096, 8192)


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


# ---- published -----------------------------------------------------------------------------------


RATES = ("bf16", "fp16", "tf32", "fp32")  # dtypes of the table


class Chip(NamedTuple):
    """One row of the table.

    Attributes:
        name: Regular expression for the name of the device (`device_name`) without the
            optional prefixes "NVIDIA " and "Tesla ".
        label: Name of the chip for people.
        bf16: TFLOP/s in bfloat16; fp16, tf32 and fp32 likewise; None if there is no number.
        source: URL of the document that states the numbers.
    """

    name: str
    label: str
    bf16: float | None
    fp16: float | None
    tf32: float | None
    fp32: float
    source: str


def _geforce(model: str, cores: int, boost_mhz: int, source: str) -> Chip:
    """Return a desktop GeForce of the series 30, 40 or 50, by the ratios of three white papers.

    A CUDA core does one multiply-add a clock. On a GeForce the tensor cores run 16-bit products
    with FP32 accumulation at twice that rate and TF32 at that rate; the figure often quoted for
    fp16, twice as high again, is with FP16 accumulation. The papers' rows (fp32, bf16, tf32):
    RTX 3090 35.6, 71, 35.6; RTX 4090 82.6, 165.2, 82.6; RTX 5090 104.8, 209.5, 104.8.
    """
    fp32 = cores * 2 * boost_mhz * 1e6 / 1e12
    label = f"RTX {model}"
    return Chip(f"GeForce {label}", label, 2 * fp32, 2 * fp32, fp32, fp32, source)


_TABLE: Any = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_SOURCES: dict[str, str] = _TABLE["sources"]


def _rows(name: str) -> list[Any]:
    return [[*numbers, _SOURCES[source]] for *numbers, source in _TABLE[name]]


CHIPS = [
    *(Chip(*row) for row in _rows("chips")),
    *(_geforce(*row) for row in _rows("geforce")),
]
# chip -> highest GPU clock in MHz, and its source
APPLE_GPU_MHZ: dict[str, tuple[int, str]] = {
    chip: (mhz, _SOURCES.get(source, source))
    for chip, (mhz, source) in _TABLE["apple_gpu_mhz"].items()
}


def lookup(device_name: str, dtype: str) -> Peak | None:
    """Return the published dense peak of a device.

    Args:
        device_name: Name from `device_name`. The whole name must match: a laptop's chip, a MIG
            slice and a chip with a longer number are different devices.
        dtype: bf16, fp16, tf32 or fp32.

    Returns:
        None if the table has no such chip, or no such number of the chip.
    """
    apple = re.fullmatch(r"Apple (M\d+(?: Pro| Max| Ultra)?), (\d+) GPU cores", device_name)
    if apple:
        return apple_peak(apple[1], int(apple[2]), dtype)
    for chip in CHIPS:
        if re.fullmatch(rf"(?:NVIDIA )?(?:Tesla )?(?:{chip.name})", device_name):
            tflops = getattr(chip, dtype) if dtype in RATES else None
            label = f"{chip.label} {dtype} (dense)"
            return None if tflops is None else Peak(tflops * 1e12, label, chip.source)
    return None


def apple_peak(chip: str, gpu_cores: int, dtype: str) -> Peak | None:
    """Return the peak of an Apple GPU: cores x 128 ALUs x 2 FLOPs per multiply-add x clock.

    16-bit products run on the same ALUs at the same rate in the families M1 to M4 (fp16 measured on
    M1 and M2: https://github.com/philipturner/metal-benchmarks; that M5 is the first to issue two a
    clock: https://forums.macrumors.com/threads/apple-silicon-mac-chips.2471322/page-2). M1 has no
    bf16 arithmetic and widens to fp32, so that the ALU rate is an upper bound there too. M5 adds
    matrix units for 16-bit products, whose rate only one early benchmark gives: no peak. There is
    no TF32.

    Args:
        chip: "M1" to "M5" with " Pro", " Max" or " Ultra".
        gpu_cores: GPU cores of this machine; Apple sells several counts under one name.
        dtype: fp32, fp16 or bf16.
    """
    sixteen_bit = dtype in ("fp16", "bf16") and not chip.startswith("M5")
    if chip not in APPLE_GPU_MHZ or not (dtype == "fp32" or sixteen_bit):
        return None
    mhz, source = APPLE_GPU_MHZ[chip]
    label = f"Apple {chip}, {gpu_cores} GPU cores, {dtype} at {mhz} MHz"
    return Peak(gpu_cores * 128 * 2 * mhz * 1e6, label, source)


def device_name(device: torch.device) -> str:
    """Return the name of a device, for people and for `lookup`.

    Returns:
        CUDA: the driver's name, "NVIDIA H200". ROCm: the same with the compute units, "AMD
        Instinct MI300X, 304 CUs", because a partition of such a chip has the name of the whole.
        MPS: "Apple M2 Max, 38 GPU cores". CPU: the model and the threads that torch uses, "AMD
        EPYC, 8 threads", because the rate grows with them.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if torch.version.hip is None:
            return name
        return f"{name}, {torch.cuda.get_device_properties(device).multi_processor_count} CUs"
    if device.type == "mps":
        return _apple_gpu_name()
    return f"{_cpu_model()}, {torch.get_num_threads()} threads"


def output_of(*command: str) -> str:
    """Return the text that a program prints; empty if it fails or takes longer than 10 s."""
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


@functools.cache  # system_profiler takes up to seconds
def _apple_gpu_name() -> str:
    chip = output_of("sysctl", "-n", "machdep.cpu.brand_string") or "Apple"  # "Apple M2 Max"
    displays = output_of("system_profiler", "SPDisplaysDataType", "-json")
    cores = re.search(r'"sppci_cores" *: *"(\d+)"', displays)  # absent in a virtual machine
    return f"{chip}, {cores[1]} GPU cores" if cores else chip


def _cpu_model() -> str:
    if platform.system() == "Darwin":
        return output_of("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)  # absent on ARM
    return model[1].strip() if model else platform.processor() or platform.machine()


# ---- measured ------------------------------------------------------------------------------------


def measured_peak(device: torch.device, dtype: str) -> Peak:
    """Return the best rate of matrix products that was ever measured on the device.

    The cache is a JSON file in the user's cache directory, keyed by the device's name (which
    includes the threads of a CPU), the dtype and torch's version. An unusable file causes a
    warning and is replaced. A busy machine measures too low a rate, so each run measures briefly
    again and a better rate replaces the cached one: the peak only grows.

    Raises:
        UserError: the dtype is unknown, or is tf32 without CUDA.
    """
    name = device_name(device)
    key = f"{name} | {dtype} | torch {torch.__version__}"
    path = Path(platformdirs.user_cache_dir("gpt-lightning")) / "peaks.json"
    rates = read_rates(path)
    rate = measure_peak(device, dtype, seconds=0.3 if key in rates else 1.0)
    if rate > rates.get(key, 0.0):
        rates[key] = rate
        write_rates(path, rates)
    label = f"measured {dtype} matrix-product peak of {name}"
    return Peak(rates[key], label, f"torch.mm, torch {torch.__version__}")


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
    if dtype not in DTYPES:
        raise UserError(f"dtype is {dtype!r}; use one of {', '.join(DTYPES)}")
    if dtype == "tf32" and device.type != "cuda":
        raise UserError(f"dtype is 'tf32', which {device.type} does not have; use 'fp32'")
    best, before = 0.0, torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        operands = DTYPES[dtype].operands
        _product_rate(_MEASURED_SIZES[0], device, operands, 0.0)  # loads the libraries
        deadline = time.perf_counter() + seconds
        for n in _MEASURED_SIZES:
            left = deadline - time.perf_counter()
            if best and 2 * (2 * n**3) / best > left:  # one product to warm up and one to time
                break
            share = seconds / len(_MEASURED_SIZES)
            best = max(best, _product_rate(n, device, operands, share))
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


# ---- as set --------------------------------------------------------------------------------------


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
        peak = Peak(_positive(setting), "peak_flops as set", "the run's configuration")
    return peak, f"MFU relative to {peak.flops / 1e12:.4g} TFLOP/s: {peak.label} ({peak.source})"


def _positive(setting: str | float) -> float:
    try:
        flops = math.nan if isinstance(setting, bool) else float(setting)
    except ValueError:
        flops = math.nan
    if not 0 < flops < math.inf:
        raise UserError(
            f"peak_flops is {setting!r}; use auto, measure, a100 or a positive number of FLOP/s "
            "such as 312.0e12"
        )
    return flops
