"""Memory of a piece of work, phase by phase.

CUDA: peaks of the allocator, and a snapshot for https://pytorch.org/memory_viz if it is wanted.
CPU: the profiler's record of each allocation and each free, without the workspaces of libraries.
MPS: peaks of what Metal's driver has allocated, with the blocks that PyTorch keeps.
"""

import itertools
import re
import resource
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from gpt_lightning.hardware.device import memory_gib, synchronize

MIB, GIB = 2**20, 2**30
PHASE = "phase: "  # prefix of our ranges in a profile, which also has ranges of torch
MAX_ENTRIES = 1_000_000  # CUDA's history; a step of the 2.7B model has about 10,000

PhaseContext = Callable[[str], AbstractContextManager[Any]]
Work = Callable[[PhaseContext], object]  # runs `with phase("forward"): ...`, each name once


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes at the begin of a phase, at its peak and at its end, and of its largest allocation."""

    begin: int
    peak: int
    end: int
    largest: int | None = None


def held_and_peak(phases: dict[str, PhaseMemory]) -> dict[str, float]:
    """Return columns: memory that the forward keeps, and the peak of all phases, in MiB."""
    forward = phases["forward"]
    peak = max(phase.peak for phase in phases.values())
    return {"held_mib": (forward.end - forward.begin) / MIB, "peak_mib": peak / MIB}


def measure_memory(
    work: Work, device: torch.device, snapshot: Path | None = None
) -> tuple[str, dict[str, PhaseMemory]]:
    """Run the work once and measure its memory by phase.

    Args:
        work: The work. On a CPU it must also make its inputs: earlier allocations are not seen.
        device: Device of its tensors.
        snapshot: A .pickle for https://pytorch.org/memory_viz, on CUDA only; it is also written if
            the work runs out of memory.

    Returns:
        The method, allocator, profiler or driver, and the memory of each phase in order.
    """
    if device.type == "cpu":
        return "profiler", profiled_phases(work)
    with history(snapshot):
        phases = allocated_phases(work, device)
    return "allocator" if device.type == "cuda" else "driver", phases


def limit_memory(device: torch.device, gib: float | None, share: float = 1.0) -> float | None:
    """Limit the memory of this process, so that Linux does not kill a process of its choice.

    Args:
        device: Device of the work; only a CPU has a limit, and only Linux enforces it.
        gib: Limit in GiB; None: a share of the available memory.
        share: The share.

    Returns:
        The limit in GiB; None on other devices.
    """
    if device.type != "cpu":
        return None
    gib = gib or share * available_gib()
    limit, (_, hard) = int(gib * GIB), resource.getrlimit(resource.RLIMIT_DATA)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    return gib


def available_gib() -> float:
    """Return the memory that Linux can allocate without swapping; elsewhere the machine's."""
    path = Path("/proc/meminfo")
    found = re.search(r"MemAvailable: *(\d+) kB", path.read_text() if path.exists() else "")
    return int(found[1]) / 2**20 if found else memory_gib()


def profiled_phases(work: Work) -> dict[str, PhaseMemory]:
    """Measure by the profiler's events of allocations and frees on a CPU."""
    profiler: Any = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    with profiler:
        work(lambda phase: record_function(PHASE + phase))
    # `profiler.events()` has no event of a single allocation, only sums for each op
    changes, spans = [], {}
    for event in profiler.profiler.kineto_results.events():
        name, start_ns = event.name(), event.start_ns()
        if name == "[memory]" and event.device_type().name == "CPU":
            changes.append((start_ns, event.nbytes()))
        elif name.startswith(PHASE):
            spans[name.removeprefix(PHASE)] = (start_ns, start_ns + event.duration_ns())
    changes.sort()  # a free before an allocation of the same nanosecond
    times = [t for t, _ in changes]
    # levels[i] is the number of bytes after i changes
    levels = [0, *itertools.accumulate(change for _, change in changes)]
    phases = {}
    for name, (first, last) in sorted(spans.items(), key=lambda span: span[1]):
        begin, end = bisect_right(times, first), bisect_right(times, last)
        inside = levels[begin : end + 1]
        largest = max([0, *(change for _, change in changes[begin:end])])
        phases[name] = PhaseMemory(inside[0], max(inside), inside[-1], largest)
    return phases


def allocated_phases(work: Work, device: torch.device) -> dict[str, PhaseMemory]:
    """Measure by the peaks that CUDA's allocator or Metal's driver keeps."""
    phases: dict[str, PhaseMemory] = {}
    module = torch.get_device_module(device)
    level, peak = (
        (module.memory_allocated, module.max_memory_allocated)
        if device.type == "cuda"
        else (module.current_allocated_memory, module.driver_allocated_memory)
    )

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        synchronize(device)
        if device.type == "cuda":
            module.reset_peak_memory_stats(device)
        else:
            module.empty_cache()
        begin = level()
        yield
        synchronize(device)
        phases[name] = PhaseMemory(begin, peak(), level())

    work(phase)
    return phases


@contextmanager
def history(snapshot: Path | None) -> Iterator[None]:
    """Write the history of CUDA's allocator at the end, where this torch can record it."""
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if snapshot is None or record is None:
        yield
        return
    record(max_entries=MAX_ENTRIES, stacks="python")
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        record(enabled=None)
