"""RunLogger: folder and metrics file of a run. RunEvents: TensorBoard's files in that folder."""

import contextlib
import functools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.core.saving import save_hparams_to_yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning.errors import UserError, warn
from gpt_lightning.files import Fields, explained, locked, replacement, sync_folder, write_atomic
from gpt_lightning.runs.folders import RunPaths, claim_folder

EVENTS = "events.out.*"  # TensorBoard's files
HPARAMS = TensorBoardLogger.NAME_HPARAMS_FILE
HPARAMS_EVENTS = "events.out.tfevents.0.hparams"
# CUSTOM SCALARS: categories and charts in their order; a chart has all curves that match its list
CHARTS: dict[str, Fields] = {
    "Loss": {
        "Loss over steps": ["Multiline", ["train/loss$", "val/loss$"]],
        "Loss over tokens": ["Multiline", ["loss_by_tokens/train$", "loss_by_tokens/val$"]],
    },
    "Speed": {
        "Tokens per second": ["Multiline", ["perf/tokens_per_sec$"]],
        "MFU, fraction of the peak": ["Multiline", ["perf/mfu$"]],
        "Milliseconds per step": ["Multiline", ["perf/step_ms$"]],
        "Milliseconds of waiting for data": ["Multiline", ["perf/data_wait_ms$"]],
    },
    "Optimization": {
        "Learning rates": ["Multiline", ["optim/lr$", "optim/lr_muon$"]],
        "Gradient norm": ["Multiline", ["optim/grad_norm$"]],
    },
    "Memory": {
        "Peak memory in GiB": ["Multiline", ["perf/memory_gib$"]],
    },
}
# HPARAMS: curves whose last values are compared
COMPARED = ("val/loss", "train/loss", "perf/tokens_per_sec", "perf/mfu", "perf/memory_gib")
GLOBAL_STEP = "trainer/global_step"  # logged with a metric `step`, which is the loggers' x then
FLUSH_S = 1  # seconds between two flushes of the writer's own thread
# curves over tokens; their group precedes the others, so TIME SERIES shows the losses first
OVER_TOKENS = {"train/loss": "loss_by_tokens/train", "val/loss": "loss_by_tokens/val"}
# address of the charts in a browser, without smoothing, which would hide where a curve ends
PAGE = "http://localhost:6006/?smoothing=0#custom_scalars&_smoothingWeight=0"


