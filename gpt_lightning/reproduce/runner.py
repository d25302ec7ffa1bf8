"""Runs the rungs of a case through `fit` and holds each loss against the published one."""

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import free_memory
from gpt_lightning.hardware.machine import machine_record
from gpt_lightning.reports.plots import plot_losses
from gpt_lightning.reports.tables import Console, write_report
from gpt_lightning.reproduce.cases import Case, Rung
from gpt_lightning.reproduce.published import Published, read_published
from gpt_lightning.reproduce.rows import (
    DRIFT,
    ERROR,
    FAILED,
    OK,
    SKIPPED,
    LossRow,
    Options,
    PhaseRow,
    RungRow,
)
from gpt_lightning.runs.logger import RunLogger
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import Observation, RunRecorder, RunTimings

PICTURE = "losses.png"
Key = tuple[int, str]  # step and split


class CaseRun:
    """Runs rungs one after the other, and writes all results again whenever there are new ones.

    Args:
        case: The table.
        options: What the command line changes.
        folder: Where results land.
        argv: The command, for the report.
    """

    def __init__(self, case: Case, options: Options, folder: Path, argv: list[str]) -> None:
        self.case, self.options, self.folder, self.argv = case, options, folder, argv
        self.losses: list[LossRow] = []
        self.rungs: list[RungRow] = []
        self.phases: list[PhaseRow] = []
        self._machine = machine_record(argv)

    def skip(self, rung: Rung, reason: str) -> None:
        """Leaves an empty row that says why."""
        self.rungs.append(RungRow(rung.name, SKIPPED, note=reason))

    def run(self, rung: Rung) -> None:
        """Trains one rung and compares it; what goes wrong with it is a row too.

        Raises:
            UserError: settings or data that cannot work.
        """
        published = read_published(self.case, rung)
        note = f"; {rung.note}" if rung.note else ""
        print(f"\n{rung.name}: {' + '.join(rung.configs)}{note}")
        first = len(self.losses)
        try:
            speed = self._train(rung, published)
        except UserError:
            if len(self.losses) == first:
                raise
            row = RungRow(rung.name, FAILED, note="stopped: the loss is not a number")
        except Exception as error:  # out of memory, no compiler: the next rung may be better off
            text = " ".join(str(error).split())[:300]
            row = RungRow(rung.name, ERROR, note=f"{type(error).__name__}: {text}")
        else:
            row = self._rung_row(rung, published, self.losses[first:], speed)
            self.phases += [PhaseRow(rung.name, *phase) for phase in speed.seconds.items()]
        self.rungs.append(row)
        self.write()
        free_memory()

    def _train(self, rung: Rung, published: Published) -> RunTimings:
        each_step = self.case.kind == "steps"
        console = Console(LossRow, without=() if each_step else ("step_ms", "tokens_per_sec"))
        tqdm.write(console.header())

        def add(row: LossRow) -> None:
            self.losses.append(row)
            tqdm.write(console.line(row))  # above the bar of a long run
            if not each_step:
                self.write()  # an evaluation may be an hour of work

        watch = RunRecorder(lambda seen: add(loss_row(rung, published, seen)), each_step)
        training.run(
            ["fit", *self._arguments(rung)],
            callbacks=[watch],
            logger=RunLogger(str(self.folder.parent), self.folder.name, version=rung.name),
        )
        own = [row for row in self.losses if row.rung == rung.name and row.split == "val"]
        if own:
            add(best_row(rung, published, own))
        assert watch.speed is not None
        return watch.speed

    def _arguments(self, rung: Rung) -> list[str]:
        quiet = ["--samples.max_new_tokens=0"]
        if self.case.kind == "steps":  # a line a step is progress enough, and nobody resumes these
            quiet += [
                "--trainer.log_every_n_steps=1",
                "--trainer.enable_progress_bar=false",
                "--trainer.enable_checkpointing=false",
            ]
        configs = [f"--config={name}" for name in rung.configs]
        return [*configs, *quiet, *rung.settings, *self.options.arguments()]

    def _rung_row(
        self, rung: Rung, published: Published, rows: list[LossRow], speed: RunTimings
    ) -> RungRow:
        compared = [row for row in rows if row.difference is not None]
        verdicts = [row.verdict for row in compared]
        missing = missing_losses(self.case, published, rows, speed.max_steps)
        timed = is_timed(rung, speed.device)
        notes = [rung.note] if rung.note else []
        notes += [f"{missing} published losses have no counterpart"] if missing else []
        if not timed:
            notes.append(f"losses only: its times are of a {rung.device}, this is {speed.device}")
        notes += [f"{speed.stalls} stalls left out of the rates"] if speed.stalls else []
        notes += [best_note(published, rows)] if self.case.kind == "evaluations" else []
        notes += [f"changed: {' '.join(self.options.fit)}"] if self.options.fit else []
        row = RungRow(
            rung.name,
            FAILED if FAILED in verdicts or missing or not compared else OK,
            speed.device.type,
            len(compared),
            verdicts.count(DRIFT),
            max((abs(row.difference or 0.0) for row in compared), default=None),
            published_first_step_ms=published.first_step_ms,
            published_step_ms=published.step_ms,
            note="; ".join(note for note in notes if note),
        )
        return self._with_speed(row, rung, published, speed) if timed else row

    def _with_speed(
        self, row: RungRow, rung: Rung, published: Published, speed: RunTimings
    ) -> RungRow:
        before = self._before(rung)
        rates = {r.rung: r.tokens_per_sec for r in self.rungs}
        ours = rates.get(before.name) if before else None
        theirs = read_published(self.case, before).tokens_per_sec if before else None
        return replace(
            row,
            first_step_ms=speed.first_step_ms,
            step_ms=speed.step_ms,
            tokens_per_sec=speed.tokens_per_sec,
            mfu=speed.mfu,
            peak_tflops=speed.peak_flops / 1e12 if speed.peak_flops else None,
            speedup=speed.tokens_per_sec / ours if speed.tokens_per_sec and ours else None,
            published_speedup=published.tokens_per_sec / theirs
            if published.tokens_per_sec and theirs
            else None,
        )

    def _before(self, rung: Rung) -> Rung | None:
        """The rung before it in the published table; rungs of ours do not count."""
        earlier = self.case.rungs[: self.case.rungs.index(rung)]
        published = [other for other in earlier if other.published_times != ""]
        return published[-1] if published and not self.case.alternatives else None

    def verdicts(self) -> set[str]:
        """Of all rungs."""
        return {row.verdict for row in self.rungs}

    def write(self) -> None:
        """Writes the tables and the picture of all rungs so far."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.losses:
            plot_losses(self.folder / PICTURE, self.case.title, self.losses)
        write_report(
            self.folder,
            title=self.case.title,
            machine=self._machine,
            tables={"rungs": self.rungs, "losses": self.losses, "phases": self.phases},
            notes=[f"Theirs: {self.case.source}."],
            pictures=[PICTURE] if self.losses else [],
        )


def loss_row(rung: Rung, published: Published, seen: Observation) -> LossRow:
    """A loss of ours beside the published one, if there is one of that step."""
    theirs = published.losses.get((seen.step, seen.split))
    row = compare(rung, seen.step, seen.split, theirs, seen.loss)
    if seen.seconds is None or seen.tokens is None or not is_timed(rung, seen.device):
        return row
    return replace(row, step_ms=seen.seconds * 1e3, tokens_per_sec=seen.tokens / seen.seconds)


def best_row(rung: Rung, published: Published, ours: list[LossRow]) -> LossRow:
    """The lowest validation loss, against the lowest published one up to the same step.

    The row's step is that of ours.
    """
    best = best_of(ours)
    theirs = [loss for _, loss in published_validation(published, ours)]
    assert best.ours is not None
    return compare(rung, best.step, "best", min(theirs, default=None), best.ours)


def best_of(rows: list[LossRow]) -> LossRow:
    """The row with the lowest loss of ours."""
    return min(rows, key=lambda row: float("inf") if row.ours is None else row.ours)


def published_validation(published: Published, ours: list[LossRow]) -> list[tuple[int, float]]:
    """Published validation losses up to the last step of ours: (step, loss)."""
    last = max(row.step for row in ours)
    points = [(step, loss) for (step, split), loss in published.losses.items() if split == "val"]
    return [(step, loss) for step, loss in points if step <= last]


def best_note(published: Published, rows: list[LossRow]) -> str:
    """The best validation losses and their steps, theirs and ours."""
    ours = [row for row in rows if row.split == "val"]
    if not ours or not published_validation(published, ours):
        return ""
    best = best_of(ours)
    step, loss = min(published_validation(published, ours), key=lambda point: point[1])
    return f"best validation loss {best.ours:.4f} at step {best.step}, theirs {loss:.4f} at {step}"


def missing_losses(case: Case, published: Published, rows: list[LossRow], max_steps: int) -> int:
    """Published losses within the steps that were to be made, but without one of ours."""
    last = max_steps - 1 if case.kind == "steps" else max_steps
    expected = {key for key in published.losses if key[0] <= last}
    found = {(row.step, row.split) for row in rows}
    return len(expected - found)


def compare(rung: Rung, step: int, split: str, theirs: float | None, ours: float) -> LossRow:
    """A row without times; no verdict where nothing was published."""
    if theirs is None:
        return LossRow(rung.name, step, split, None, ours)
    difference, tolerance = ours - theirs, rung.tolerance_at(step)
    verdict = FAILED  # also for nan
    if abs(difference) <= tolerance:
        verdict = OK
    elif abs(difference) <= rung.drift_at(step):
        verdict = DRIFT
    if rung.below is not None and step == rung.below[0] and not ours < rung.below[1]:
        verdict = FAILED
    return LossRow(rung.name, step, split, theirs, ours, difference, tolerance, verdict)


def is_timed(rung: Rung, device: torch.device) -> bool:
    """Whether step times on a device are the rung's own."""
    kind = "gpu" if device.type == "cuda" else device.type
    return rung.device in ("any", kind)
