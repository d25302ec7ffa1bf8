"""Run the rungs of a case through `fit` and compare each loss with the published one."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import (
    free_memory,
    machine_record,
    peak_memory_gib,
    reset_peak_memory,
)
from gpt_lightning.reproduce.cases import Case, Options, Rung, Settings
from gpt_lightning.reproduce.published import (
    Published,
    float32_rung,
    published_speed,
    read_published,
)
from gpt_lightning.reproduce.settings import batch_settings, compare_settings, read_settings
from gpt_lightning.reproduce.verdicts import (
    LossRow,
    PhaseRow,
    RungRow,
    best_row,
    is_timed,
    loss_row,
    missing_losses,
)
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import run_folders, saved_checkpoints
from gpt_lightning.runs.resume import newest_checkpoint
from gpt_lightning.tables.ledger import Ledger
from gpt_lightning.tables.pictures import plot_losses
from gpt_lightning.tables.rows import Console, Row, write_report
from gpt_lightning.tables.verdicts import Verdict
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import Observation, RunProbe, RunRecorder, RunTimings

PICTURE = "losses.png"
TABLES = ("rungs", "losses", "settings", "phases")  # attributes of CaseRun


class CaseRun:
    """Run rungs one after the other, and write all results again after each new one.

    Args:
        case: Published table.
        options: Changes that the command line makes to every rung.
        folder: Folder of the results.
        argv: Command line, for the report.
        resume: True if the rungs continue from their checkpoints in the folder.
    """

    def __init__(
        self, case: Case, options: Options, folder: Path, argv: list[str], resume: bool = False
    ) -> None:
        self.case, self.options, self.folder, self.resume = case, options, folder, resume
        self.each_step = case.kind == "steps"
        self.losses: list[Row] = []
        self.rungs: list[Row] = []
        self.settings: list[Row] = []
        self.phases: list[Row] = []
        self.machine = machine_record(argv)
        machine = [f"{name:<9} {fact}" for name, fact in self.machine.items()]
        self._ledger = Ledger(folder)
        self._head = [case.title, *machine]  # printed when a rung's settings are checked

    def skip(self, rung: Rung, reason: str) -> None:
        """Add a row without numbers, with the reason."""
        self.rungs.append(RungRow(rung.name, Verdict.SKIPPED, note=reason))

    def run(self, rung: Rung) -> None:
        """Train one rung and compare its losses; a rung that fails is a row too.

        Raises:
            UserError: The settings or the data are wrong.
        """
        published = read_published(self.case, rung)
        note = f"; {rung.note}" if rung.note else ""
        checkpoint, step, seen = earlier(self.folder, rung) if self.resume else (None, 0, [])
        self._head.append(f"\n{rung.name}: {' + '.join(rung.configs)}{note}")
        first = len(self.losses)
        reset_peak_memory()
        try:
            timings = self._train(rung, published, checkpoint, seen)
        except UserError as error:  # non-finite gradients, a full disk
            if len(self.losses) == first:
                raise
            row = RungRow(rung.name, Verdict.FAILED, note=f"stopped: {error}")
        except Exception as error:  # out of memory, no compiler: the next rung may run
            text = " ".join(str(error).split())[:300]
            row = RungRow(rung.name, Verdict.ERROR, note=f"{type(error).__name__}: {text}")
        else:
            if step:
                timings.early_ms = None
            row = self._rung_row(rung, published, self.losses[first:], timings, step)
            self.phases += [PhaseRow(rung.name, *phase) for phase in timings.seconds.items()]
        self.rungs.append(row)
        self.write()
        free_memory()

    def _train(
        self, rung: Rung, published: Published, checkpoint: Path | None, seen: list[Observation]
    ) -> RunTimings:
        without = ("batches",) if self.each_step else ("step_ms", "tokens_per_sec")
        console = Console(LossRow, without)

        def add(row: Row) -> None:
            self.losses.append(row)
            self._ledger.append(
                {"rung": row.rung, "step": row.step, "split": row.split}, asdict(row)
            )
            evaluation = row.split != "batch"
            if self.each_step or evaluation or row.verdict == Verdict.FAILED:
                tqdm.write(console.line(row))  # above the progress bar
            if evaluation:
                self.write()  # it may be an hour of work

        def begin() -> None:
            tqdm.write("\n".join([*self._head, console.header()]))
            self._head.clear()
            for observation in seen:
                recorder.show(observation)

        steps = {step for step, split in published.losses if split == "batch"}
        recorder = RunRecorder(
            lambda seen: add(loss_row(rung, published, seen)), self.each_step, steps, begin
        )
        probe = RunProbe(lambda module: self._check(rung, read_settings(module)))
        resume = [] if checkpoint is None else [f"--resume={checkpoint}"]
        training.run_cli(
            ["fit", *self.options.arguments(self.case, rung), *resume],
            callbacks=[recorder, probe],
            folder=self.folder / rung.name,
        )
        if checkpoint is None:
            self._check(rung, batch_settings(probe.batches))
        own = [row for row in self.losses if row.rung == rung.name and row.split == "val"]
        if own:
            add(best_row(rung, published, own)[0])
        assert recorder.speed is not None
        return recorder.speed

    def _check(self, rung: Rung, ours: Settings) -> None:
        """Compare settings of the run with the published ones; print those that differ."""
        rows = compare_settings(rung, ours)
        self.settings += rows
        for row in rows:
            if row.verdict == Verdict.FAILED:
                tqdm.write(f"{row.verdict}: {row.setting} is {row.ours}, theirs is {row.theirs}")

    def _rung_row(
        self, rung: Rung, published: Published, rows: list[Row], timings: RunTimings, step: int
    ) -> Row:
        compared = [row for row in rows if row.verdict]
        verdicts = [row.verdict for row in compared]
        partial = sum(row.difference is not None for row in rows) - len(compared)
        missing = missing_losses(published, rows, timings.max_steps)
        timed, here = is_timed(rung, timings.device), timings.device
        failures = [row for row in self.settings if row.verdict == Verdict.FAILED]
        wrong = [row.setting for row in failures if row.rung == rung.name]
        failed = Verdict.FAILED in verdicts or missing or wrong or not verdicts
        evaluated = [row for row in rows if row.split == "val"]
        notes = [
            f"other settings than theirs: {', '.join(wrong)}" if wrong else "",
            rung.note,
            f"{missing} published losses have no counterpart" if missing else "",
            f"{partial} losses without a verdict: other batches than theirs" if partial else "",
            "" if timed else f"losses only: its times are of a {rung.device}, this is {here}",
            f"{timings.stalls} stalls left out of the rates" if timings.stalls else "",
            *(() if self.each_step else process_notes(published, timings, timed)),
            best_row(rung, published, evaluated)[1] if evaluated else "",
            f"changed: {' '.join(self.options.fit)}" if self.options.fit else "",
            published_speed(rung, published)[2],
            f"continued at step {step}: times and phases are of the steps since" if step else "",
        ]
        return RungRow(
            rung.name,
            Verdict.FAILED if failed else Verdict.OK,
            here.type,
            len(verdicts),
            verdicts.count(Verdict.DRIFT),
            max((abs(row.difference or 0.0) for row in compared), default=None),
            note="; ".join(note for note in notes if note),
            **self._speeds(rung, published, timings if timed else None),
        )

    def _speeds(
        self, rung: Rung, published: Published, timings: RunTimings | None
    ) -> dict[str, Any]:
        """Return the columns of speed and kernel, those of ours only with timings.

        Speed-ups are over the rung before it in the published table, which has no rungs without
        published times, and over the rung in float32.
        """
        rate, mfu, _ = published_speed(rung, published)
        theirs = {"first_step_ms": published.first_step_ms, "step_ms": published.step_ms}
        theirs |= {"tokens_per_sec": rate, "mfu": mfu}
        ours: dict[str, Any] = {}
        if timings is not None:
            ours = {name: getattr(timings, name) for name in (*theirs, "attention")}
            ours["peak_tflops"] = ratio(timings.peak_flops, 1e12)
            ours["peak_memory_gib"] = peak_memory_gib(timings.device)
        names = [other.name for other in self.case.rungs]  # `rung` may be changed for a CPU
        earlier = self.case.rungs[: names.index(rung.name)]
        before = [other for other in earlier if other.published_times != ""][-1:]
        bases = {"speedup": before, "fp32_speedup": float32_rung(self.case, rung)}
        measured = {row.rung: row.tokens_per_sec for row in self.rungs}
        for name, base in bases.items() if not self.case.alternatives else ():
            for other in base:
                theirs[name] = ratio(rate, read_published(self.case, other).tokens_per_sec)
                ours[name] = ratio(ours.get("tokens_per_sec"), measured.get(other.name))
        return ours | {f"published_{name}": value for name, value in theirs.items()}

    def write(self) -> None:
        """Write the tables and the picture of all rungs so far."""
        tables = {name: getattr(self, name) for name in TABLES}
        notes, pictures = [f"Theirs: {self.case.source}."], [PICTURE] if self.losses else []
        write_report(self.folder, self.case.title, self.machine, tables, notes, pictures)
        if self.losses:
            plot_losses(self.folder / PICTURE, self.case.title, self.losses)

    def summary(self) -> Iterator[str]:
        """Yield a line for each rung, the wall time by phase, and the folder of the results."""
        console = Console(RungRow, without=("note",))
        yield f"\n{console.header()}"
        yield from map(console.line, self.rungs)
        yield from (f"{row.rung}: {row.note}" for row in self.rungs if row.note)
        if not self.each_step:
            yield from (f"{row.rung}: {row.phase} {row.seconds:,.1f} s" for row in self.phases)
        yield f"\n{self.folder}: results.md, results.json, {PICTURE}, a CSV a table"
        missed = [row for row in self.losses if row.verdict == Verdict.FAILED]
        for row in self.rungs:
            own = [loss for loss in missed if loss.rung == row.rung]
            if own:
                first = f"{own[0].ours:.6f} against {own[0].theirs:.6f}"
                text = f", {len(own)} losses miss, the first at step {own[0].step}: {first}"
                yield f"{row.verdict}: {row.rung}{text}"
            elif row.verdict in (Verdict.FAILED, Verdict.ERROR):
                yield f"{row.verdict}: {row.rung}"
        drifted = sum(row.verdict == Verdict.DRIFT for row in self.losses)
        total = sum(bool(row.verdict) for row in self.losses)
        text = f"{total - len(missed) - drifted} of {total} losses within their tolerance"
        drift = f", {drifted} outside it but within what rounding errors explain"
        yield text + (drift if drifted else "")


def ratio(a: float | None, b: float | None) -> float | None:
    """Return a / b, or None if one of them is missing."""
    return a / b if a and b else None


def process_notes(published: Published, timings: RunTimings, timed: bool) -> list[str]:
    """Return sentences about the steps 10 to 50, CPU time, and step times that changed."""
    notes = []
    if timed and timings.early_ms and published.early_ms:
        early = f"{timings.early_ms:,.0f} ms, theirs {published.early_ms:,.0f} ms"
        notes.append(f"mean of the steps 10 to 50: {early}")
    wall, (user, system) = sum(timings.seconds.values()), timings.cpu_s
    text = f"wall {wall:,.0f} s, user {user:,.0f} s, system {system:,.0f} s"
    if published.process_s:
        wall, user, system = published.process_s
        text += f"; theirs {wall:,.0f} s, {user:,.0f} s, {system:,.0f} s"
    if timings.drift is not None:
        text += f"; step time {timings.drift:+.0%} from the first tenth to the last (heat, load)"
    return [*notes, text]


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
    for folder in run_folders(root)[1:] if resume == "auto" else [Path(resume)]:
        missing = [r.name for r in rungs if not saved_checkpoints(folder / r.name / "checkpoints")]
        other = {key["rung"] for key, _ in Ledger(folder).read()} - {rung.name for rung in rungs}
        if missing:
            problem = f"has no {missing[0]}/checkpoints/*.ckpt: give another folder, or auto"
        elif other:
            problem = f"has results of {', '.join(sorted(other))} too: name these rungs as well"
        else:
            return folder
        if resume != "auto":
            raise UserError(f"--resume {folder} {problem}")
    return None


def earlier(folder: Path, rung: Rung) -> tuple[Path, int, list[Observation]]:
    """Return the newest undamaged checkpoint of a rung, its step, and the evaluations up to it.

    Raises:
        UserError: There is no such checkpoint.
    """
    path = newest_checkpoint(folder / rung.name)
    if path is None:
        raise UserError(
            f"--resume: no checkpoint in {folder / rung.name} is whole: restore one, or leave "
            "--resume out"
        )
    step, cpu = read_checkpoint(path).step, torch.device("cpu")
    seen = [
        Observation(cpu, row["step"], row["split"], row["ours"], batches=row["batches"])
        for row in Ledger(folder).by_key().values()
        if row["rung"] == rung.name and row["split"] != "best"
        # a loss of step n is of the update after n updates
        if row["step"] + (row["split"] == "batch") <= step
    ]
    return path, step, seen
