"""Work of the device in a Chrome trace of torch.profiler, with the named ranges around it.

On a GPU work is a kernel, a copy or a fill; it belongs to the op that launched it. On a CPU work is
an op, without the time of the ops that it calls.

`profiler.events()` is not enough: in torch 2.10, the oldest version that this package supports, an
event has no kind of activity, and the `kernels` of an op have no start time.
"""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.profiler import ProfilerActivity, profile, schedule

from gpt_lightning.hardware.device import synchronize

OP = r"(?!autograd|torch)\w+::"  # begin of the name of an op that computes
KINDS = ("products", "softmax", "elementwise", "reductions", "other")
Event = dict[str, Any]  # ts and dur are in microseconds

TABLE = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text(encoding="utf-8"))
OPS, NAMES, PARTS = (
    {kind: "|".join(p) for kind, p in TABLE[of].items()} for of in ("ops", "kernels", "parts")
)


@dataclass(frozen=True)
class Range:
    """One occurrence of a named range.

    Attributes:
        path: Names of the ranges around it, from the outermost one, then its own name.
        start_ms: Time at which the program entered it.
        end_ms: Time at which the program left it.
    """

    path: tuple[str, ...]
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Work:
    """One kernel, copy, fill or CPU op.

    Attributes:
        op: Name of the op that launched it; empty if unknown.
        kernel: Name of the kernel; on a CPU that of the op.
        inside: Ranges in which it was launched, from the outermost to the innermost.
        start_ms: Time at which the device began.
        ms: Duration on the device.
    """

    op: str
    kernel: str
    inside: tuple[Range, ...]
    start_ms: float
    ms: float

    @property
    def kind(self) -> str:
        """Kind of the work, one of KINDS."""
        if re.match(r"Mem(cpy|set)", self.kernel):
            return "other"
        if not self.op:
            found = (k for k, names in NAMES.items() if re.search(names, self.kernel.lower()))
        else:
            name = re.sub("^(aten|gpt_lightning)::", "", self.op).rstrip("_")
            found = (k for k, names in OPS.items() if re.fullmatch(names, name))
        return next(found, "other")

    @property
    def part(self) -> str:
        """Part of the step in a budget, one of PARTS or other."""
        name = (self.op if re.match(OP, self.op) else self.kernel).lower()
        return next((part for part, names in PARTS.items() if re.search(names, name)), "other")


def profiled_steps(device: torch.device, steps: int, path: Path) -> Iterator[None]:
    """Yield before each step to profile, of which the first is not recorded; write the trace.

    Args:
        device: Device that does the work.
        steps: Number of recorded steps.
        path: File of the trace, .json.gz.
    """
    gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    once = schedule(wait=0, warmup=1, active=steps, repeat=1)
    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, *gpu], schedule=once) as profiler:
        for _ in range(1 + steps):
            yield
            profiler.step()
        synchronize(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))


def read_file(path: Path, names: Sequence[str], on_gpu: bool) -> list[Work]:
    """Return the work of `read_trace` in a file of `profiled_steps`.

    Raises:
        RuntimeError: The profiler recorded no kernel.
    """
    with gzip.open(path, "rt", encoding="utf-8") as file:
        works = read_trace(json.load(file), names, on_gpu)
    if not works:
        raise RuntimeError("torch.profiler recorded no kernel; may this user profile the GPU?")
    return works


def read_trace(trace: dict[str, Any], names: Sequence[str], on_gpu: bool) -> list[Work]:
    """Return the work that was launched inside named ranges.

    Args:
        trace: A parsed Chrome trace.
        names: Names of the ranges; others, such as the profiler's own, are skipped.
        on_gpu: True if the device is a GPU, False if it is a CPU.
    """
    of: dict[str, list[Event]] = defaultdict(list)  # by the profiler's category
    for event in trace["traceEvents"]:
        if event.get("ph") == "X":
            of[event.get("cat", "")].append(event)
    annotations = [event for event in of["user_annotation"] if event["name"] in names]
    launches = gpu_launches(of) if on_gpu else cpu_work(of["cpu_op"])
    return list(placed(annotations, launches))


Launch = tuple[float, tuple[str, str, float, float]]  # launch; op, kernel, start and duration


