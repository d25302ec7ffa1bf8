"""Run folders: names of their files, identity, lock, disk space, checkpoints, and their digests.

The SHA-256 of a checkpoint is in a second file, `NAME.sha256`.
"""

import contextlib
import json
import math
import os
import re
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from gpt_lightning import files
from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.files import explained
from gpt_lightning.parsing import program, shell_command

NAME = re.compile(r"step-(\d+)(?:-loss-(\d+\.\d+))?\.ckpt")  # RunCheckpoint's files
ASIDE = ".old"  # suffix of checkpoints that were set aside
SKIPPED = ".skipped"  # suffix of checkpoints that a resume could not use; nothing deletes them
SIDECAR = ".sha256"
FIX = "check its permissions, or take another checkpoint"
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

    def __init__(self, run: Path):
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

    def name_folder(self) -> Path:
        """Return the folder of the run's name, where its evaluations are: lightning_logs/RUN_NAME.

        A run that is not named version_N was moved, and has them inside.
        """
        run = self.run.resolve() if self.run.is_symlink() else Path(os.path.abspath(self.run))
        folder = run.parent if newest_versions([run.name]) else run
        return Path(os.path.relpath(folder))

    def saved(self) -> "list[Saved]":
        """Return the checkpoints of the run, the highest step first."""
        return saved_checkpoints(self.checkpoints)

    def check(self) -> None:
        """Raise a UserError if a folder or a pipe is in place of a file that a resume writes."""
        for path in (self.metrics, self.timeline, self.run / "hparams.yaml"):
            if path.exists():
                files.check_regular(path, "restore the file, or move it away")


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
        Saved(path, int(match[1]), float(match[2]) if match[2] else None)
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
            loss is returned, else the newest; or another path of `choose_run`.
        last: True to return the checkpoint of the highest step instead.

    Raises:
        UserError: There is none.
    """
    if path.exists() and not path.is_dir() and path.name != "config.yaml":
        return path
    if run := choose_run(path, RunPaths.saved):
        saved = run.saved()
        return (saved[0] if last else best_of(saved)).path
    if (nanogpt := path / "ckpt.pt").is_file():
        return nanogpt
    problem = "has no checkpoints/step-*.ckpt" if path.exists() else "does not exist"
    fix = f"train one with `{program()} fit --config quickstart`"
    if any(path.glob("*.safetensors")):
        problem = "is a model in Hugging Face's format and no run"
        again = shell_command(["import", str(path), "--out", "new.ckpt"])
        fix = f"make a checkpoint of it with `{again}`, or train it with fit --model.init_from"
    raise UserError(
        f"{path} {problem}: give a checkpoint or a run folder, such as lightning_logs/NAME, or "
        f"{fix}"
    )


def choose_run(path: Path, fits: Callable[[RunPaths], object]) -> RunPaths | None:
    """Return the run that a path means; None if there is none.

    Args:
        path: A run folder, or `checkpoints` in it; a folder of runs `version_N`: the highest N; or
            a folder of such folders: the newest run, whose name is printed on standard error.
        fits: Function from a run to a true value if it has what the caller needs.
    """
    near = run_folders(path.parent if path.name == "checkpoints" else path)
    far = [*path.glob("*/version_*/run.json"), *path.glob("lightning_logs/*/version_*/run.json")]
    far.sort(key=os.path.getmtime, reverse=True)  # nothing writes the file again
    for run in [*near, *(file.parent for file in far)]:
        if fits(RunPaths(run)):
            if run not in near:
                print(f"run         {run}, the newest in {path}", file=sys.stderr)
            return RunPaths(run)
    return None


def run_id(run: Path) -> str | None:
    """Return the identity of a run folder; None under a Trainer without RunLogger.

    Raises:
        UserError: run.json is damaged.
    """
    path = RunPaths(run).identity
    if not path.exists():
        return None
    try:
        files.check_regular(path, "it is a run's identity")
        return str(json.loads(path.read_bytes())["run_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({reason_of(error)}): restore it, or begin a new run with "
            f"--resume never --ckpt_path {run}"
        ) from error


def claim_folder(runs: Path, kind: str) -> Path:
    """Make the folder `KIND_N` with the next free N, which no other process can have made.

    Args:
        runs: Folder to make it in.
        kind: First part of its name.

    Raises:
        OSError: It cannot be made.
    """
    folder = files.numbered_folder(runs, f"{kind}_")
    run_id = {"run_id": uuid.uuid4().hex}
    files.write_atomic(RunPaths(folder).identity, json.dumps(run_id).encode() + b"\n")
    return folder


# ---- before the first step ---------------------------------------------------------------------


def sweep(folder: Path) -> None:
    """Delete temporary files of dead processes, and digests without a file."""
    for path in folder.glob(".*.tmp.*"):
        pid = path.name.rpartition(".")[2]
        if pid.isdigit() and not files.lives(int(pid)):
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
            f"{needed_bytes / 1e6:,.0f} MB: free some space, or set --trainer.default_root_dir"
        )


def lock_folder(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Keep other processes from training in a run's folder, or in its folder of checkpoints.

    Raises:
        UserError: Another process is training there.
    """

    def raise_locked() -> None:
        run = folder.parent if folder == RunPaths(folder.parent).checkpoints else folder
        raise UserError(f"another process is training in {run}: wait, or give another --run_name")

    return files.locked(RunPaths(folder).lock, raise_locked)


