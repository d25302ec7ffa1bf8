"""Answers to the course's questions: the numbers of a section's tables in texts of answers.yaml."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

Row = dict[str, Any]
Tables = dict[str, list[Row]]  # tables of a results.json; `rows` is the main one
Answers = Iterator[tuple[str, str]]  # questions and answers
TEXTS = yaml.safe_load(Path(__file__).with_name("answers.yaml").read_text(encoding="utf-8"))


def filled(name: str, **values: Any) -> tuple[str, str]:
    """Return a question and its answer with values in the place of their names."""
    question, answer = TEXTS[name]
    return question.format(**values), answer.format(**values)


def measured(tables: Tables) -> list[Row]:
    """Return the rows that were measured."""
    return [row for row in tables["rows"] if row["status"] == "ok"]


def passes(tables: Tables) -> Answers:
    """Answer how long forward and backward take, and how much they vary."""
    for r in measured(tables):
        spreads = {
            f"{phase}_spread": r[f"{phase}_std_ms"] / r[f"{phase}_mean_ms"]
            for phase in ("forward", "backward")
        }
        yield filled("passes", ratio=r["backward_ms"] / r["forward_ms"], **spreads, **r)


def first_call(tables: Tables) -> Answers:
    """Answer what the first call does to the mean."""
    for r in measured(tables):
        yield filled("first_call", ratio=r["first_forward_ms"] / r["forward_ms"], **r)


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
    yield filled("profile_timer", ratio=forward["span_ms"] / forward["timer_ms"], **forward)
    yield filled("profile_longest", forward=kernels[0], step=top)
    others = [row for row in kernels if row["kind"] not in ("products", "")][:3]
    shares = [(row["kernel"], row["share"]) for row in others]
    kinds = [(kind, forward[kind]) for kind in ("softmax", "elementwise", "reductions", "other")]
    yield filled("profile_others", kernels=listed(shares), kinds=listed(kinds))
    optimizer = next(r for r in of("ranges", "full-step") if r["range"] == "step / optimizer")
    yield filled("profile_step", forward=forward, step=step, optimizer=optimizer)
    parts = {row["part"]: row for row in of("attention", "inference")}
    softmax, two = parts["softmax"], (parts["score product"], parts["value product"])
    products_ms = sum(row["kernels_ms"] for row in two)
    ratios = {
        "times": softmax["kernels_ms"] / products_ms,
        "flops": softmax["gflop"] / sum(row["gflop"] for row in two),
    }
    yield filled("profile_softmax", **softmax | ratios | {"products_ms": products_ms})


def listed(shares: list[tuple[str, float]]) -> str:
    """Return names with their shares."""
    return ", ".join(f"{name} {share:.1%}" for name, share in shares)


def attention(tables: Tables) -> Answers:
    """Answer where memory ends, and how the memory held for the backward grows."""
    ends = [(r["context"], r["d"]) for r in tables["rows"] if r["status"] == "out of memory"]
    text = "At {:,} tokens with d = {}.".format(*min(ends)) if ends else "At no measured size."
    yield "At what size does memory run out?", text
    held: dict[int, dict[int, float]] = {}
    for row in measured(tables):
        held.setdefault(row["d"], {})[row["context"]] = row["held_mib"]
    for d, by_context in held.items():
        tokens = (min(by_context), max(by_context))
        short, long = (by_context[context] for context in tokens)
        ratios = {"growth": long / short, "longer": tokens[1] / tokens[0]}
        yield filled("attention_held", d=d, held=(short, long), tokens=tokens, **ratios)


def memory(tables: Tables) -> Answers:
    """Answer the questions about residuals, mixed precision and the largest allocation."""
    rows = {(r["size"], r["mode"], r["context"], r["dtype"]): r for r in measured(tables)}
    residuals = (f"{r['context']:,} tokens: {r['residual_mib']:,.3f} MiB" for r in rows.values())
    yield filled("residuals", sizes="; ".join(dict.fromkeys(residuals)))
    for (size, mode, context, dtype), row in rows.items():
        exact = rows.get((size, mode, context, "fp32"))
        if dtype == "bf16" and exact is not None:
            yield filled("bfloat16", ratio=row["peak_mib"] / exact["peak_mib"], **row)
        elif row["largest_mib"] is not None:
            yield filled("largest", residuals=row["largest_mib"] / row["residual_mib"], **row)


def checkpoints(tables: Tables) -> Answers:
    """Answer which number of blocks per checkpoint has the smallest peak."""
    for size in dict.fromkeys(row["size"] for row in measured(tables)):
        rows = [row for row in measured(tables) if row["size"] == size]
        yield filled("checkpoints", **min(rows, key=lambda row: row["peak_mib"]))
