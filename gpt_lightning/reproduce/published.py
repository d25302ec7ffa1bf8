"""Published numbers of rungs and curves, from reference/*.csv."""

import csv
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpt_lightning.files import reference_text
from gpt_lightning.hardware.peaks import lookup
from gpt_lightning.hardware.precision import product_dtype
from gpt_lightning.model import flops
from gpt_lightning.reproduce.cases import CURVES, Case, Curve, Rung, Settings, pick

# split -> (tokens, loss in nats), tokens ascending
Points = dict[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Published:
    """Published numbers of a rung.

    Attributes:
        losses: (step, split) -> loss in nats; split is `batch` for the loss of a training step,
            `train` or `val` for an evaluation. Training steps beside evaluations are among them if
            the rung has a tolerance for them.
        step_ms: Median of the step times without the first; None: no times were published.
        tokens_per_sec: Median of the same steps.
        first_step_ms: Time of the first step, which includes compilation.
        early_ms: Mean of the printed steps 10 to 50, the figure of the Shakespeare runs' author.
        process_s: Wall, user and system seconds of the process; empty: not published.
        batches: Batches of each split in an evaluation; None for losses of steps.
    """

    losses: dict[tuple[int, str], float]
    step_ms: float | None
    tokens_per_sec: float | None
    first_step_ms: float | None = None
    batches: int | None = None
    early_ms: float | None = None
    process_s: tuple[float, ...] = ()


def read_published(case: Case, rung: Rung) -> Published:
    """Return the published numbers of a rung."""
    losses_of = rung.name if rung.published is None else rung.published
    times_of = losses_of if rung.published_times is None else rung.published_times
    columns = {"batch": "loss"}
    if case.kind == "evaluations":
        columns = {"train": "train_loss", "val": "val_loss"}
    losses = {
        (int(row["step"]), split): float(row[column])
        for row in read_rows(case.reference, losses_of)
        for split, column in columns.items()
    }
    assert losses, f"no rows {losses_of!r} in {case.reference}"
    if rung.iterations and case.times:
        rows = read_rows(case.times, losses_of)
        losses |= {(int(row["iter"]), "batch"): float(row["train_loss"]) for row in rows}
    times = read_rows(case.times or case.reference, times_of)
    early = [float(row["dt_ms"]) for row in times if 10 <= int(row.get("iter", 0)) <= 50]
    process = read_rows("shakespeare_char_times.csv", times_of)
    step_ms = [float(row["dt_ms"]) for row in times if row["dt_ms"]]
    rates = [float(row["tokens_per_sec"]) for row in times if row.get("tokens_per_sec")]
    return Published(
        losses,
        statistics.median(step_ms[1:]) if step_ms[1:] else None,
        statistics.median(rates[1:]) if rates[1:] else None,
        step_ms[0] if step_ms else None,
        case.eval_batches,
        statistics.fmean(early) if early else None,
        tuple(float(text) for row in process for text in list(row.values())[1:]),
    )


def read_rows(file_name: str, name: str) -> list[dict[str, str]]:
    """Return the rows whose first column is `name`, in their order."""
    lines = csv.DictReader(reference_text(file_name).splitlines())
    return [row for row in lines if next(iter(row.values())) == name]


# ---- speed ---------------------------------------------------------------------------------------


def published_speed(rung: Rung, published: Published) -> tuple[float | None, float | None, str]:
    """Return tokens/s and MFU of the published run, and a note on the peak of the MFU."""
    theirs = rung.theirs
    rate = published.tokens_per_sec
    if rate is None and published.step_ms is not None:
        rate = math.prod(theirs["batch"]) / published.step_ms * 1e3
    if rate is None:
        return None, None, ""
    arithmetic = theirs["precision"], theirs["matmul_precision"]
    dtype = product_dtype(*arithmetic, torch.device("cuda"))  # no Mac in the tables has TF32 set
    peak = lookup(theirs.get("chip", ""), dtype)
    if peak is None:
        return rate, None, "their MFU: chip's peak not known"
    T, C = theirs["batch"][1], theirs["n_embd"]
    tables = theirs["block_size"] + (0 if theirs["tie_weights"] else theirs["vocab_size"])
    work = flops.flops_per_token(theirs["parameters"] - tables * C, theirs["n_layer"], C, T)
    note = f"their MFU relative to {peak.flops / 1e12:.4g} TFLOP/s: {peak.label}"
    return rate, flops.mfu(rate, work, peak.flops), note


def float32_rung(case: Case, rung: Rung) -> list[Rung]:
    """Return the first rung in float32 with the device and the batch of a rung in less; or none."""
    if is_float32(rung.theirs):
        return []
    same = [
        other
        for other in case.rungs
        if (other.device, other.theirs["batch"]) == (rung.device, rung.theirs["batch"])
        and is_float32(other.theirs)
    ]
    return same[:1]


def is_float32(theirs: Settings) -> bool:
    """Return whether products are in float32, not in TF32 either."""
    return (theirs["precision"], theirs["matmul_precision"]) == ("32-true", "highest")


# ---- curves by tokens ----------------------------------------------------------------------------


def find_curve(name: str) -> Curve:
    """Return a published curve by its name.

    Raises:
        UserError: There is no such curve.
    """
    return CURVES[pick(name, CURVES, "no curve")]


def read_curve(curve: Curve) -> Points:
    """Return the losses of a published curve; splits without any are empty."""
    sources = {
        "val": (curve.evaluations, "step", "val_loss"),
        "train": (curve.evaluations, "step", "train_loss"),
        "batch": (curve.iterations, "iter", "train_loss"),
    }
    return {
        split: [
            (int(row[step]) * float(curve.tokens_per_step), float(row[loss]))
            for row in (read_rows(file, curve.name) if file else ())
            if row.get(loss)
        ]
        for split, (file, step, loss) in sources.items()
    }


def as_run(curve: Curve) -> dict[str, list[tuple[float, ...]]]:
    """Return a published curve as read_curves of runs/history.py does, without wall times."""
    points = read_curve(curve)
    return {
        split: [(t / curve.tokens_per_step, t, math.nan, loss) for t, loss in points[source]]
        for split, source in (("train", "batch" if points["batch"] else "train"), ("val", "val"))
    }


def interpolate(points: Sequence[tuple[float, float]], tokens: float) -> float | None:
    """Return the loss of a curve at a number of tokens; None outside of its points.

    The curve is linear in the logarithm of tokens.
    """
    if tokens == 0:
        return dict(points).get(0.0)
    trained = [(math.log(x), loss) for x, loss in points if x]
    if not trained or not trained[0][0] <= math.log(tokens) <= trained[-1][0]:
        return None
    xs, ys = zip(*trained, strict=True)
    return float(np.interp(math.log(tokens), xs, ys))
