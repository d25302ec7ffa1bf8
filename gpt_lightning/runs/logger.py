"""RunLogger: the folder of a run and its metrics file."""

import contextlib
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, numbered_folders, sync_folder, write_atomic
from gpt_lightning.runs.folders import RunPaths, claim_folder

EVENTS = "events.out.*"  # TensorBoard's files
HPARAMS = TensorBoardLogger.NAME_HPARAMS_FILE


class RunLogger(Logger):
    """Own the folder of a run, and write `metrics.jsonl` to it, whatever other loggers there are.

    A row of the file is one JSON object, flushed at once: `step` (1 is the first optimizer step; a
    training loss precedes its step's update, a validation loss follows it), `time` (seconds since
    the epoch) and the metrics that were logged together.

    Args:
        runs: Folder of all runs of a name. A new run is `KIND_N` in it, with the next free N.
        kind: version for a training run; validate, test or predict for an evaluation.
        folder: Folder to write to instead: the run that is resumed, or a given one.
        resume_step: Step after which a resumed run continues; rows of later steps, logged by a
            session that was killed, are deleted. None: a new run.
        resume_rows: Rows that there were when the checkpoint was saved; None: unknown.
        claim: Function that claims a new folder's number in `checkpoint.folder` too, and returns
            False if the number is taken there.

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
        claim: Callable[[Path], bool] | None = None,
    ) -> None:
        super().__init__()
        self.runs, self.resume_step = runs, resume_step
        self.resume_rows = resume_rows
        self.rows = 0
        self._kind, self._claim = kind, claim
        self.on_sync: Callable[[], None] = lambda: None
        self._is_new = folder is None
        self._folder = folder

    @property
    def folder(self) -> Path:
        """Folder of the run; a new one is made at the first use.

        Rank 0 makes it, and share_run_folder() sets it on the other ranks.
        """
        if self._folder is None:
            assert is_rank_zero(), "the other ranks receive the folder from rank 0"
            with explained("write to", self.runs):
                self._folder = claim_folder(self.runs, self._kind, self._claim)
        return self._folder

    @folder.setter
    def folder(self, folder: Path) -> None:
        self._folder = folder

    @property
    def name(self) -> str:
        return ""  # save_dir is the run's own folder

    version = name

    @property
    def save_dir(self) -> str | None:
        known = self._folder is not None or is_rank_zero()
        return str(self.folder) if known else None

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no nan
        row = {"step": step, "time": round(time.time(), 3), **finite}
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
        self.rows = drop_rows_after(path, self.resume_step, self.resume_rows)
        if self.rows < (self.resume_rows or 0):
            print(
                f"warning: {path} has {self.rows} rows up to step {self.resume_step}, and had "
                f"{self.resume_rows} when the checkpoint was saved: the other rows are lost",
                file=sys.stderr,
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
        if status != "failed" or not self._is_new or self._folder is None:
            return
        # TensorBoard's two are there before Lightning has checked all settings. --resume auto would
        # continue this run, and not the one before.
        files = [path for path in self._folder.rglob("*") if not path.is_dir()]
        own = RunPaths(self._folder).identity
        if all(path == own or path.match(EVENTS) or path.name == HPARAMS for path in files):
            shutil.rmtree(self._folder, ignore_errors=True)
            for parent in (self.runs, self.runs.parent):
                with contextlib.suppress(OSError):  # not empty: other runs are in it
                    parent.rmdir()


def is_rank_zero() -> bool:
    """Return whether this process is rank 0, also before the ranks are connected."""
    return bool(rank_zero_only.rank == 0)  # type: ignore[attr-defined]  # set by Lightning


def continue_logger(logger: Logger, resume_step: int | None) -> None:
    """Prepare another logger for a run, so that it writes each point once, to a folder of its own.

    Lightning's loggers choose the next free version_N and make that folder later. Without this
    function, two runs that start at the same time may write to one folder.

    Args:
        logger: Logger of this session.
        resume_step: Step after which the run continues; None: a new run.

    Raises:
        UserError: The logger would delete what an earlier session has logged.
    """
    if isinstance(logger, TensorBoardLogger) and resume_step is not None:
        logger._kwargs["purge_step"] = resume_step + 1
    if not isinstance(logger, CSVLogger | TensorBoardLogger):
        return
    if logger._version is None and is_rank_zero() and "://" not in logger.root_dir:
        made = numbered_folders(Path(logger.root_dir))
        numbers = (int(folder.name.removeprefix("version_")) for folder in made)
        logger._get_next_version = numbers.__next__  # type: ignore[method-assign]
    elif isinstance(logger, CSVLogger) and is_rank_zero():
        path = Path(logger.log_dir) / "metrics.csv"
        if path.exists():
            raise UserError(
                f"CSVLogger would delete {path} of an earlier session: leave out the logger's "
                "version, so that each session has a folder of its own"
            )


def drop_rows_after(path: Path, step: int, rows: int | None = None) -> int:
    """Rewrite a metrics file without the rows of later steps and without an incomplete last line.

    Args:
        path: File with a JSON object a line; a missing file stays missing.
        step: Last step whose rows are kept, byte for byte.
        rows: Largest number of rows to keep: those that were there when the step was saved.

    Returns:
        The number of rows that are kept.
    """
    if not path.exists():
        return 0
    kept = rows_until(path, step, rows)
    write_atomic(path, b"".join(kept))
    return len(kept)


def rows_until(path: Path, step: int, rows: int | None = None) -> list[bytes]:
    """Return the lines of a metrics file that drop_rows_after keeps; its arguments are the same."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [line for line in lines if is_row(line, step)][:rows]


def is_row(line: bytes, step: int) -> bool:
    """Return whether a line is a complete row of a step up to `step`."""
    try:
        return line.endswith(b"\n") and (json.loads(line)["step"] or 0) <= step
    except (ValueError, KeyError, TypeError):
        return False
