"""Peak FLOP/s of a device: published (peak_table.yaml), measured here, or set by the user.

A dtype names the arithmetic of the matrix products: bf16, fp16, tf32 (fp32 tensors, CUDA only),
fp32 and, measured only, fp64. peak_table.yaml is the table, peak_measure.py measures.
"""

import functools
import math
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import platformdirs
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.peak_table import A100_BF16_PEAK_FLOPS, APPLE_GPU_MHZ, CHIPS


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
    apple = re.fullmatch(r"Apple (M\d+(?: Pro| Max| Ultra)?), (\d+) GPU cores", device_name)
    if apple:
        return apple_peak(apple[1], int(apple[2]), dtype)
    for chip in CHIPS:
        if re.fullmatch(rf"(?:NVIDIA )?(?:Tesla )?(?:{chip.name})", device_name):
            tflops = chip.tflops(dtype)
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


def measured_peak(device: torch.device, dtype: str) -> Peak:
    """Return the best rate of matrix products that was ever measured on the device.

    The cache is a JSON file in the user's cache directory, keyed by the device's name (which
    includes the threads of a CPU), the dtype and torch's version. An unusable file causes a
    warning and is replaced. A busy machine measures too low a rate, so each run measures briefly
    again and a better rate replaces the cached one: the peak only grows.

    Raises:
        UserError: the dtype is unknown, or is tf32 without CUDA.
    """
    from gpt_lightning.hardware import peak_measure  # for `peak_flops: measure` alone

    name = device_name(device)
    key = f"{name} | {dtype} | torch {torch.__version__}"
    path = Path(platformdirs.user_cache_dir("gpt-lightning")) / "peaks.json"
    rates = peak_measure.read_rates(path)
    rate = peak_measure.measure_peak(device, dtype, seconds=0.3 if key in rates else 1.0)
    if rate > rates.get(key, 0.0):
        rates[key] = rate
        peak_measure.write_rates(path, rates)
    label = f"measured {dtype} matrix-product peak of {name}"
    return Peak(rates[key], label, f"torch.mm, torch {torch.__version__}")


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
