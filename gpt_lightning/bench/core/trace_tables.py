"""Tables of one profiled step: its times, ranges, attention and kernels."""

import statistics
from dataclasses import dataclass
from typing import Any

from gpt_lightning.bench.core import traces
from gpt_lightning.bench.core.traces import Work
from gpt_lightning.tables.rows import column


@dataclass(frozen=True)
class KernelColumns:
    """Kernel of one step; on a CPU an op."""

    kind: str = column("kind")
    kernel: str = column("kernel")
    op: str = column("op", default="")
    calls: float | None = column("calls", ",.1f")
    ms: float | None = column("ms", ",.3f")
    share: float | None = column("share", ".1%")


PARTS = ("attention scores", "softmax", "value product")  # ranges inside an attention


def summary(works: list[Work], steps: int, timer_ms: float, on_gpu: bool) -> dict[str, float]:
    """Return the columns of the row: times, calls and shares."""
    places = traces.by_range(works)[("step",)]
    spans = [traces.span_ms(place, inner, on_gpu) for place, inner in places.items()]
    kernels_ms = traces.total_ms(works) / steps
    products = [work for work in works if work.kind == "products"]
    outside = [work for work in products if work.inside[-1].path[-1] not in PARTS]
    return {
        "timer_ms": timer_ms,
        "span_ms": statistics.fmean(spans),
        "kernels_ms": kernels_ms,
        "busy": kernels_ms / statistics.fmean(spans),
        "kernel_calls": len(works) / steps,
        "products_calls": len(products) / steps,
        "products_outside_calls": len(outside) / steps,
        **traces.shares(works),
    }


def ranges_table(works: list[Work], steps: int, on_gpu: bool) -> list[dict[str, Any]]:
    """Return a row for each range, in the order of the step; own times add up to all kernels."""
    whole = traces.total_ms(works)
    rows = []
    for path, places in traces.by_range(works).items():
        within = [work for inner in places.values() for work in inner]
        own = [work for work in within if work.inside[-1].path == path]
        products = [work for work in within if work.kind == "products"]
        spans = [traces.span_ms(place, inner, on_gpu) for place, inner in places.items()]
        rows.append(
            {
                "range": " / ".join(path),
                "calls": len(places) / steps,
                "span_ms": sum(spans) / steps,
                "kernels_ms": traces.total_ms(within) / steps,
                "own_ms": traces.total_ms(own) / steps,
                "products_ms": traces.total_ms(products) / steps,
                "share": traces.total_ms(within) / whole,
            }
        )
    return rows


def attention_flops(model: str, shape: list[int], batch: int, context: int) -> dict[str, int]:
    """Return the FLOPs of the attention of all layers in one forward pass, by part.

    Args:
        model: Model, one of options.MODELS.
        shape: Layers, heads, width C.
        batch: Sequences B.
        context: Tokens T.

    Returns:
        Part -> FLOPs. projections: 3 C and C columns from C rows, 2 FLOPs a multiply-add. Scores
        and values: the full T x T square of each head. softmax: maximum, difference, exponential,
        sum, quotient. RoPE: two products and a sum for each channel of queries and keys.
    """
    n_layer, n_head, C = shape
    square = batch * context**2
    rope = {"RoPE": n_layer * 6 * batch * context * C} if model == "course" else {}
    return {
        "projections": n_layer * 8 * batch * context * C**2,
        **rope,
        "attention scores": n_layer * 2 * square * C,
        "softmax": n_layer * 5 * square * n_head,
        "value product": n_layer * 2 * square * C,
    }


def attention_table(works: list[Work], steps: int, flops: dict[str, int]) -> list[dict[str, Any]]:
    """Return a row for each part of the attention: its share of time and of FLOPs."""
    parts: dict[str, list[Work]] = {part: [] for part in flops}
    for work in works:
        path = work.inside[-1].path
        if "attention" in path:
            parts[path[-1] if path[-1] in parts else "projections"].append(work)
    whole_ms = sum(map(traces.total_ms, parts.values())) / steps
    rows = []
    for part, inner in parts.items():
        ms = traces.total_ms(inner) / steps
        rows.append(
            {
                "part": part,
                "kernels_ms": ms,
                "products_ms": traces.total_ms(w for w in inner if w.kind == "products") / steps,
                "time_share": ms / whole_ms,
                "gflop": flops[part] / 1e9,
                "flop_share": flops[part] / sum(flops.values()),
                "gflop_per_s": flops[part] / ms / 1e6,
            }
        )
    return rows


def kernels_table(
    works: list[Work], steps: int, top: int, kind: str = "kind"
) -> list[dict[str, Any]]:
    """Return a row for each kernel, longest time first; the last row sums up the rest."""
    whole = traces.total_ms(works)
    groups = list(traces.by_kernel(works, kind).items())
    rest = [work for _, inner in groups[top:] for work in inner]
    shown = [*groups[:top], *([(("", f"{len(groups) - top} more", ""), rest)] if rest else [])]
    return [
        {
            "kind": name,
            "kernel": kernel,
            "op": op if op != kernel else "",
            "calls": len(inner) / steps,
            "ms": traces.total_ms(inner) / steps,
            "share": traces.total_ms(inner) / whole,
        }
        for (name, kernel, op), inner in shown
    ]
