"""Run folders: their names, their identity, and the names of the checkpoints in them."""

import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import write_atomic
from gpt_lightning.parsing import program

RUN_FILE = "run.json"  # in a run folder; holds the run's identity
NAME = re.compile(r"step-(\d+)(?:-loss-(\d+\.\d+))?\.ckpt")  # RunCheckpoint's files
ASIDE = ".old"  # suffix of checkpoints that were set aside


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


def find_checkpoint(path: Path) -> Path:
    """Return the checkpoint of the best model in a folder.

    Args:
        path: A file, which is returned; a run folder, whose checkpoint of the lowest validation
            loss is returned, else the newest; or a folder of runs `version_N`: the highest N that
            has a checkpoint.

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
        saved = saved_checkpoints(run / "checkpoints")
        if saved:
            return best_of(saved).path
    raise UserError(
        f"{path} has no checkpoints/*.ckpt: give a checkpoint, or train one with "
        f"`{program()} fit --config quickstart`"
    )


def run_id(run: Path) -> str | None:
    """Return the identity of a run folder; None if an earlier version has made the folder.

    Raises:
        UserError: run.json is damaged.
    """
    path = run / RUN_FILE
    if not path.exists():
        return None
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["run_id"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): restore it, or begin a new run from a checkpoint "
            "with --ckpt_path"
        ) from error


def write_run_id(folder: Path, run_id: str) -> None:
    """Write the identity of a run into its folder."""
    write_atomic(folder / RUN_FILE, json.dumps({"run_id": run_id}).encode() + b"\n")
