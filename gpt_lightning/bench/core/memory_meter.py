"""Memory of a piece of work, phase by phase.

CUDA: peaks of the allocator, and its history if a snapshot is wanted. CPU: the profiler's event of
each allocation and each free; the workspaces of libraries are not among them. MPS: samples.
"""

import bisect
import itertools
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MIB = 2**20
SAMPLE_S = 0.001  # between two samples
PHASE = "phase: "  # prefix of our ranges in a profile, which also has ranges of torch
MAX_ENTRIES = 1_000_000  # in the history of CUDA; a step of the 2.7B model has about 10,000

PhaseContext = Callable[[str], AbstractContextManager[Any]]
Work = Callable[[PhaseContext], None]  # runs `with phase("forward"): ...`, each name once
Timeline = list[tuple[float, int]]  # (milliseconds, bytes from this time on)
Spans = dict[str, tuple[float, float]]  # phase -> first and last millisecond


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes at the begin of a phase, at its peak and at its end."""

    begin: int
    peak: int
    end: int


@dataclass(frozen=True)
class Memory:
    """Memory of a piece of work.

    Attributes:
        method: Name of the measurement: allocator, profiler or samples.
        phases: Memory of each phase, in order.
        timeline: Every single allocation and free, or samples; empty without a history.
        spans: First and last millisecond of each phase, on the clock of the timeline.
    """

    method: str
    phases: dict[str, PhaseMemory]
    timeline: Timeline = field(default_factory=list)
    spans: Spans = field(default_factory=dict)

    def largest(self, phases: list[str]) -> int | None:
        """Return the bytes of the largest allocation in some phases; None where none is seen."""
        if self.method == "samples" or not self.timeline:
            return None
        spans = [self.spans[name] for name in phases]
        steps = [
            after - before
            for (_, before), (t, after) in itertools.pairwise([(0.0, 0), *self.timeline])
            if any(first <= t <= last for first, last in spans)
        ]
        return max([0, *steps]) if steps else None


def measure_memory(work: Work, device: torch.device, snapshot: Path | None = None) -> Memory:
    """Run the work once and return its memory by phase.

    Args:
        work: The work. On a CPU it must also make its inputs: earlier allocations are not seen.
        device: Device of its tensors.
        snapshot: A .pickle for https://pytorch.org/memory_viz, on CUDA only; it is also written if
            the work runs out of memory.
    """
    if device.type == "cuda":
        return allocator_memory(work, device, snapshot)
    if device.type == "mps":
        return sampled_memory(work, torch.mps.current_allocated_memory, torch.mps.synchronize)
    return profiled_memory(work)


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


# ---- CPU -----------------------------------------------------------------------------------------


def profiled_memory(work: Work) -> Memory:
    """Measure by the profiler's events of allocations and frees."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work(lambda phase: record_function(PHASE + phase))
    # `profiler.events()` has no event of a single allocation, only sums for each op
    assert profiler.profiler is not None
    result = profiler.profiler.kineto_results
    assert result is not None
    start_ns = result.trace_start_ns()
    changes: Timeline = []
    spans: Spans = {}
    for event in sorted(result.events(), key=lambda event: event.start_ns()):
        name, start_ms = event.name(), (event.start_ns() - start_ns) / 1e6
        if name == "[memory]" and event.device_type().name == "CPU":
            changes.append((start_ms, event.nbytes()))
        elif name.startswith(PHASE):
            spans[name.removeprefix(PHASE)] = (start_ms, start_ms + event.duration_ns() / 1e6)
    changes.sort()  # a free before an allocation of the same nanosecond
    levels = itertools.accumulate(change for _, change in changes)
    timeline = [(t, level) for (t, _), level in zip(changes, levels, strict=True)]
    return Memory("profiler", phases_of(timeline, spans), timeline, spans)


def phases_of(timeline: Timeline, spans: Spans) -> dict[str, PhaseMemory]:
    """Return the memory of each phase, read from a timeline."""
    times = [t for t, _ in timeline]
    levels = [0, *(level for _, level in timeline)]  # levels[i]: after i changes
    found = {}
    for name, (first, last) in spans.items():
        begin, end = bisect.bisect_right(times, first), bisect.bisect_right(times, last)
        found[name] = PhaseMemory(levels[begin], max(levels[begin : end + 1]), levels[end])
    return found


# ---- CUDA ----------------------------------------------------------------------------------------


def allocator_memory(work: Work, device: torch.device, snapshot: Path | None) -> Memory:
    """Measure by the peaks that the allocator of CUDA keeps."""
    phases: dict[str, PhaseMemory] = {}
    spans: Spans = {}

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        begin, first = torch.cuda.memory_allocated(device), time.time_ns() / 1e6
        yield
        torch.cuda.synchronize(device)
        peak, end = torch.cuda.max_memory_allocated(device), torch.cuda.memory_allocated(device)
        phases[name] = PhaseMemory(begin, peak, end)
        spans[name] = (first, time.time_ns() / 1e6)

    if snapshot is None:
        work(phase)
        return Memory("allocator", phases, spans=spans)
    timeline = with_history(lambda: work(phase), device, snapshot)
    return Memory("allocator", phases, timeline, spans)


def with_history(work: Callable[[], None], device: torch.device, snapshot: Path) -> Timeline:
    """Run the work, write the history of the allocator, and return it as a timeline."""
    before = torch.cuda.memory_allocated(device)
    torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")
    try:
        work()
        traces = torch.cuda.memory._snapshot(device)["device_traces"]
        return read_history(traces[torch.cuda.current_device()], before)
    finally:
        torch.cuda.memory._dump_snapshot(str(snapshot))
        torch.cuda.memory._record_memory_history(enabled=None)


def read_history(trace: list[dict[str, Any]], before: int) -> Timeline:
    """Return the timeline of a history.

    Args:
        trace: Entries of one device. Sizes are the requested ones: their sum is a little below the
            allocator's, which rounds up to 512 bytes.
        before: Bytes when the history began.
    """
    signs = {"alloc": 1, "free_requested": -1}  # free_completed follows, for the same block
    entries = [entry for entry in trace if entry["action"] in signs]
    levels = itertools.accumulate(
        (signs[entry["action"]] * entry["size"] for entry in entries), initial=before
    )
    next(levels)
    return [(entry["time_us"] / 1e3, level) for entry, level in zip(entries, levels, strict=True)]


# ---- MPS -----------------------------------------------------------------------------------------


def sampled_memory(work: Work, read: Callable[[], int], synchronize: Callable[[], None]) -> Memory:
    """Measure by a thread that reads the level every millisecond; a true peak may be higher."""
    timeline: Timeline = []
    spans: Spans = {}
    done = threading.Event()

    def sample() -> float:
        now = time.perf_counter() * 1e3
        timeline.append((now, read()))
        return now

    def run() -> None:
        while not done.wait(SAMPLE_S):
            sample()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        synchronize()
        first = sample()
        yield
        synchronize()
        spans[name] = (first, sample())

    sampler = threading.Thread(target=run, daemon=True)
    sampler.start()
    try:
        work(phase)
    finally:
        done.set()
        sampler.join()
    timeline.sort()
    return Memory("samples", phases_of(timeline, spans), timeline, spans)