# ---- digests -------------------------------------------------------------------------------------


def write_sidecar(path: Path, digest: str) -> None:
    """Write the digests of a new file and of the file that it replaces.

    Args:
        path: File that is about to get its name.
        digest: SHA-256 of the new file.

    Raises:
        OSError: The digests cannot be written.
    """
    known = [digest]
    if path.exists():
        known += read_sidecar(path)[:1]
    lines = [f"{sha256}  {path.name}\n" for sha256 in known]
    with files.replacement(sidecar(path)) as temporary:
        files.write_durable(temporary, "".join(lines).encode())


def sidecar(path: Path) -> Path:
    """Return the path of a file's digest."""
    return path.with_name(path.name + SIDECAR)


def read_sidecar(path: Path) -> list[str]:
    """Return the digests that a file may have, the newest first.

    The list is empty if the sidecar is missing, is damaged, or cannot be read.
    """
    try:
        if not sidecar(path).is_file():  # a pipe would be waited for
            return []
        lines = sidecar(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return []
    found = [line.partition(" ")[0] for line in lines]
    return found if all(re.fullmatch("[0-9a-f]{64}", digest) for digest in found) else []


def has_digest(path: Path) -> bool:
    """Return whether a checkpoint is a file with a readable digest; nothing deletes another one."""
    return path.is_file() and bool(read_sidecar(path))


def check_digest(path: Path, required: bool = True) -> bool:
    """Check that a file is, byte for byte, what was written.

    Args:
        path: File, with its digest in another file beside it.
        required: False accepts a file whose digest cannot be read.

    Returns:
        False if the digest cannot be read.

    Raises:
        UserError: The file differs from its digest, or one of them cannot be read.
    """
    check_regular(path)
    known = read_sidecar(path) or read_sidecar(path.resolve())  # that of a link's file
    if not known and not required:
        return False
    if not known:
        raise UserError(
            f"{path} has no readable digest in {sidecar(path).name}, so it cannot be checked: "
            "copy that file again, or take another checkpoint"
        )
    with explained("read", path, FIX):
        found = files.file_sha256(path)
    if found not in known:
        raise UserError(
            f"{path} is damaged: expected SHA-256 {known[0]}, found {found}; "
            "use an older checkpoint, as --resume auto does"
        )
    return True


def check_regular(path: Path) -> None:
    """Check that a checkpoint is a regular file.

    Raises:
        UserError: The path does not exist, or is a folder, a pipe or a device.
    """
    with explained("read", path, FIX):
        files.check_regular(path, "give a checkpoint, or a model as --model.init_from")
