"""Continue a reproduced run whose process has ended: its folder, and its evaluations so far."""

import json
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.errors import UserError
from gpt_lightning.reproduce.rungs import Rung
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import run_folders, saved_checkpoints
from gpt_lightning.runs.resume import newest_checkpoint
from gpt_lightning.tables.rows import RESULTS
from gpt_lightning.training.callbacks.recorder import Observation


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
    folders = run_folders(root)[1:] if resume == "auto" else [Path(resume)]
    for folder in folders:
        missing = [r.name for r in rungs if not saved_checkpoints(folder / r.name / "checkpoints")]
        if not missing:
            other = {row["rung"] for row in read_losses(folder)} - {rung.name for rung in rungs}
            if not other:
                return folder
            problem = f"has results of {', '.join(sorted(other))} too: name these rungs as well"
        else:
            problem = f"has no {missing[0]}/checkpoints/*.ckpt: give another folder, or auto"
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
    step = read_checkpoint(path).step
    seen = [
        Observation(
            torch.device("cpu"), row["step"], row["split"], row["ours"], batches=row.get("batches")
        )
        for row in read_losses(folder)
        if row["rung"] == rung.name and row["split"] != "best"
        # a loss of step n is of the update after n updates
        if row["step"] + (row["split"] == "batch") <= step
    ]
    return path, step, seen


def read_losses(folder: Path) -> list[dict[str, Any]]:
    """Return the losses that an earlier session has written; empty if there are none."""
    path = folder / RESULTS
    if not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["losses"]
    return rows
