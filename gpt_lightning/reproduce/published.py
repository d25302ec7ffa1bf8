"""Read the published numbers from reference/*.csv."""

import csv
import statistics
from dataclasses import dataclass

from gpt_lightning.files import reference_text
from gpt_lightning.reproduce.cases import Case, Rung


@dataclass(frozen=True)
class Published:
    """Published numbers of a rung.

    Attributes:
        losses: (step, split) -> loss in nats; split is `batch` for the loss of a training step,
            `train` or `val` for an evaluation.
        step_ms: Median of the step times without the first; None: no times were published.
        tokens_per_sec: Median of the same steps.
        first_step_ms: Time of the first step, which includes compilation.
        batches: Batches of each split in an evaluation; None for losses of steps.
    """

    losses: dict[tuple[int, str], float]
    step_ms: float | None
    tokens_per_sec: float | None
    first_step_ms: float | None = None
    batches: int | None = None


def read_published(case: Case, rung: Rung) -> Published:
    """Return the published numbers of a rung."""
    losses_of = rung.name if rung.published is None else rung.published
    times_of = losses_of if rung.published_times is None else rung.published_times
    losses: dict[tuple[int, str], float] = {}
    for row in read_rows(case.reference, losses_of):
        step = int(row["step"])
        if case.kind == "steps":
            losses[step, "batch"] = float(row["loss"])
        else:
            losses[step, "train"] = float(row["train_loss"])
            losses[step, "val"] = float(row["val_loss"])
    assert losses, f"no rows {losses_of!r} in {case.reference}"
    times = read_rows(case.times or case.reference, times_of)
    step_ms = [float(row["dt_ms"]) for row in times if row["dt_ms"]]
    rates = [float(row["tokens_per_sec"]) for row in times if row.get("tokens_per_sec")]
    return Published(
        losses,
        _median(step_ms[1:]),
        _median(rates[1:]),
        step_ms[0] if step_ms else None,
        case.eval_batches,
    )


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def read_rows(file_name: str, name: str) -> list[dict[str, str]]:
    """Return the rows whose first column is `name`, in their order."""
    lines = csv.DictReader(reference_text(file_name).splitlines())
    return [row for row in lines if next(iter(row.values())) == name]
