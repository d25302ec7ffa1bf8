"""Memory of a piece of work, phase by phase.

CUDA: peaks of the allocator, and a snapshot for https://pytorch.org/memory_viz if it is wanted.
CPU: the profiler's record of each allocation and each free, without the workspaces of libraries.
MPS: samples.
"""

import bisect
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MIB = 2**20
SAMPLE_S = 0.001  # seconds between two samples
PHASE = "phase: "  # prefix of our ranges in a profile, which also has ranges of torch
MAX_ENTRIES = 1_000_000  # CUDA's history; a step of the 2.7B model has about 10,000

PhaseContext = Callable[[str], AbstractContextManager[Any]]
Work = Callable[[PhaseContext], None]  # runs `with phase("forward"): ...`, each name once
Timeline = list[tuple[float, int]]  # (time, bytes from this time on)
Spans = dict[str, tuple[float, float]]  # phase -> first and last time


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes at the begin of a phase, at its peak and at its end, and of its largest allocation."""

    begin: int
    peak: int
    end: int
    largest: int | None = None


@dataclass(frozen=True)
class Memory:
    """Memory of a piece of work.

    Attributes:
        method: Name of the measurement: allocator, profiler or samples.
        phases: Memory of each phase, in order.
    """

    method: str
    phases: dict[str, PhaseMemory]


def measure_memory(work: Work, device: torch.device, snapshot: Path | None = None) -> Memory:
    """Run the work once and return its memory by phase.

    Args:
        work: The work. On a CPU it must also make its inputs: earlier allocations are not seen.
        device: Device of its tensors.
        snapshot: A .pickle for https://pytorch.org/memory_viz, on CUDA only; it is also written if
            the work runs out of memory.
    """
    if device.type == "cuda":
        with history(snapshot):
            return Memory("allocator", allocator_phases(work, device))
    if device.type == "mps":
        return Memory("samples", sampled_phases(work, torch.mps.current_allocated_memory))
    return Memory("profiler", profiled_phases(work))


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Limit the memory of this process, so that Linux does not kill a process of its choice.

    Args:
        device: Device of the work; only a CPU has a limit, and only Linux enforces it.
        gib: Limit in GiB; None: the available memory of the machine.
    """
    if device.type != "cpu":
        return
    bytes_ = available_bytes() if gib is None else int(gib * 2**30)
    if bytes_ is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = bytes_ if hard == resource.RLIM_INFINITY else min(bytes_, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def available_bytes() -> int | None:
    """Return the memory that Linux can allocate without swapping; None on other systems."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 if found else None


def profiled_phases(work: Work) -> dict[str, PhaseMemory]:
    """Measure by the profiler's events of allocations and frees on a CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work(lambda phase: record_function(PHASE + phase))
    # `profiler.events()` has no event of a single allocation, only sums for each op
    assert profiler.profiler is not None
    result = profiler.profiler.kineto_results
    assert result is not None
    changes: Timeline = []
    spans: Spans = {}
    for event in sorted(result.events(), key=lambda event: event.start_ns()):
        name, start_ns = event.name(), event.start_ns()
        if name == "[memory]" and event.device_type().name == "CPU":
            changes.append((start_ns, event.nbytes()))
        elif name.startswith(PHASE):
            spans[name.removeprefix(PHASE)] = (start_ns, start_ns + event.duration_ns())
    changes.sort()  # a free before an allocation of the same nanosecond
    levels = itertools.accumulate(change for _, change in changes)
    timeline = [(t, level) for (t, _), level in zip(changes, levels, strict=True)]
    return phases_of(timeline, spans, single=True)


def phases_of(timeline: Timeline, spans: Spans, single: bool = False) -> dict[str, PhaseMemory]:
    """Return the memory of each phase, read from a timeline.

    Args:
        timeline: Levels of memory in their order.
        spans: First and last time of each phase.
        single: True if every step of the timeline is one allocation or free.
    """
    times = [t for t, _ in timeline]
    levels = [0, *(level for _, level in timeline)]  # levels[i]: after i changes
    found = {}
    for name, (first, last) in spans.items():
        begin, end = bisect.bisect_right(times, first), bisect.bisect_right(times, last)
        inside = levels[begin : end + 1]
        largest = max([0, *(b - a for a, b in itertools.pairwise(inside))]) if single else None
        found[name] = PhaseMemory(inside[0], max(inside), inside[-1], largest)
    return found


def allocator_phases(work: Work, device: torch.device) -> dict[str, PhaseMemory]:
    """Measure by the peaks that the allocator of CUDA keeps."""
    phases: dict[str, PhaseMemory] = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        begin = torch.cuda.memory_allocated(device)
        yield
        torch.cuda.synchronize(device)
        peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        phases[name] = PhaseMemory(begin, peak, end)

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


def sampled_phases(work: Work, read: Callable[[], int]) -> dict[str, PhaseMemory]:
    """Measure by a thread that reads the level every millisecond; a true peak may be higher."""
    timeline: Timeline = []
    spans: Spans = {}
    done = threading.Event()

    def sample() -> float:
        now = time.perf_counter()
        timeline.append((now, read()))
        return now

    def run() -> None:
        while not done.wait(SAMPLE_S):
            sample()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        torch.mps.synchronize()
        first = sample()
        yield
        torch.mps.synchronize()
        spans[name] = (first, sample())

    sampler = threading.Thread(target=run, daemon=True)
    sampler.start()
    try:
        work(phase)
    finally:
        done.set()
        sampler.join()
    timeline.sort()
    return phases_of(timeline, spans)
