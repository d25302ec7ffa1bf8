"""Published numbers of rungs and curves, from reference/*.csv."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gpt_lightning.files import reference_rows
from gpt_lightning.hardware.peaks import lookup
from gpt_lightning.hardware.precision import product_dtype
from gpt_lightning.model import flops
from gpt_lightning.parsing import pick
from gpt_lightning.reproduce.cases import CURVES, Case, Curve, Rung

Losses = dict[tuple[int, str], float]  # (step, split) -> nats
# split -> (tokens, loss in nats), tokens ascending
Points = dict[str, list[tuple[float, float]]]


@dataclass(frozen=True)
class Published:
    """Published numbers of a rung.

    Attributes:
        losses: (step, split) -> loss in nats; split is `batch` for the loss of a training step,
            `train` or `val` for an evaluation. Training steps beside evaluations are among them if
            the rung has a tolerance for them.
        step_ms: Median of the step times without the first; None: no times were published.
        tokens_per_sec: Median of the same steps.
    """

    losses: Losses
    step_ms: float | None = None
    tokens_per_sec: float | None = None


def read_published(case: Case, rung: Rung) -> Published:
    """Return the published numbers of a rung."""
    times = reference_rows(case.times or case.reference, rung.published_times)
    step_ms = [float(row["dt_ms"]) for row in times if row.get("dt_ms")]
    rates = [float(row["tokens_per_sec"]) for row in times if row.get("tokens_per_sec")]
    return Published(
        read_losses(rung.published, case.reference, case.times if rung.iterations else None),
        statistics.median(step_ms[1:]) if step_ms[1:] else None,
        statistics.median(rates[1:]) if rates[1:] else None,
    )


def read_losses(name: str, evaluations: str, iterations: str | None) -> Losses:
    """Return the losses of a published run.

    Args:
        name: Name in the first column of the files.
        evaluations: File with `step` and losses.
        iterations: File with `iter` and losses of training steps, if there is one.
    """
    columns = {"loss": "batch", "train_loss": "train", "val_loss": "val"}
    sources = [(evaluations, "step", columns), (iterations, "iter", {"train_loss": "batch"})]
    return {
        (int(row[step]), split): float(row[column])
        for file, step, splits in sources
        for row in (reference_rows(file, name) if file else ())
        for column, split in splits.items()
        if row.get(column)
    }


# ---- speed ---------------------------------------------------------------------------------------


def published_speed(rung: Rung, published: Published) -> tuple[dict[str, float | None], str]:
    """Return the speed of the published run by column, and a note on the peak of its MFU."""
    theirs, rate = rung.theirs, published.tokens_per_sec
    if rate is None and published.step_ms is not None:
        rate = math.prod(theirs["batch"]) / published.step_ms * 1e3
    speed = {"step_ms": published.step_ms, "tokens_per_sec": rate}
    if rate is None:
        return speed, ""
    arithmetic = theirs["precision"], theirs["matmul_precision"]
    dtype = product_dtype(*arithmetic, torch.device("cuda"))  # no Mac in the tables has TF32 set
    peak = lookup(theirs.get("chip", ""), dtype)
    if peak is None:
        return speed, "their MFU: chip's peak not known"
    T, C = theirs["batch"][1], theirs["n_embd"]
    tables = theirs["block_size"] + (0 if theirs["tie_weights"] else theirs["vocab_size"])
    work = flops.flops_per_token(theirs["parameters"] - tables * C, theirs["n_layer"], C, T)
    note = f"their MFU relative to {peak.flops / 1e12:.4g} TFLOP/s: {peak.label}"
    return speed | {"mfu": flops.mfu(rate, work, peak.flops)}, note


def rung_before(case: Case, rung: Rung) -> list[Rung]:
    """Return the rung before one in the published table, which has no rungs without times."""
    names = [other.name for other in case.rungs]  # `rung` may be changed for a CPU
    before = () if case.alternatives else case.rungs[: names.index(rung.name)]
    return [other for other in before if other.published_times][-1:]


# ---- curves by tokens ----------------------------------------------------------------------------


def find_curve(name: str) -> Curve:
    """Return a published curve by its name.

    Raises:
        UserError: There is no such curve.
    """
    return CURVES[pick(name, CURVES, "no curve")]


def read_curve(curve: Curve) -> Points:
    """Return the losses of a published curve; splits without any are empty."""
    points: Points = {"val": [], "train": [], "batch": []}
    losses = read_losses(curve.name, curve.evaluations, curve.iterations)
    for (step, split), loss in losses.items():
        points[split].append((float(step * curve.tokens_per_step), loss))
    return points


def as_run(curve: Curve) -> dict[str, list[tuple[float, ...]]]:
    """Return a published curve as read_curves of runs/history.py does, without wall times."""
    points = read_curve(curve)
    return {
        split: [(t / curve.tokens_per_step, t, math.nan, loss) for t, loss in losses]
        for split, losses in (("train", points["batch"] or points["train"]), ("val", points["val"]))
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
