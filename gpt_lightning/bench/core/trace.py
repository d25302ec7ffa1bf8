"""What a Chrome trace of torch.profiler says: work, and the named range that it was done for.

Work is a kernel, copy or fill on a GPU, where it belongs to the op that launched it; on a CPU it is
an op of its own time, without the ops that it calls. The file format is the profiler's public one.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("products", "softmax", "elementwise", "reductions", "other")
Event = dict[str, Any]  # of the trace: ts and dur in microseconds

# aten ops, without the _ of the variants in place; `other` is the rest: lookups, copies between
# devices, random numbers, allocation, views and the dispatch around them
OPS = {
    "products": r"(add|b|baddb|addb)?mm|addmv|mv|dot|mkldnn_linear|.*attention.*",
    "softmax": r"_(log_)?softmax(_backward_data)?",
    "reductions": r"sum|mean|amax|amin|max|min|argmax|norm|linalg_vector_norm|_foreach_norm|any|all"
    r"|native_layer_norm(_backward)?|nll_loss.*|logsumexp|var|std",
    "elementwise": r"_foreach_.*|_fused_adamw?|add|sub|rsub|mul|div|neg|abs|pow|r?sqrt|exp|log|tanh"
    r"|erf|relu|threshold|lerp|((ge|si)lu|sigmoid|native_dropout)(_backward)?"
    r"|(tanh|threshold)_backward"
    r"|addcmul|addcdiv|reciprocal|masked_fill|where|tril|triu|bitwise_\w+|logical_\w+|eq|ne|g[te]"
    r"|l[te]|fill|zero|copy|clamp|maximum|minimum",
}
# kernels that no op is known of, by their own names
NAMES = {
    "products": r"gemm|gemv|cutlass|nvjet|xmma|cublas|splitk",
    "softmax": r"softmax",
    "reductions": r"reduce|layer_norm|nll_loss",
    "elementwise": r"elementwise|multi_tensor_apply",
}


@dataclass(frozen=True)
class Range:
    """One occurrence of a named range.

    Attributes:
        path: Its name, after the names of the ranges around it.
        start_ms: When the program entered it.
        end_ms: When the program left it.
    """

    path: tuple[str, ...]
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class Work:
    """Something that the device did.

    Attributes:
        op: That launched it; empty if none is known.
        kernel: Its name; the op's on a CPU.
        inside: The ranges it was launched in, from the outermost to the innermost.
        start_ms: When the device began.
        ms: How long it took.
    """

    op: str
    kernel: str
    inside: tuple[Range, ...]
    start_ms: float
    ms: float

    @property
    def kind(self) -> str:
        """One of KINDS."""
        if re.match(r"Mem(cpy|set)", self.kernel):
            return "other"
        if not self.op:
            found = (k for k, names in NAMES.items() if re.search(names, self.kernel.lower()))
        else:
            name = self.op.removeprefix("aten::").rstrip("_")
            found = (k for k, names in OPS.items() if re.fullmatch(names, name))
        return next(found, "other")


def read_trace(trace: dict[str, Any], names: Sequence[str], on_gpu: bool) -> list[Work]:
    """The work of a trace that was launched inside ranges.

    Args:
        trace: A parsed Chrome trace.
        names: Of the ranges that count; others, such as the profiler's own, do not.
        on_gpu: Whether the device is a GPU; otherwise it is the CPU.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    of = by_category(events)
    annotations = [event for event in of["user_annotation"] if event["name"] in names]
    launches = gpu_launches(of) if on_gpu else cpu_work(of["cpu_op"])
    return [
        Work(op, kernel, inside, start / 1e3, duration / 1e3)
        for inside, (op, kernel, start, duration) in placed(annotations, launches)
        if inside
    ]


def by_category(events: Iterable[Event]) -> dict[str, list[Event]]:
    """Events by what the profiler calls their category."""
    found: dict[str, list[Event]] = defaultdict(list)
    for event in events:
        found[event.get("cat", "")].append(event)
    return found


Launch = tuple[float, tuple[str, str, float, float]]  # when; op, kernel, its start and duration


def gpu_launches(of: dict[str, list[Event]]) -> list[Launch]:
    """Kernels, copies and fills with the moments at which the program launched them."""
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
    """Ops that compute, each without the time of those that it calls."""
    own = {id(op): op["dur"] for op in ops}
    open_ops: dict[int, list[Event]] = defaultdict(list)  # of each thread
    for op in sorted(ops, key=lambda op: (op["ts"], -op["dur"])):
        stack = open_ops[op["tid"]]
        while stack and stack[-1]["ts"] + stack[-1]["dur"] <= op["ts"]:
            stack.pop()
        if stack:
            own[id(stack[-1])] -= op["dur"]
        stack.append(op)
    return [
        (op["ts"], (op["name"], op["name"], op["ts"], own[id(op)]))
        for op in ops
        if re.match(r"(?!autograd|torch)\w+::", op["name"])  # not the nodes of the graph
    ]


def placed(
    annotations: list[Event], launches: list[Launch]
) -> Iterator[tuple[tuple[Range, ...], tuple[str, str, float, float]]]:
    """Each launch with the ranges around its moment, whatever its thread.

    The backward pass launches from a thread of its own while the program waits inside `backward`.
    """
    moments = [
        *((event["ts"], -event["dur"], event, None) for event in annotations),
        *((when, 0.0, None, launch) for when, launch in launches),
    ]
    inside: tuple[Range, ...] = ()
    for when, _, event, launch in sorted(moments, key=lambda moment: moment[:2]):
        while inside and inside[-1].end_ms <= when / 1e3:
            inside = inside[:-1]
        if event is not None:
            path = (*(inside[-1].path if inside else ()), event["name"])
            inside = (*inside, Range(path, when / 1e3, (when + event["dur"]) / 1e3))
        elif launch is not None:
            yield inside, launch


# ---- sums ----------------------------------------------------------------------------------------


def total_ms(works: Iterable[Work]) -> float:
    """Time of all of it."""
    return sum(work.ms for work in works)


def shares(works: Sequence[Work]) -> dict[str, float]:
    """Of the time, by kind; together 1."""
    whole = total_ms(works)
    return {kind: total_ms(w for w in works if w.kind == kind) / whole for kind in KINDS}


def by_kernel(works: Iterable[Work]) -> dict[tuple[str, str, str], list[Work]]:
    """(kind, kernel, op) -> work, what takes longest first."""
    found: dict[tuple[str, str, str], list[Work]] = defaultdict(list)
    for work in works:
        found[work.kind, work.kernel, work.op].append(work)
    return dict(sorted(found.items(), key=lambda item: -total_ms(item[1])))


def by_range(works: Iterable[Work]) -> dict[tuple[str, ...], dict[Range, list[Work]]]:
    """Path -> occurrence -> the work inside it, that of the ranges inside it included."""
    found: dict[tuple[str, ...], dict[Range, list[Work]]] = {}
    for work in sorted(works, key=lambda work: work.inside[-1].start_ms):
        for place in work.inside:
            found.setdefault(place.path, {}).setdefault(place, []).append(work)
    return found


def span_ms(place: Range, works: Sequence[Work], on_gpu: bool) -> float:
    """From the first work's begin to the last one's end on a GPU; the range's time on a CPU."""
    if not on_gpu:
        return place.end_ms - place.start_ms
    return max(work.start_ms + work.ms for work in works) - min(work.start_ms for work in works)