class RunLogger(Logger):
    """Own the folder of a run, and write `metrics.jsonl` to it, whatever other loggers there are.

    A row of the file is one JSON object, flushed at once: `step` (1 is the first optimizer step; a
    training loss precedes its step's update, a validation loss follows it), `time` (seconds since
    the epoch) and the metrics that were logged together. A metric named `time` is `own/time`.

    Args:
        runs: Folder of all runs of a name. A new run is `KIND_N` in it, with the next free N.
        kind: version for a training run; validate, test or predict for an evaluation.
        folder: Folder to write to instead: the run that is resumed, or a given one.
        resume_step: Step after which a resumed run continues; rows of later steps, logged by a
            session that was killed, are deleted. None: a new run.
        resume_rows: Rows that there were when the checkpoint was saved; None: unknown.

    Attributes:
        rows: Rows that this run has logged.
        on_sync: Function that `sync` calls; RunEvents flushes there.
    """

    def __init__(
        self,
        runs: Path,
        kind: str = "version",
        folder: Path | None = None,
        resume_step: int | None = None,
        resume_rows: int | None = None,
    ):
        super().__init__()
        self.runs, self.resume_step = runs, resume_step
        self.resume_rows = resume_rows
        self.rows = 0
        self._kind = kind
        self.on_sync: Callable[[], None] = lambda: None
        self._is_new = not folder
        if folder:
            self.folder = folder
            if resume_step is not None:
                RunPaths(folder).check()  # nothing is changed yet

    @functools.cached_property
    def folder(self) -> Path:
        """Folder of the run; a new one is made at the first use.

        Rank 0 makes it, and RunCheckpoint sets it on the other ranks.
        """
        assert is_rank_zero(), "the other ranks receive the folder from rank 0"
        with explained("write to", self.runs):
            return claim_folder(self.runs, self._kind)

    @property
    def name(self) -> str:
        return ""  # save_dir is the run's own folder

    version = name

    @property
    def save_dir(self) -> str | None:
        return str(self.folder) if "folder" in vars(self) or is_rank_zero() else None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no nan
        row = {"step": metrics.get(GLOBAL_STEP, step), "time": round(time.time(), 3)}
        row |= {f"own/{k}" if k in row else k: v for k, v in finite.items()}
        path = RunPaths(self.folder).metrics
        with explained("write", path):
            self._drop_later_rows(path)
            if not self.rows:
                path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
        self.rows += 1

    def _drop_later_rows(self, path: Path) -> None:
        if self.resume_step is None:
            return
        if path.exists():
            kept = rows_until(path, self.resume_step, self.resume_rows)
            write_atomic(path, b"".join(kept))
            self.rows = len(kept)
        if self.rows < (self.resume_rows or 0):
            warn(
                f"{path} has {self.rows} rows up to step {self.resume_step}, and had "
                f"{self.resume_rows} when the checkpoint was saved: the other rows are lost"
            )
        self.resume_step = None

    @rank_zero_only
    def sync(self) -> None:
        """Sync the rows to the disk, before a checkpoint of their steps is saved."""
        path = RunPaths(self.folder).metrics
        with explained("write", path):
            self.on_sync()
            self._drop_later_rows(path)
            if path.exists():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                sync_folder(path.parent)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Log nothing: config.yaml has all settings."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Delete the folder of a run that failed before it wrote anything of its own."""
        if status != "failed" or not self._is_new or "folder" not in vars(self):
            return
        # TensorBoard's two are there before Lightning has checked all settings. --resume auto would
        # continue this run, and not the one before.
        files = [path for path in self.folder.rglob("*") if not path.is_dir()]
        own = RunPaths(self.folder).identity
        if all(path == own or path.match(EVENTS) or path.name == HPARAMS for path in files):
            shutil.rmtree(self.folder, ignore_errors=True)
            for parent in (self.runs, self.runs.parent):
                with contextlib.suppress(OSError):  # not empty: other runs are in it
                    parent.rmdir()


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, also before the ranks are connected."""
    return rank_zero_only.rank == 0  # type: ignore[attr-defined]  # set by Lightning


class RunEvents(TensorBoardLogger):
    """TensorBoard's events in the folder of a run.

    Each loss is written twice, over steps and over tokens, since TensorBoard has one x-axis.

    Args:
        run: Owner of the folder.
    """

    def __init__(self, run: RunLogger):
        step = run.resume_step
        super().__init__(
            run.runs.parent,
            name=run.runs.name,
            default_hp_metric=False,
            # drop points of a killed session; --load_fast=false needs such a mark in every file
            purge_step=0 if step is None else step + 1,
            flush_secs=FLUSH_S,
        )
        self._run = run
        self._is_begun = False
        self._kept_rows: list[bytes] = []
        self._found: set[Path] = set()  # files to keep if the resume does nothing
        if step is not None:
            self._kept_rows = rows_until(RunPaths(run.folder).metrics, step, run.resume_rows)
            self._found = {*run.folder.glob(EVENTS), run.folder / HPARAMS_EVENTS}
        run.on_sync = self.flush

    @property
    def log_dir(self) -> str:
        return self._run.save_dir or self.root_dir

    @property
    def version(self) -> str:
        return Path(self.log_dir).name

    @property
    def experiment(self) -> Any:
        writer = super().experiment
        rows = self._kept_rows
        self._kept_rows = []
        if is_rank_zero():
            # purge_step drops the points over tokens, whose x is above the resumed step
            for line in rows:
                self._write_over_tokens(json.loads(line))
        return writer

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        with explained("write", self.log_dir):
            if not self._is_begun:
                self._is_begun = True
                self.experiment.add_custom_scalars(CHARTS)
            points = dict(metrics)
            if "val/loss" in points:  # it has the count of its step for loss_by_tokens alone
                points.pop("perf/tokens", None)
            super().log_metrics(points, step)
            self._write_over_tokens(metrics)

    def _write_over_tokens(self, row: Mapping[str, float | None]) -> None:
        tokens = row.get("perf/tokens")
        for tag, over_tokens in OVER_TOKENS.items():
            if tokens is not None and tag in row:
                loss = row[tag]
                y = math.nan if loss is None else loss  # JSON has no NaN
                self.experiment.add_scalar(over_tokens, y, int(tokens), row.get("time"))

    def save(self) -> None:
        """Write nothing: the writer's thread flushes the events, and RunLogger.sync all of them."""

    @rank_zero_only
    def flush(self) -> None:
        """Write all events so far to the file; Lightning would write HPARAMS in place, too."""
        self.experiment.flush()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with explained("write", self.log_dir):
            super().finalize(status)
        self._is_begun = False  # the end of a fit closes the writer
        if self._run.resume_step is not None:
            # a resume with an error, or with nothing to do, leaves the folder as it was
            for path in set(self._run.folder.glob(EVENTS)) - self._found:
                path.unlink(missing_ok=True)

    @rank_zero_only
    def log_hyperparams(self, params: Fields, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the hyperparameters so that TensorBoard compares runs by their curves.

        Lightning's method draws a false first point in each curve that it is given. TensorBoard
        shows the hyperparameters of the first file by name, so a resume replaces a file that
        precedes all others.
        """
        from torch.utils.tensorboard import FileWriter
        from torch.utils.tensorboard.summary import hparams  # imports TensorBoard

        self.hparams.update(params)
        # a bool would be shown as a number
        scalars = {k: v if type(v) in (int, float) else str(v) for k, v in params.items()}
        experiment, start, _ = hparams(scalars, dict.fromkeys(COMPARED, 0.0))
        folder = Path(self.log_dir)
        with explained("write to", folder):
            with replacement(folder / HPARAMS) as temporary:
                save_hparams_to_yaml(temporary, self.hparams)
            writer = FileWriter(folder, filename_suffix=".hparams")
            writer.add_summary(experiment)
            writer.add_summary(start)
            writer.close()
            for path in sorted(folder.glob("events.*.hparams")):  # the newest is the last one
                path.replace(folder / HPARAMS_EVENTS)


def continue_logger(logger: Logger, resume_step: int | None) -> None:
    """Prepare another logger for a run, so that it writes each point once, to a folder of its own.

    Lightning's loggers choose the next free version_N and make that folder later. Here both happen
    under a lock, so that runs that start at the same time have folders of their own.

    Args:
        logger: Logger of this session.
        resume_step: Step after which the run continues; None: a new run.

    Raises:
        UserError: The logger would delete what an earlier session has logged.
    """
    others = CSVLogger | TensorBoardLogger
    if isinstance(logger, RunEvents) or not isinstance(logger, others) or not is_rank_zero():
        return
    root = str(logger.root_dir)
    if "://" not in root:
        with explained("write to", root), locked(Path(root) / ".version.lock"):
            Path(str(logger.log_dir)).mkdir(parents=True, exist_ok=True)
    path = Path(str(logger.log_dir)) / "metrics.csv"
    if isinstance(logger, CSVLogger) and path.exists():
        raise UserError(
            f"CSVLogger would delete {path} of an earlier session: leave out the logger's version"
        )
    if isinstance(logger, TensorBoardLogger) and resume_step is not None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # the events of SummaryWriter(purge_step=...), whose argument Lightning has passed already
        start = SessionLog(status=SessionLog.START)
        for facts in {"file_version": "brain.Event:2"}, {"session_log": start}:
            logger.experiment.file_writer.add_event(Event(step=resume_step + 1, **facts))


def rows_until(path: Path, step: int, rows: int | None = None) -> list[bytes]:
    """Return the lines of a metrics file that a resume keeps, byte for byte.

    Args:
        path: File with a JSON object a line. Rows of later steps, and an incomplete last line, are
            left out.
        step: Last step whose rows are kept.
        rows: Largest number of rows: those that were there when the step was saved.
    """

    def is_kept(line: bytes) -> bool:
        try:
            return line.endswith(b"\n") and (json.loads(line)["step"] or 0) <= step
        except (ValueError, KeyError, TypeError):
            return False

    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return list(filter(is_kept, lines))[:rows]
