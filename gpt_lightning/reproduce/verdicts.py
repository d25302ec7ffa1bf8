"""Comparison of one loss of ours with the published one."""

from dataclasses import replace

import torch

from gpt_lightning.reproduce.published import Published
from gpt_lightning.reproduce.rows import LossRow, Verdict
from gpt_lightning.reproduce.rungs import Rung
from gpt_lightning.training.callbacks.recorder import Observation


def loss_row(rung: Rung, published: Published, seen: Observation) -> LossRow:
    """Return the row of one of our losses, with the published one of that step if there is one."""
    theirs = published.losses.get((seen.step, seen.split))
    row = compare(rung, seen.step, seen.split, theirs, seen.loss)
    if seen.split != "batch":
        row = without_verdict(row, seen.batches, published.batches)
    if seen.seconds is None or seen.tokens is None or not is_timed(rung, seen.device):
        return row
    return replace(row, step_ms=seen.seconds * 1e3, tokens_per_sec=seen.tokens / seen.seconds)


def best_row(rung: Rung, published: Published, ours: list[LossRow]) -> LossRow:
    """Compare our lowest validation loss with the lowest published one up to our last step."""
    best = min(ours, key=lambda row: row.ours)
    theirs = published_validation(published, ours)
    row = compare(rung, best.step, "best", min(theirs)[0] if theirs else None, best.ours)
    return without_verdict(row, best.batches, published.batches)


def without_verdict(row: LossRow, batches: int | None, theirs: int | None) -> LossRow:
    """Return a row with its number of batches, and without a verdict if theirs is another."""
    row = replace(row, batches=batches)
    return row if batches == theirs else replace(row, tolerance=None, verdict="")


def best_note(published: Published, rows: list[LossRow]) -> str:
    """Return the lowest validation losses, ours and the published one, with their steps."""
    ours = [row for row in rows if row.split == "val"]
    theirs = published_validation(published, ours)
    if not theirs:
        return ""
    best, (loss, step) = min(ours, key=lambda row: row.ours), min(theirs)
    return f"best validation loss {best.ours:.4f} at step {best.step}, theirs {loss:.4f} at {step}"


def published_validation(published: Published, ours: list[LossRow]) -> list[tuple[float, int]]:
    """Return (loss, step) of the published validation losses up to our last step."""
    last = max((row.step for row in ours), default=-1)
    points = published.losses.items()
    return [(loss, step) for (step, split), loss in points if split == "val" and step <= last]


def missing_losses(published: Published, rows: list[LossRow], max_steps: int) -> int:
    """Count the published losses within `max_steps` that have no counterpart among ours."""
    keys = published.losses  # an evaluation follows the last step, a loss of a step precedes it
    expected = {(step, split) for step, split in keys if step + (split == "batch") <= max_steps}
    found = {(row.step, row.split) for row in rows}
    return len(expected - found)


def compare(rung: Rung, step: int, split: str, theirs: float | None, ours: float) -> LossRow:
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


def is_timed(rung: Rung, device: torch.device) -> bool:
    """Return whether step times on this device can be compared with those of the rung."""
    kind = "gpu" if device.type == "cuda" else device.type
    return rung.device in ("any", kind)
