"""Run the rungs of a case through `fit` and compare each loss with the published one."""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import (
    free_memory,
    machine_record,
    peak_memory_gib,
    reset_peak_memory,
)
from gpt_lightning.reproduce.cases import Case, Rung, Verdict, fit_arguments
from gpt_lightning.reproduce.published import (
    Losses,
    Published,
    published_speed,
    read_published,
    rung_before,
)
from gpt_lightning.reproduce.settings import SettingRow, compare_settings, read_settings
from gpt_lightning.runs.folders import RunPaths, run_folders, sort_saved
from gpt_lightning.runs.resume import newest_checkpoint
from gpt_lightning.tables.ledger import Ledger
from gpt_lightning.tables.pictures import LOSSES_COLUMNS, LOSSES_WIDTH_IN, styled, write_picture
from gpt_lightning.tables.rows import (
    Column,
    Console,
    Count,
    Hidden,
    Hundredths,
    Row,
    Share,
    Tables,
    Tenths,
    Text,
    Whole,
    write_report,
)
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.arithmetic import ArithmeticCheck
from gpt_lightning.training.callbacks.recorder import Observation, RunRecorder, RunTimings
from gpt_lightning.training.module import GPTModule

PICTURE = "losses.png"
RungName = Annotated[str, Column(width=17)]
RungLoss = Annotated[float | None, Column(".6f", width=9)]


@dataclass
class LossRow(Row):
    """Published loss and ours; without a verdict if ours is of fewer batches than theirs."""

    rung: RungName
    step: Annotated[int, Column("d")]
    split: Text
    theirs: RungLoss
    ours: Annotated[float, Column(".6f", width=9)]
    difference: Annotated[float | None, Column("+.6f")] = None
    tolerance: Annotated[float | None, Column("g")] = None
    verdict: Text = None
    step_ms: Tenths = None
    tokens_per_sec: Whole = None
    batches: Count = None


@dataclass
class RungRow(Row):
    """Outcome of a rung."""

    rung: RungName
    verdict: Text
    device: Text = None
    losses: Count = None
    drifted: Count = None
    worst_difference: Annotated[float | None, Column(".2g")] = None
    step_ms: Tenths = None
    tokens_per_sec: Whole = None
    mfu: Share = None
    peak_memory_gib: Hundredths = None
    attention: Text = None
    speedup: Hundredths = None
    published_step_ms: Tenths = None
    published_tokens_per_sec: Whole = None
    published_mfu: Share = None
    published_speedup: Hundredths = None
    note: Hidden = None


