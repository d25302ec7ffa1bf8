"""Memory by phase, from whatever a device has that tells it.

CUDA: the allocator's own peaks, and its history if a snapshot is wanted. CPU: the profiler's event
for every tensor that is made or freed; libraries' own workspaces are not among them. MPS: samples.
"""

import bisect
import itertools
import json
import resource
import tempfile
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
PHASE = "phase: "  # tells our ranges in a trace from torch's own
MAX_ENTRIES = 1_000_000  # of CUDA's history; a step of the 2.7B model has some 10,000

PhaseContext = Callable[[str], AbstractContextManager[Any]]
Work = Callable[[PhaseContext], None]  # does `with phase("forward"): ...`, each name once
Timeline = list[tuple[float, int]]  # milliseconds, bytes from then on
Spans = dict[str, tuple[float, float]]  # phase -> first and last millisecond


@dataclass(frozen=True)
class PhaseMemory:
    """Bytes when a phase began, the most during it, and when it ended."""

    begin: int
    peak: int
    end: int


@dataclass(frozen=True)
class Memory:
    """What was measured.

    Attributes:
        method: How, for people.
        phases: By name, in order.
        timeline: Every change, or samples; empty if nobody asked for a history.
        spans: When the phases were, on the timeline's clock.
        events: Whether the timeline has every single allocation.
    """

    method: str
    phases: dict[str, PhaseMemory]
    timeline: Timeline = field(default_factory=list)
    spans: Spans = field(default_factory=dict)
    events: bool = False

    def largest(self, phases: list[str]) -> int | None:
        """Bytes of the largest allocation in some phases; None if single ones were not seen."""
        if not (self.events and self.timeline):
            return None
        spans = [self.spans[name] for name in phases]
        steps = [
            after - before
            for (_, before), (t, after) in itertools.pairwise([(0.0, 0), *self.timeline])
            if any(first <= t <= last for first, last in spans)
        ]
        return max([0, *steps]) if steps else None


def measure_memory(work: Work, device: torch.device, snapshot: Path | None = None) -> Memory:
    """Does the work once and tells its memory by phase.

    Args:
        work: On a CPU it must also make its inputs: what was there before is not seen.
        device: Where its tensors are.
        snapshot: A .pickle for https://pytorch.org/memory_viz, on CUDA only; it is also written if
            the work runs out of memory.
    """
    if device.type == "cuda":
        return allocator_memory(work, device, snapshot)
    if device.type == "mps":
        return sampled_memory(work, torch.mps.current_allocated_memory, torch.mps.synchronize)
    return profiled_memory(work)


def limit_memory(device: torch.device, gib: float | None) -> None:
    """Lets this process fail for want of memory before the system ends a process of its choice.

    Args:
        device: Only a CPU has a limit, and only Linux heeds it.
        gib: Of data; None: what the machine has to spare.
    """
    if device.type != "cpu":
        return
    bytes_ = available_bytes() if gib is None else int(gib * 2**30)
    if bytes_ is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        limit = bytes_ if hard == resource.RLIM_INFINITY else min(bytes_, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def available_bytes() -> int | None:
    """What Linux could hand out without swapping; None on other systems."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return found[0] * 1024 if found else None


# ---- CPU -----------------------------------------------------------------------------------------


def profiled_memory(work: Work) -> Memory:
    """By the profiler's memory events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work(lambda phase: record_function(PHASE + phase))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    timeline, spans = read_trace(events)
    return Memory("profiler", phases_of(timeline, spans), timeline, spans, events=True)


def read_trace(events: list[dict[str, Any]]) -> tuple[Timeline, Spans]:
    """The CPU tensors' bytes over time, and the named ranges, of a Chrome trace."""
    changes = sorted(
        (event["ts"] / 1e3, event["args"]["Bytes"])
        for event in events
        if event["name"] == "[memory]" and event["args"]["Device Type"] == 0
    )
    levels = itertools.accumulate(change for _, change in changes)
    timeline = [(t, level) for (t, _), level in zip(changes, levels, strict=True)]
    ranges = sorted(
        (e for e in events if e["name"].startswith(PHASE)), key=lambda e: float(e["ts"])
    )
    spans = {
        event["name"].removeprefix(PHASE): (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3)
        for event in ranges
    }
    return timeline, spans


def phases_of(timeline: Timeline, spans: Spans) -> dict[str, PhaseMemory]:
    """Memory of each phase, read off a timeline."""
    times = [t for t, _ in timeline]
    levels = [0, *(level for _, level in timeline)]  # levels[i]: after i changes
    found = {}
    for name, (first, last) in spans.items():
        begin, end = bisect.bisect_right(times, first), bisect.bisect_right(times, last)
        found[name] = PhaseMemory(levels[begin], max(levels[begin : end + 1]), levels[end])
    return found


# ---- CUDA ----------------------------------------------------------------------------------------


def allocator_memory(work: Work, device: torch.device, snapshot: Path | None) -> Memory:
    """By the peaks that CUDA's allocator keeps."""
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
    return Memory("allocator", phases, timeline, spans, events=True)


def with_history(work: Callable[[], None], device: torch.device, snapshot: Path) -> Timeline:
    """Does the work, writes the allocator's history, and returns it as a timeline."""
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
    """A timeline of the history's entries.

    Args:
        trace: Of one device; sizes are as asked for, so that the sum is a little below the
            allocator's, which rounds up to 512 bytes.
        before: Bytes when it began.
    """
    signs = {"alloc": 1, "free_requested": -1}  # free_completed: of the same block, later
    entries = [entry for entry in trace if entry["action"] in signs]
    levels = itertools.accumulate(
        (signs[entry["action"]] * entry["size"] for entry in entries), initial=before
    )
    next(levels)
    return [(entry["time_us"] / 1e3, level) for entry, level in zip(entries, levels, strict=True)]


# ---- MPS -----------------------------------------------------------------------------------------


def sampled_memory(work: Work, read: Callable[[], int], synchronize: Callable[[], None]) -> Memory:
    """By a second thread that looks every millisecond: a peak may be higher than what it saw."""
    timeline: Timeline = []
    spans: Spans = {}
    done = threading.Event()

    def look() -> None:
        timeline.append((time.perf_counter() * 1e3, read()))

    def watch() -> None:
        while not done.wait(SAMPLE_S):
            look()

    @contextmanager
    def phase(name: str) -> Iterator[None]:
        synchronize()
        look()
        first = timeline[-1][0]
        yield
        synchronize()
        look()
        spans[name] = (first, timeline[-1][0])

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        work(phase)
    finally:
        done.set()
        watcher.join()
    timeline.sort()
    return Memory("samples", phases_of(timeline, spans), timeline, spans)