def gpu_launches(of: dict[str, list[Event]]) -> list[Launch]:
    """Return kernels, copies and fills with the times at which the program launched them."""
    ops = {event["args"].get("External id"): event for event in of["cpu_op"]}
    runtime = [*of["cuda_runtime"], *of["cuda_driver"]]
    calls = {event["args"].get("correlation"): event for event in runtime}
    found = []
    for event in [*of["kernel"], *of["gpu_memcpy"], *of["gpu_memset"]]:
        op = ops.get(event["args"].get("External id"))
        call = calls.get(event["args"].get("correlation")) or op or event
        name = op["name"] if op is not None else ""
        found.append((call["ts"], (name, event["name"], event["ts"], event["dur"])))
    return found


def cpu_work(ops: list[Event]) -> list[Launch]:
    """Return the ops that compute, each without the time of the ops that it calls."""
    own = {id(op): op["dur"] for op in ops}
    open_ops: dict[int, list[Event]] = defaultdict(list)  # by thread
    for op in sorted(ops, key=lambda op: (op["ts"], -op["dur"])):
        stack = open_ops[op["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= op["ts"]:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= op["dur"]
        stack.append(op)
    # without the nodes of the autograd graph; with the loops that torch.compile wrote
    computing = [op for op in ops if re.match(rf"{OP}|graph_\d+_cpp_", op["name"])]
    return [(op["ts"], (op["name"], op["name"], op["ts"], own[id(op)])) for op in computing]


def placed(annotations: list[Event], launches: list[Launch]) -> Iterator[Work]:
    """Yield the work of each launch inside ranges, with the ranges around its time in any thread.

    The backward pass launches from a thread of its own while the program waits inside `backward`.
    """
    times = [
        *((event["ts"], -event["dur"], event, None) for event in annotations),
        *((when, 0.0, None, launch) for when, launch in launches),
    ]
    inside: tuple[Range, ...] = ()
    for when, _, event, launch in sorted(times, key=lambda time: time[:2]):
        while inside and inside[-1].end_ms <= when / 1e3:
            inside = inside[:-1]
        if event is not None:
            path = (*(inside[-1].path if inside else ()), event["name"])
            inside = (*inside, Range(path, when / 1e3, (when + event["dur"]) / 1e3))
        elif launch is not None and inside:
            op, kernel, start, duration = launch
            yield Work(op, kernel, inside, start / 1e3, duration / 1e3)


# ---- sums ----------------------------------------------------------------------------------------


def total_ms(works: Iterable[Work]) -> float:
    """Return the sum of the durations."""
    return sum(work.ms for work in works)


def shares(works: Sequence[Work]) -> dict[str, float]:
    """Return the share of each kind in the total time; the shares add up to 1."""
    whole = total_ms(works)
    return {kind: total_ms(w for w in works if w.kind == kind) / whole for kind in KINDS}


def by_kernel(works: Iterable[Work], kind: str = "kind") -> dict[tuple[str, str, str], list[Work]]:
    """Group work by (its attribute `kind`, kernel, op), the longest total time first."""
    found: dict[tuple[str, str, str], list[Work]] = defaultdict(list)
    for work in works:
        found[getattr(work, kind), work.kernel, work.op].append(work)
    return dict(sorted(found.items(), key=lambda item: -total_ms(item[1])))


def by_range(works: Iterable[Work]) -> dict[tuple[str, ...], dict[Range, list[Work]]]:
    """Group work by path and occurrence of its ranges; inner ranges count to the outer ones too."""
    found: dict[tuple[str, ...], dict[Range, list[Work]]] = {}
    for work in sorted(works, key=lambda work: work.inside[-1].start_ms):
        for place in work.inside:
            found.setdefault(place.path, {}).setdefault(place, []).append(work)
    return found


def span_ms(place: Range, works: Sequence[Work], on_gpu: bool) -> float:
    """Return the time between the begin of the first work and the end of the last.

    On a CPU the time of the range itself.
    """
    if not on_gpu:
        return place.end_ms - place.start_ms
    return max(work.start_ms + work.ms for work in works) - min(work.start_ms for work in works)
