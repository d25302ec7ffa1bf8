"""Rows of the tables of `reproduce`, and the comparison of a loss with the published one."""

from dataclasses import replace

import torch

from gpt_lightning.reproduce.cases import Rung
from gpt_lightning.reproduce.published import Published
from gpt_lightning.tables.rows import Row, column, row_type
from gpt_lightning.tables.verdicts import Verdict
from gpt_lightning.training.callbacks.recorder import Observation

NAME = column("rung", width=17)
# one published loss and ours; without a verdict if ours is of fewer batches than theirs
LossRow = row_type(
    "rung step:d split theirs:.6f ours:.6f difference:+.6f tolerance:g verdict step_ms:,.1f "
    "tokens_per_sec batches:d",
    rung=NAME,
    theirs=column("theirs", ".6f", 9),
    ours=column("ours", ".6f", 9),
)
# outcome of a rung
RungRow = row_type(
    "rung verdict device losses:d drifted:d worst_difference:.2g first_step_ms:,.0f step_ms:,.1f "
    "tokens_per_sec mfu peak_tflops:.4g peak_memory_gib attention speedup:.2f fp32_speedup:.2f "
    "published_first_step_ms:,.0f published_step_ms:,.1f published_tokens_per_sec published_mfu "
    "published_speedup:.2f published_fp32_speedup:.2f note",
    rung=NAME,
)
# setting of the published run, and the one that was read from ours
SettingRow = row_type("rung setting theirs ours verdict")
PhaseRow = row_type("rung phase seconds:,.1f")  # wall time of one phase of a rung


# ---- comparison ----------------------------------------------------------------------------------


def loss_row(rung: Rung, published: Published, seen: Observation) -> Row:
    """Return the row of one of our losses, with the published one of that step if there is one."""
    theirs = published.losses.get((seen.step, seen.split))
    row = compare(rung, seen.step, seen.split, theirs, seen.loss)
    if seen.split != "batch":
        row = without_verdict(row, seen.batches, published.batches)
    if seen.seconds is None or seen.tokens is None or not is_timed(rung, seen.device):
        return row
    return replace(row, step_ms=seen.seconds * 1e3, tokens_per_sec=seen.tokens / seen.seconds)


def compare(rung: Rung, step: int, split: str, theirs: float | None, ours: float) -> Row:
    """Return a row without times; without a published loss it has no verdict."""
    if theirs is None:
        return LossRow(rung.name, step, split, None, ours)
    difference, tolerance = ours - theirs, rung.tolerance_at(step, split)
    verdict = Verdict.FAILED  # nan fails too
    if abs(difference) <= tolerance:
        verdict = Verdict.OK
    elif abs(difference) <= rung.drift_at(step):
        verdict = Verdict.DRIFT
    if rung.below is not None and step == rung.below[0] and not ours < rung.below[1]:
        verdict = Verdict.FAILED
    return LossRow(rung.name, step, split, theirs, ours, difference, tolerance, verdict)


def without_verdict(row: Row, batches: int | None, theirs: int | None) -> Row:
    """Return a row with its number of batches, and without a verdict if theirs is another."""
    row = replace(row, batches=batches)
    return row if batches == theirs else replace(row, tolerance=None, verdict="")


def best_row(rung: Rung, published: Published, ours: list[Row]) -> tuple[Row, str]:
    """Compare our lowest validation loss with the lowest published one up to our last step.

    Args:
        rung: The rung.
        published: Its published losses.
        ours: Our validation losses.

    Returns:
        The row, and a sentence with both; empty if none was published.
    """
    best, last = min(ours, key=lambda row: row.ours), max(row.step for row in ours)
    points = published.losses.items()
    theirs = [(loss, step) for (step, split), loss in points if split == "val" and step <= last]
    loss, at = min(theirs, default=(None, None))
    row = compare(rung, best.step, "best", loss, best.ours)
    note = f"best validation loss {best.ours:.4f} at step {best.step}, theirs {loss:.4f} at {at}"
    return without_verdict(row, best.batches, published.batches), note if theirs else ""


def missing_losses(published: Published, rows: list[Row], max_steps: int) -> int:
    """Count the published losses within `max_steps` that have no counterpart among ours."""
    keys = published.losses  # an evaluation follows the last step, a loss of a step precedes it
    expected = {(step, split) for step, split in keys if step + (split == "batch") <= max_steps}
    return len(expected - {(row.step, row.split) for row in rows})


def is_timed(rung: Rung, device: torch.device) -> bool:
    """Return whether step times on this device can be compared with those of the rung."""
    return rung.device in ("any", device.type.replace("cuda", "gpu"))