@dataclass(eq=False)
class CaseRun:
    """Run rungs one after the other, and write all results again after each new one.

    Args:
        case: Published table.
        changes: Options of `fit` that the command line adds to every rung.
        folder: Folder of the results.
        argv: Command line, for the report.
        resume: True if the rungs continue from their checkpoints in the folder.
    """

    case: Case
    changes: Sequence[str]
    folder: Path
    argv: list[str]
    resume: bool = False

    def __post_init__(self) -> None:
        self.each_step = self.case.kind == "steps"
        self.losses: list[LossRow] = []
        self.rungs: list[RungRow] = []
        self.settings: list[SettingRow] = []
        self.machine = machine_record(self.argv)
        machine = [f"{name:<9} {fact}" for name, fact in self.machine.items()]
        self._head = [self.case.title, *machine]  # printed when a rung's settings are checked

    def skip(self, rung: Rung, reason: str) -> None:
        """Add a row without numbers, with the reason."""
        self.rungs.append(RungRow(rung.name, Verdict.SKIPPED, note=reason))

    def run(self, rung: Rung) -> None:
        """Train one rung and compare its losses; a rung that fails is a row too.

        Raises:
            UserError: The settings or the data are wrong.
        """
        published = read_published(self.case, rung)
        checkpoint, step, seen = earlier(self.folder, rung) if self.resume else (None, 0, [])
        console = Console(LossRow)
        intro = "; ".join(filter(None, (f"{rung.name}: {' + '.join(rung.configs)}", rung.note)))
        rows: list[LossRow] = []

        def begin(module: GPTModule) -> None:
            ours = read_settings(module)
            data = "loaded {train_tokens} tokens, 1 epoch = {epoch_batches} batches".format(**ours)
            tqdm.write("\n".join([*self._head, f"\n{intro}", data, console.header]))
            self._head.clear()
            for observation in seen:
                show(observation)
            self._check(rung, ours)

        def show(seen: Observation) -> None:
            theirs = published.losses.get((seen.step, seen.split))
            add(loss_row(self.case, rung, theirs, seen))

        def add(row: LossRow) -> None:
            rows.append(row)
            self.losses.append(row)
            key = {name: getattr(row, name) for name in ("rung", "step", "split")}
            Ledger(self.folder).append(key, asdict(row))
            evaluation = row.split != "batch"
            if self.each_step or evaluation or row.verdict == Verdict.FAILED:
                tqdm.write(console.line(row))  # tqdm prints it above the progress bar
            if evaluation:
                self.write()  # it may be an hour of work

        steps = {step for step, split in published.losses if split == "batch"}
        recorder = RunRecorder(show, self.each_step, steps, begin)
        check = ArithmeticCheck(rung.theirs)
        resume = [f"--resume={checkpoint}"] if checkpoint else []
        arguments = fit_arguments(self.case, rung, [*self.changes, *resume])
        reset_peak_memory()
        try:
            training.run_cli(
                ["fit", *arguments], callbacks=[check, recorder], folder=self.folder / rung.name
            )
        except UserError as error:  # non-finite gradients, a full disk
            if not rows:
                raise
            self.rungs.append(RungRow(rung.name, Verdict.FAILED, note=f"stopped: {error}"))
        except Exception as error:  # out of memory, no compiler: the next rung may run
            text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self.rungs.append(RungRow(rung.name, Verdict.ERROR, note=text))
        else:
            self._check(rung, check.found)
            if any(row.split == "val" for row in rows):
                add(best_row(self.case, rung, published.losses, rows))
            assert recorder.speed is not None
            self.rungs.append(self._rung_row(rung, published, rows, recorder.speed, step))
        self.write()
        free_memory()

    def _check(self, rung: Rung, ours: Fields) -> None:
        """Compare settings of the run with the published ones; print those that differ."""
        rows = compare_settings(rung, ours)
        self.settings += rows
        for row in rows:
            if row.verdict == Verdict.FAILED:
                tqdm.write(f"{row.verdict}: {row.setting} is {row.ours}, theirs is {row.theirs}")

    def _rung_row(
        self, rung: Rung, published: Published, rows: list[LossRow], timings: RunTimings, step: int
    ) -> RungRow:
        compared = [row for row in rows if row.verdict]
        missing = missing_losses(published.losses, rows, timings.max_steps)
        failed = [row for row in self.settings if row.verdict == Verdict.FAILED]
        wrong = [row.setting for row in failed if row.rung == rung.name]
        missed = [row for row in compared if row.verdict == Verdict.FAILED]
        timed = is_timed(rung, timings.device)
        where = f"losses only: its times are of a {rung.device}, this is {timings.device}"
        notes = [
            f"other settings than theirs: {', '.join(wrong)}" if wrong else "",
            f"{len(missed)} losses miss, the first at step {missed[0].step}" if missed else "",
            rung.note,
            f"{missing} published losses have no counterpart" if missing else "",
            "" if timed else where,
            f"{timings.stalls} stalls left out of the rates" if timings.stalls else "",
            f"changed: {' '.join(self.changes)}" if self.changes else "",
            published_speed(rung, published)[1],
            f"continued at step {step}: times are of the steps since" if step else "",
        ]
        return RungRow(
            rung.name,
            Verdict.FAILED if missed or missing or wrong or not compared else Verdict.OK,
            timings.device.type,
            len(compared),
            sum(row.verdict == Verdict.DRIFT for row in compared),
            max((abs(row.difference or 0.0) for row in compared), default=None),
            note="; ".join(filter(None, notes)),
            **self._speeds(rung, published, timings if timed else None),
        )

    def _speeds(self, rung: Rung, published: Published, timings: RunTimings | None) -> Fields:
        """Return the columns of speed and kernel, those of ours only with timings."""
        theirs, ours = published_speed(rung, published)[0], {}
        if timings is not None:
            names = ("step_ms", "tokens_per_sec", "mfu", "attention")
            ours = {name: getattr(timings, name) for name in names}
            ours["peak_memory_gib"] = peak_memory_gib(timings.device)
        measured = {row.rung: row.tokens_per_sec for row in self.rungs}
        for before in rung_before(self.case, rung):
            rate = read_published(self.case, before).tokens_per_sec
            theirs["speedup"] = ratio(theirs["tokens_per_sec"], rate)
            ours["speedup"] = ratio(ours.get("tokens_per_sec"), measured.get(before.name))
        return ours | {f"published_{name}": value for name, value in theirs.items()}

    def write(self) -> None:
        """Write the tables and the picture of all rungs so far."""
        tables: Tables = {"rungs": self.rungs, "losses": self.losses, "settings": self.settings}
        notes, pictures = [f"Theirs: {self.case.source}."], [PICTURE] if self.losses else []
        write_report(self.folder, self.case.title, self.machine, tables, notes, pictures)
        if self.losses:
            plot_losses(self.folder / PICTURE, self.case.title, self.losses)

    def summary(self) -> Iterator[str]:
        """Yield a line for each rung, its note, and the folder of the results."""
        console = Console(RungRow)
        yield f"\n{console.header}"
        yield from map(console.line, self.rungs)
        yield f"\n{self.folder}: results.md, results.json, {PICTURE}, a CSV a table"
        yield from (f"{row.verdict}: {row.rung}: {row.note}" for row in self.rungs if row.note)
        verdicts = [row.verdict for row in self.losses if row.verdict]
        yield f"{verdicts.count(Verdict.OK)} of {len(verdicts)} losses within their tolerance"


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None if one of them is missing."""
    return a / b if a and b else None


@styled
def plot_losses(path: Path, title: str, rows: Sequence[LossRow]) -> None:
    """Draw published losses as circles over our curves, and the differences below them.

    Args:
        path: A .png file.
        title: Title of the picture.
        rows: Losses of all rungs.
    """
    figure = Figure(figsize=(LOSSES_WIDTH_IN, 6.4))
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    series: dict[str, list[LossRow]] = {}
    for row in rows:
        if row.split != "best":
            series.setdefault(f"{row.rung} {row.split}", []).append(row)
    for index, (label, points) in enumerate(series.items()):
        look = {"color": f"C{index}"}
        losses.plot([r.step for r in points], [r.ours for r in points], label=label, **look)
        both = [r for r in points if r.difference is not None]
        steps = [r.step for r in both]
        losses.plot(steps, [r.theirs for r in both], "o", ms=5, mfc="none", **look)
        distances = [max(abs(r.difference or 0.0), 1e-7) for r in both]  # 0 has no logarithm
        differences.plot(steps, distances, "o-", ms=3, lw=0.8, **look)
        tolerances = np.array([r.tolerance for r in both], dtype=float)  # None is nan
        differences.step(steps, tolerances, where="post", ls="--", lw=1, **look)
    losses.set(ylabel="loss (nats per token)", title=textwrap.fill(title, LOSSES_COLUMNS))
    losses.legend(title="line: ours; circle: published", ncols=2)
    differences.set(ylabel="difference (nats)", xlabel="optimizer step", yscale="log")
    differences.set_title("absolute difference; dashed: tolerance", fontsize="medium")
    differences.xaxis.set_major_locator(MaxNLocator(integer=True))
    write_picture(figure, path)


# ---- comparison of a loss ------------------------------------------------------------------------


def loss_row(case: Case, rung: Rung, theirs: float | None, seen: Observation) -> LossRow:
    """Return the row of one of our losses; without a published one it has no verdict."""
    row = LossRow(rung.name, seen.step, seen.split, theirs, seen.loss, batches=seen.batches)
    if seen.seconds and seen.tokens and is_timed(rung, seen.device):
        rate = seen.tokens / seen.seconds
        row = replace(row, step_ms=seen.seconds * 1e3, tokens_per_sec=rate)
    if theirs is None:
        return row
    difference = seen.loss - theirs
    row = replace(row, difference=difference)
    if seen.split != "batch" and seen.batches != case.eval_batches:
        return row
    tolerance, verdict = rung.tolerance_at(seen.step, seen.split), Verdict.FAILED  # nan fails too
    if abs(difference) <= tolerance:
        verdict = Verdict.OK
    elif abs(difference) <= rung.drift_at(seen.step):
        verdict = Verdict.DRIFT
    if rung.below and seen.step == rung.below[0] and not seen.loss < rung.below[1]:
        verdict = Verdict.FAILED
    return replace(row, tolerance=tolerance, verdict=verdict)


def best_row(case: Case, rung: Rung, losses: Losses, rows: list[LossRow]) -> LossRow:
    """Compare our lowest validation loss with the lowest published one up to our last step."""
    ours = [row for row in rows if row.split == "val"]
    best, last = min(ours, key=lambda row: row.ours), max(row.step for row in ours)
    theirs = [loss for (step, split), loss in losses.items() if split == "val" and step <= last]
    seen = Observation(torch.device("cpu"), best.step, "best", best.ours, batches=best.batches)
    return loss_row(case, rung, min(theirs, default=None), seen)


def missing_losses(losses: Losses, rows: list[LossRow], max_steps: int) -> int:
    """Count the published losses within `max_steps` that have no counterpart among ours."""
    # an evaluation follows the last step, a loss of a step precedes it
    expected = {(step, split) for step, split in losses if step + (split == "batch") <= max_steps}
    return len(expected - {(row.step, row.split) for row in rows})


def is_timed(rung: Rung, device: torch.device) -> bool:
    """Return whether step times on this device can be compared with those of the rung."""
    return rung.device in ("any", device.type.replace("cuda", "gpu"))


# ---- continue a run whose process has ended ------------------------------------------------------


def find_folder(resume: str, root: Path, rungs: list[Rung]) -> Path | None:
    """Return the folder of results to continue.

    Args:
        resume: `auto`, for the newest folder under `root` in which each rung has a checkpoint; or
            the path of a folder.
        root: Folder of all results of a case.
        rungs: Rungs to continue.

    Returns:
        The folder; None if `auto` finds none.

    Raises:
        UserError: The given folder has no checkpoint of a rung, or results of other rungs.
    """
    names = [rung.name for rung in rungs]
    for folder in run_folders(root)[1:] if resume == "auto" else [Path(resume)]:
        saved = all(RunPaths(folder / name).saved() for name in names)
        if saved and {key["rung"] for key, _ in Ledger(folder).read()} <= {*names}:
            return folder
    if resume == "auto":
        return None
    raise UserError(
        f"--resume {resume}: expected a folder with checkpoints in {names[0]}/checkpoints and "
        f"results of {', '.join(names)} alone: give it, or auto, or other --rungs"
    )


def earlier(folder: Path, rung: Rung) -> tuple[Path, int, list[Observation]]:
    """Return the newest undamaged checkpoint of a rung, its step, and the evaluations up to it.

    Raises:
        UserError: All checkpoints are damaged.
    """
    path = newest_checkpoint(folder / rung.name)
    assert path is not None  # find_folder has seen one
    step, cpu = sort_saved([path])[0].step, torch.device("cpu")
    seen = [
        Observation(cpu, row["step"], row["split"], row["ours"], batches=row["batches"])
        for row in Ledger(folder).by_key().values()
        if row["rung"] == rung.name and row["split"] != "best"
        # a loss of step n is of the update after n updates
        if row["step"] + (row["split"] == "batch") <= step
    ]
    return path, step, seen
