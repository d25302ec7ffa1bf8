"""Runs the rungs of a case through `fit` and holds each loss against the published one."""

from dataclasses import replace
from pathlib import Path

import torch

from gpt_lightning import training
from gpt_lightning.callbacks.watch import Seen, Speed, Watch
from gpt_lightning.configs import config_file
from gpt_lightning.device import free_memory
from gpt_lightning.logger import RunLogger
from gpt_lightning.machine import machine_record
from gpt_lightning.plots import plot_losses
from gpt_lightning.reproduce.cases import Case, Rung
from gpt_lightning.reproduce.published import Published, read_published
from gpt_lightning.reproduce.rows import FAILED, OK, SKIPPED, LossRow, Options, PhaseRow, RungRow
from gpt_lightning.tables import Console, write_report

PICTURE = "losses.png"


class CaseRun:
    """Runs rungs one after the other, and writes all results again after each.

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
        self._rates: tuple[float | None, float | None] = (None, None)  # of the rung before, theirs

    def skip(self, rung: Rung, reason: str) -> None:
        """Leaves an empty row that says why."""
        self.rungs.append(RungRow(rung.name, SKIPPED, note=reason))
        self._rates = (None, None)

    def run(self, rung: Rung) -> None:
        """Trains one rung and compares it."""
        published = read_published(self.case, rung)
        each_step = self.case.kind == "steps"
        console = Console(LossRow, without=() if each_step else ("step_ms", "tokens_per_sec"))
        print(f"\n{rung.name}: configs/{rung.config}" + (f"; {rung.note}" if rung.note else ""))
        print(console.header(), flush=True)
        rows: list[LossRow] = []

        def add(row: LossRow) -> None:
            rows.append(row)
            print(console.line(row), flush=True)

        watch = Watch(lambda seen: add(loss_row(rung, published, seen)), each_step)
        training.run(
            ["fit", *self._arguments(rung)],
            callbacks=[watch],
            logger=RunLogger(str(self.folder.parent), self.folder.name, version=rung.name),
        )
        if not each_step:
            add(best_row(rung, published, rows))
        assert watch.speed is not None
        self.losses += rows
        self.rungs.append(self._rung_row(rung, published, rows, watch.speed))
        self.phases += [PhaseRow(rung.name, *phase) for phase in watch.speed.seconds.items()]
        self.write()
        free_memory()

    def _arguments(self, rung: Rung) -> list[str]:
        quiet = ["--samples.max_new_tokens=0"]
        if self.case.kind == "steps":  # a line a step is progress enough, and nobody resumes these
            quiet += ["--trainer.enable_progress_bar=false", "--trainer.enable_checkpointing=false"]
        config = f"--config={config_file(rung.config)}"
        return [config, *quiet, *rung.settings, *self.options.arguments()]

    def _rung_row(
        self, rung: Rung, published: Published, rows: list[LossRow], speed: Speed
    ) -> RungRow:
        differences = [abs(row.difference) for row in rows if row.difference is not None]
        failed = any(row.verdict == FAILED for row in rows) or not differences
        notes = [rung.note] if rung.note else []
        timed = is_timed(rung, speed.device)
        if not timed:
            notes.append(f"losses only: its times are of a {rung.device}, this is {speed.device}")
        if speed.stalls:
            notes.append(f"{speed.stalls} stalls left out of the rates")
        if self.options.fit:
            notes.append(f"changed: {' '.join(self.options.fit)}")
        rate, their_rate = speed.tokens_per_sec if timed else None, published.tokens_per_sec
        before, their_before = self._rates
        self._rates = rate, their_rate
        return RungRow(
            rung.name,
            FAILED if failed else OK,
            losses=len(differences),
            worst_difference=max(differences, default=None),
            first_step_ms=speed.first_step_ms if timed else None,
            step_ms=speed.step_ms if timed else None,
            tokens_per_sec=rate,
            mfu=speed.mfu if timed else None,
            speedup=rate / before if rate and before else None,
            published_step_ms=published.step_ms,
            published_speedup=their_rate / their_before if their_rate and their_before else None,
            note="; ".join(notes),
        )

    @property
    def failed(self) -> list[str]:
        """Rungs that missed a tolerance."""
        return [row.rung for row in self.rungs if row.verdict == FAILED]

    def write(self) -> None:
        """Writes the tables and the picture of all rungs so far."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.losses:
            plot_losses(self.folder / PICTURE, self.case.title, self.losses)
        write_report(
            self.folder,
            title=self.case.title,
            machine=machine_record(self.argv),
            tables={"rungs": self.rungs, "losses": self.losses, "phases": self.phases},
            notes=[f"Theirs: {self.case.source}."],
            pictures=[PICTURE] if self.losses else [],
        )


def loss_row(rung: Rung, published: Published, seen: Seen) -> LossRow:
    """A loss of ours beside the published one, if there is one of that step."""
    theirs = published.losses.get((seen.step, seen.split))
    row = compare(rung, seen.step, seen.split, theirs, seen.loss)
    if seen.seconds is None or seen.tokens is None or not is_timed(rung, seen.device):
        return row
    return replace(row, step_ms=seen.seconds * 1e3, tokens_per_sec=seen.tokens / seen.seconds)


def best_row(rung: Rung, published: Published, rows: list[LossRow]) -> LossRow:
    """The lowest validation loss, against the lowest published one up to the same step.

    The row's step is that of ours.
    """
    ours = {row.step: row.ours for row in rows if row.split == "val" and row.ours is not None}
    best = min(ours, key=lambda step: ours[step])
    theirs = [
        loss
        for (step, split), loss in published.losses.items()
        if split == "val" and step <= max(ours)
    ]
    return compare(rung, best, "best", min(theirs, default=None), ours[best])


def compare(rung: Rung, step: int, split: str, theirs: float | None, ours: float) -> LossRow:
    """A row without times; no verdict where nothing was published."""
    if theirs is None:
        return LossRow(rung.name, step, split, None, ours)
    tolerance = rung.tolerance_at(step)
    passed = abs(ours - theirs) <= tolerance  # false for nan
    if rung.below is not None and step == rung.below[0]:
        passed = passed and ours < rung.below[1]
    return LossRow(
        rung.name, step, split, theirs, ours, ours - theirs, tolerance, OK if passed else FAILED
    )


def is_timed(rung: Rung, device: torch.device) -> bool:
    """Whether step times on a device are the rung's own."""
    kind = "gpu" if device.type == "cuda" else device.type
    return rung.device in ("any", kind)
