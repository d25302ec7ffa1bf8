"""Run folders: names of their files, identity, lock, timeline, disk space, and checkpoints."""

import contextlib
import json
import math
import os
import re
import shutil
import signal
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, lives, locked, numbered_folders, write_atomic
from gpt_lightning.parsing import program
from gpt_lightning.runs.digests import SIDECAR

NAME = re.compile(r"step-(\d+)(?:-loss-(\d+\.\d+))?\.ckpt")  # RunCheckpoint's files
ASIDE = ".old"  # suffix of checkpoints that were set aside
SPARE_BYTES = 2**20  # free bytes that the disk keeps beside a new checkpoint


class RunPaths:
    """Files of a run folder, lightning_logs/RUN_NAME/version_N.

    Args:
        run: The folder.

    Attributes:
        identity: Identity of the run, as JSON.
        config: All settings, as YAML.
        metrics: Rows that RunLogger has logged, as JSON lines.
        timeline: Events of the run's sessions, as JSON lines.
        checkpoints: Folder of the run's checkpoints.
        lock: Lock that a session holds; there is one in `checkpoints` too.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.identity = run / "run.json"
        self.config = run / "config.yaml"
        self.metrics = run / "metrics.jsonl"
        self.timeline = run / "timeline.jsonl"
        self.checkpoints = run / "checkpoints"
        self.lock = run / ".lock"

    @classmethod
    def of_checkpoint(cls, path: Path) -> "RunPaths | None":
        """Return the run folder of a checkpoint; None if it is in no run's checkpoints/."""
        run = cls(path.absolute().parent.parent)
        return run if run.checkpoints == path.absolute().parent else None

    def saved(self) -> "list[Saved]":
        """Return the checkpoints of the run, the highest step first."""
        return saved_checkpoints(self.checkpoints)


@dataclass(frozen=True)
class Saved:
    """Checkpoint file, and the step and validation loss in its name."""

    path: Path
    step: int
    loss: float | None


def checkpoint_name(step: int, loss: float | None) -> str:
    """Return the file name of a step; files are chosen by name, never by time."""
    return f"step-{step:07d}{'' if loss is None else f'-loss-{loss:.4f}'}.ckpt"


def saved_checkpoints(folder: Path, suffix: str = "") -> list[Saved]:
    """Return the checkpoints in a folder, the highest step first.

    Args:
        folder: Folder; a missing one has no checkpoints.
        suffix: Suffix after the names; ASIDE for checkpoints that were set aside.
    """
    return sort_saved(folder.glob(f"*.ckpt{suffix}"), suffix)


def sort_saved(paths: Iterable[Path], suffix: str = "") -> list[Saved]:
    """Return the paths that are named as checkpoints, the highest step first."""
    found = [
        Saved(path, int(match[1]), None if match[2] is None else float(match[2]))
        for path in paths
        if (match := NAME.fullmatch(path.name.removesuffix(suffix)))
    ]
    return sorted(found, key=lambda saved: (-saved.step, saved.path.name))


def run_folders(path: Path) -> list[Path]:
    """Return a run folder itself, and the runs `version_N` in it, the highest N first."""
    names = newest_versions(run.name for run in path.glob("version_*"))
    return [path, *(path / name for name in names)]


def newest_versions(names: Iterable[str]) -> list[str]:
    """Return the names version_N, the highest N first."""
    found = (name for name in names if re.fullmatch(r"version_\d+", name))
    return sorted(found, key=lambda name: -int(name.removeprefix("version_")))


def best_of(saved: list[Saved]) -> Saved:
    """Return the checkpoint of the lowest validation loss, else the newest, which is the first."""
    return min(saved, key=lambda s: math.inf if s.loss is None else s.loss)


def find_checkpoint(path: Path, last: bool = False) -> Path:
    """Return the checkpoint of the best model in a folder.

    Args:
        path: A file, which is returned; a run folder, whose checkpoint of the lowest validation
            loss is returned, else the newest; or a folder of runs `version_N`: the highest N that
            has a checkpoint.
        last: True to return the checkpoint of the highest step instead.

    Raises:
        UserError: There is none.
    """
    if path.exists() and not path.is_dir():
        return path
    if not path.exists():
        raise UserError(
            f"{path} does not exist: give a checkpoint or a run folder, "
            "such as lightning_logs/NAME/version_0"
        )
    for run in run_folders(path):
        if saved := RunPaths(run).saved():
            return (saved[0] if last else best_of(saved)).path
    raise UserError(
        f"{path} has no checkpoints/*.ckpt: give a checkpoint, or train one with "
        f"`{program()} fit --config quickstart`"
    )


def run_id(run: Path) -> str | None:
    """Return the identity of a run folder; None under a Trainer without RunLogger.

    Raises:
        UserError: run.json is damaged.
    """
    path = RunPaths(run).identity
    if not path.exists():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): restore it, or begin a new run from a checkpoint "
            "with --ckpt_path"
        ) from error


