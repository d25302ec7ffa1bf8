"""Devices: what each kind spells differently, their memory and names, and a machine's record."""

import contextlib
import ctypes
import datetime
import functools
import gc
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from packaging.requirements import Requirement

from gpt_lightning import __version__, parsing

Timestamp = Any  # seconds on a CPU, an event of the stream on other devices
# mallopt's parameters (malloc.h)
M_TRIM_THRESHOLD = -1  # free bytes at the end of the heap from which on it shrinks
M_MMAP_MAX = -4  # number of blocks that may be mapped, and unmapped, one by one
STATUS = "/proc/self/status"  # file of Linux
KEPT_SHARE = 0.85  # share of the machine's memory that a process may keep between two steps


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all work that was queued on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the CPU's generator and the device's.

    torch.manual_seed seeds every backend, and records a stack trace for each one that is not
    initialized yet, which takes up to a millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def record_event(device: torch.device) -> Timestamp:
    """Record a timestamp on the device's stream without synchronizing."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def elapsed_s(start: Timestamp, end: Timestamp) -> float:
    """Return the seconds between two timestamps; the device must have passed both."""
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def device_kind(accelerator: str = "auto") -> str:
    """Return cuda, mps or cpu for a Trainer's accelerator; auto and gpu: the machine's best."""
    if accelerator not in ("auto", "gpu"):
        return accelerator
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


# ---- memory -------------------------------------------------------------------------------------


def free_memory() -> None:
    """Free all memory that is no longer referenced, and forget all compiled code."""
    gc.collect()  # a module and its trainer refer to each other
    hand_back_freed_memory()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if torch.backends.mps.is_available():
        torch.mps.empty_cache()


def keep_freed_memory() -> bool:
    """Let this process reuse freed blocks of any size instead of returning them to the system.

    glibc returns blocks of more than 128 KiB to 32 MiB, and the system clears each page before it
    hands it out again, which can take longer than the computation on it (benchmarks/speed.md). The
    process then stays as large as it ever was, and grows, since blocks of other sizes leave gaps:
    see `limit_kept_memory`.

    Returns:
        True if glibc accepted both settings; other allocators are left alone.
    """
    mallopt = _libc("mallopt")
    return bool(mallopt and mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1))  # -1: never


def hand_back_freed_memory() -> None:
    """Return to the system, once, the memory that this process has freed and kept."""
    if trim := _libc("malloc_trim"):
        trim(0)


def limit_kept_memory() -> None:
    """Return freed memory to the system if this process has nearly all of the machine's.

    A step of 11 GB had grown to 24 GB after 25 steps, when the system killed the process.
    """
    with contextlib.suppress(OSError):  # there is no /proc on macOS
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        if resident / 2**30 > KEPT_SHARE * memory_gib():
            hand_back_freed_memory()


def _libc(function: str) -> Any:
    """Return a function of glibc; None on another system or with another C library."""
    return getattr(ctypes.CDLL(None), function, None) if sys.platform.startswith("linux") else None


def memory_gib() -> float:
    """Return the memory of the machine in GiB."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def reset_peak_memory() -> None:
    """Begin a new peak: of tensors on CUDA, resident of the process on Linux."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(FileNotFoundError):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM


def peak_memory_gib(device: torch.device, reserved: bool = False) -> float:
    """Return the peak memory so far: of tensors on CUDA, resident of the process on a CPU.

    On MPS, where PyTorch counts no peak and Metal's memory is not resident: all that Metal's driver
    has allocated, with the blocks that PyTorch keeps until `free_memory`, or until memory is short.

    Args:
        device: Device that does the work.
        reserved: On CUDA, return what the allocator took from the device for them instead.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_reserved if reserved else torch.cuda.max_memory_allocated
        return peak(device) / 2**30
    if device.type == "mps":
        return torch.mps.driver_allocated_memory() / 2**30
    # ru_maxrss on Linux begins at the resident memory of the parent process
    with contextlib.suppress(FileNotFoundError), open(STATUS, "rb", 0) as status:
        # the line counts KiB
        return int(status.read().partition(b"VmHWM:")[2].split(None, 1)[0]) / 2**20
    import resource  # Windows has none

    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


# ---- names and the machine ----------------------------------------------------------------------


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


def machine_record(argv: list[str], device: torch.device | None = None) -> dict[str, str]:
    """Return the facts for the head of a report, name -> fact.

    Args:
        argv: Arguments of the command, without the name of the program.
        device: Device that was measured; None: the machine's best.
    """
    device = device or torch.device(device_kind())
    facts = {
        "command": f"{parsing.script or 'gpt-lightning'} {shlex.join(argv)}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(device),
        "CPU": f"{device_name(torch.device('cpu'))} of {os.cpu_count()}",
        "memory": f"{memory_gib():.1f} GiB",
        "software": f"gpt_lightning {version()}, torch {torch.__version__}, "
        f"lightning {metadata.version('lightning')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}",
    }
    if device.type == "cuda":
        query = "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        driver = (output_of(*query) or "unknown").splitlines()[0]
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        facts["device"] += f", {memory:.0f} GiB, CUDA {torch.version.cuda}, driver {driver}"
    return facts


def version() -> str:
    """Return the package's version, with the commit if it runs from a checkout."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder.parent / ".git").exists():
        return __version__
    # empty without git, and in a checkout of another user
    commit = output_of("git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")
    return f"{__version__} ({commit})" if commit else __version__


def untried_versions() -> list[str]:
    """Return versions of PyTorch, Lightning and Python that are not those of pyproject.toml."""
    try:
        facts = metadata.metadata("gpt-lightning")
    except metadata.PackageNotFoundError:  # a folder on PYTHONPATH
        return []
    lines = []
    for requirement in map(Requirement, facts.get_all("Requires-Dist", [])):
        if requirement.name in ("torch", "lightning"):
            found = metadata.version(requirement.name)
            if not requirement.specifier.contains(found, prereleases=True):
                lines.append(f"{requirement.name} {found} (tried: {requirement.specifier})")
    python = ".".join(platform.python_version_tuple()[:2])
    tried = [line.rpartition(" ")[2] for line in facts.get_all("Classifier", []) if "3." in line]
    if python not in tried:
        lines.append(f"Python {python} (tried: {', '.join(tried)})")
    return lines
