"""Published loss curves by tokens, from reference/*.csv."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gpt_lightning.errors import UserError
from gpt_lightning.parsing import nearest
from gpt_lightning.reproduce.cases import TABLES
from gpt_lightning.reproduce.published import read_rows

# split -> (tokens, loss in nats), tokens ascending
Points = dict[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Curve:
    """Published curve.

    Attributes:
        title: Model and data.
        tokenizer: Name of the tokenizer.
        tokens_per_step: Tokens of an optimizer step.
        evaluations: File under reference/ with `step` and losses.
        name: Name in the first column of the files.
        iterations: File with the losses of training steps, if there is one.
    """

    title: str
    tokenizer: str
    tokens_per_step: int
    evaluations: str
    name: str
    iterations: str | None = None


CURVES = {name: Curve(**fields) for name, fields in TABLES["curves"].items()}


def find_curve(name: str) -> Curve:
    """Return a published curve by its name in cases.yaml.

    Raises:
        UserError: There is no such curve.
    """
    if name not in CURVES:
        raise UserError(f"no curve {name!r}{nearest(name, CURVES)}; there are {', '.join(CURVES)}")
    return CURVES[name]


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
    """Return the loss of a curve at a number of tokens; None outside of its points."""
    if tokens == 0:
        return dict(points).get(0.0)
    trained = [(math.log(x), loss) for x, loss in points if x]
    if not trained or not trained[0][0] <= math.log(tokens) <= trained[-1][0]:
        return None
    xs, ys = zip(*trained, strict=True)
    return float(np.interp(math.log(tokens), xs, ys))