def claim_folder(runs: Path, kind: str, claim: Callable[[Path], bool] | None = None) -> Path:
    """Make the folder `KIND_N` with the next free N, which no other process can have made.

    Args:
        runs: Folder to make it in.
        kind: First part of its name.
        claim: Function that claims N in `checkpoint.folder` too, and returns False if N is taken
            there; None: there is no such folder.

    Raises:
        OSError: It cannot be made.
    """
    for folder in numbered_folders(runs, f"{kind}_"):
        run_id = {"run_id": uuid.uuid4().hex}
        write_atomic(RunPaths(folder).identity, json.dumps(run_id).encode() + b"\n")
        free = False
        try:
            free = claim is None or claim(folder)
        finally:
            if not free:
                shutil.rmtree(folder)
        if free:
            return folder
    raise AssertionError("unreachable")


class Timeline:
    """Events of a session in the run's `timeline.jsonl`, one JSON object a line.

    Each has `time` (seconds since the epoch), `event` and `step`. Events: `begin` with `steps`, the
    steps of the whole run, or 0; `phase` with `name` and `seconds`, at the end of each time that is
    no training, and for a stall; `end` with `state`, `reason`, and `seconds` by phase. The
    run's lock is held while the session lives, so that one without an end is known to run or to be
    killed.

    Args:
        folder: Run folder.

    Raises:
        UserError: Another process is training there.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(lock_folder(folder))
        self._file = RunPaths(folder).timeline.open("ab+")
        # a full disk may have cut the last line
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def write(self, event: str, step: int, **facts: Any) -> None:
        """Append an event of this moment.

        Raises:
            UserError: The file cannot be written.
        """
        row = {"time": round(time.time(), 3), "event": event, "step": step, **facts}
        with explained("write", self._file.name):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()

    def end(
        self, step: int, reason: BaseException | str | None, seconds: Mapping[str, float]
    ) -> None:
        """Append the end of the session, and close and unlock the file.

        Args:
            step: Optimizer steps done.
            reason: Exception, or name of the setting, that has stopped the run; None: it is
                finished.
            seconds: Wall seconds of the session by phase.

        Raises:
            UserError: The file cannot be written.
        """
        state = "finished" if reason is None else "stopped"
        if isinstance(reason, KeyboardInterrupt):
            reason = "SIGINT"
        elif isinstance(reason, SystemExit):  # StopSignals adds 128 to the number of the signal
            names = {str(128 + number): number.name for number in signal.Signals}
            reason = names.get(str(reason.code), "SystemExit")
        elif isinstance(reason, BaseException):
            state, reason = "failed", " ".join(f"{type(reason).__name__}: {reason}".split())
        self.write("end", step, state=state, reason=reason or "", seconds=seconds)
        self._file.close()
        self._lock.close()


# ---- before the first step ---------------------------------------------------------------------


def sweep(folder: Path) -> None:
    """Delete temporary files of dead processes, and digests without a file."""
    for path in folder.glob(".*.tmp.*"):
        pid = path.name.rpartition(".")[2]
        if pid.isdigit() and not lives(int(pid)):
            path.unlink(missing_ok=True)
    for path in folder.glob(f"*{SIDECAR}"):
        if not path.with_name(path.name.removesuffix(SIDECAR)).exists():
            path.unlink(missing_ok=True)


def check_writable(folder: Path, needed_bytes: int) -> None:
    """Check before the first step that checkpoints can be written to a folder.

    Args:
        folder: Folder, which is made if it is missing.
        needed_bytes: Size of one checkpoint; a new one must fit in addition to those that are kept.

    Raises:
        UserError: The folder cannot be written, or the disk has not enough space.
    """
    probe = folder / f".probe.tmp.{os.getpid()}"
    fix = "choose another folder with --trainer.default_root_dir, or change its permissions"
    with explained("write to", folder, fix):
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
        free = shutil.disk_usage(folder).free
    if free < needed_bytes + SPARE_BYTES:
        raise UserError(
            f"{folder} has {free / 1e6:,.0f} MB left, and a checkpoint takes some "
            f"{needed_bytes / 1e6:,.0f} MB: free some space, or choose another folder with "
            "--trainer.default_root_dir"
        )


def lock_folder(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keep other processes from training in a run's folder, or in its folder of checkpoints.

    Raises:
        UserError: Another process is training there.
    """

    def raise_locked() -> None:
        run = folder.parent if folder == RunPaths(folder.parent).checkpoints else folder
        raise UserError(
            f"another process is training in {run}: wait for it, or begin a run of "
            "another --run_name"
        )

    return locked(RunPaths(folder).lock, raise_locked)
