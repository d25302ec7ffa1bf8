"""Prose answers to the course's questions, made from the numbers of a section's tables."""

from collections.abc import Iterator
from typing import Any

Row = dict[str, Any]
Tables = dict[str, list[Row]]  # tables of a results.json; `rows` is the main one
Answers = Iterator[tuple[str, str]]  # questions and answers


def measured(tables: Tables) -> list[Row]:
    """Return the rows that were measured."""
    return [row for row in tables["rows"] if row["status"] == "ok"]


def passes(tables: Tables) -> Answers:
    """Answer how long forward and backward take, and how much they vary."""
    for r in measured(tables):
        yield (
            f"{r['size']}: how long do the passes take, and how much do they vary?",
            f"Forward {r['forward_mean_ms']:,.1f} ms, backward {r['backward_mean_ms']:,.1f} ms "
            f"(means; by the medians {r['backward_ms'] / r['forward_ms']:.2f} times the forward). "
            "The standard deviation is "
            f"{r['forward_std_ms'] / r['forward_mean_ms']:.1%} of the forward's mean and "
            f"{r['backward_std_ms'] / r['backward_mean_ms']:.1%} of the backward's.",
        )


def first_call(tables: Tables) -> Answers:
    """Answer what the first call does to the mean."""
    for r in measured(tables):
        yield (
            f"{r['size']}: what does a missing warm-up change?",
            f"The first forward took {r['first_forward_ms']:,.1f} ms, "
            f"{r['first_forward_ms'] / r['forward_ms']:.1f} times the median of "
            f"{r['forward_ms']:,.1f} ms; with it the mean is {r['forward_mean_ms']:,.1f} ms.",
        )


def profile(tables: Tables) -> Answers:
    """Answer five questions about the profile of each size."""
    rows = {(row["size"], row["mode"]): row for row in measured(tables)}
    for size in dict.fromkeys(size for size, _ in rows):
        if {(size, "inference"), (size, "full-step")} <= rows.keys():
            yield from profile_of(size, rows, tables)


def profile_of(size: str, rows: dict[tuple[str, str], Row], tables: Tables) -> Answers:
    """Yield the answers (a) to (e) for one size."""
    forward, step = rows[size, "inference"], rows[size, "full-step"]

    def of(table: str, mode: str) -> list[Row]:
        return [row for row in tables[table] if (row["size"], row["mode"]) == (size, mode)]

    kernels, (top, *_) = of("kernels", "inference"), of("kernels", "full-step")
    yield (
        f"{size} (a): how long is a forward pass, and does the timer agree?",
        f"{forward['span_ms']:,.2f} ms in the profile, {forward['timer_ms']:,.2f} ms by the timer "
        f"without the profiler: {forward['span_ms'] / forward['timer_ms']:.2f} times.",
    )
    yield (
        "(b): which kernel takes the most time in the forward, and in the whole step?",
        " ".join(
            f"{where}: {row['kernel']}, {row['calls']:,.0f} calls, {row['share']:.1%} of the time."
            for where, row in (("Forward", kernels[0]), ("Whole step", top))
        ),
    )
    others = [row for row in kernels if row["kind"] not in ("products", "")][:3]
    kinds = ("softmax", "elementwise", "reductions", "other")
    yield (
        "(c): which kernels beside the matrix products take time in the forward?",
        ", ".join(f"{row['kernel']} {row['share']:.1%}" for row in others)
        + "; by kind: "
        + ", ".join(f"{kind} {forward[kind]:.1%}" for kind in kinds)
        + ".",
    )
    optimizer = next(r for r in of("ranges", "full-step") if r["range"] == "step / optimizer")
    yield (
        "(d): how does the share of the matrix products change in a training step?",
        f"{forward['products']:.1%} of the forward, in {forward['products_calls']:,.0f} calls "
        f"({forward['products_outside_calls']:,.0f} without the attention's), and "
        f"{step['products']:.1%} of the whole step. The kernels of the optimizer take "
        f"{optimizer['kernels_ms']:,.2f} ms in a span of {optimizer['span_ms']:,.2f} ms.",
    )
    parts = {row["part"]: row for row in of("attention", "inference")}
    softmax, two = parts["softmax"], (parts["attention scores"], parts["value product"])
    products_ms = sum(row["products_ms"] for row in two)
    yield (
        "(e): how does the softmax compare with the products of the attention?",
        f"The softmax takes {softmax['kernels_ms']:,.3f} ms, {softmax['time_share']:.1%} of the "
        f"attention's time with {softmax['flop_share']:.1%} of its FLOPs. The products of scores "
        f"and values take {products_ms:,.3f} ms: the softmax has "
        f"{softmax['kernels_ms'] / products_ms:.2f} times their time and "
        f"{softmax['gflop'] / sum(row['gflop'] for row in two):.3f} times their FLOPs.",
    )


def attention(tables: Tables) -> Answers:
    """Answer where memory ends, and how the memory held for the backward grows."""
    ends = [(r["context"], r["d"]) for r in tables["rows"] if r["status"] == "out of memory"]
    text = "At {:,} tokens with d = {}.".format(*min(ends)) if ends else "At no measured size."
    yield "At what size does memory run out?", text
    held: dict[int, dict[int, float]] = {}
    for row in measured(tables):
        held.setdefault(row["d"], {})[row["context"]] = row["held_mib"]
    for d, by_context in held.items():
        short, long = min(by_context), max(by_context)
        yield (
            f"d = {d}: how does the memory held for the backward grow?",
            f"From {by_context[short]:,.1f} MiB at {short:,} tokens to {by_context[long]:,.1f} MiB "
            f"at {long:,}: {by_context[long] / by_context[short]:.1f} times for "
            f"{long / short:.0f} times the tokens.",
        )


def memory(tables: Tables) -> Answers:
    """Answer the questions about residuals, mixed precision and the largest allocation."""
    rows = {(r["size"], r["mode"], r["context"], r["dtype"]): r for r in measured(tables)}
    residuals = (f"{r['context']:,} tokens: {r['residual_mib']:,.3f} MiB" for r in rows.values())
    yield (
        "How large is an activation of the residual stream, B T C 4 / 2^20?",
        "; ".join(dict.fromkeys(residuals)),
    )
    for (size, mode, context, dtype), row in rows.items():
        exact = rows.get((size, mode, context, "fp32"))
        if dtype == "bf16" and exact is not None:
            yield (
                f"{size}, {mode}, {context:,} tokens: what does bfloat16 change?",
                f"The peak is {row['peak_mib'] / exact['peak_mib']:.2f} times that of fp32.",
            )
        elif row["largest_mib"] is not None:
            yield (
                f"{size}, {mode}, {context:,} tokens: how large is the largest allocation?",
                f"{row['largest_mib']:,.1f} MiB, {row['largest_mib'] / row['residual_mib']:.1f} "
                "residual activations.",
            )


def checkpoints(tables: Tables) -> Answers:
    """Answer which number of blocks per checkpoint has the smallest peak."""
    for size in dict.fromkeys(row["size"] for row in measured(tables)):
        peaks = {r["blocks"]: r["peak_mib"] for r in measured(tables) if r["size"] == size}
        best = min(peaks, key=peaks.__getitem__)
        yield (
            f"{size}: which group has the smallest peak?",
            f"{best} blocks per checkpoint, with {peaks[best]:,.1f} MiB.",
        )
