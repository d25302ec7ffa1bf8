"""CheckpointIO that writes checkpoints atomically, with a SHA-256 that is checked at each read.

A checkpoint is written to a temporary file in its folder, synced to the disk, and renamed: at every
moment its name means a complete file or none. Its SHA-256 is in a second file, `NAME.sha256`, which
is renamed first and lists the digest of the old content as well, so that the two files agree after
a crash between the two renames.
"""

import contextlib
import hashlib
import io
import math
import os
import re
import sys
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, replacement
from gpt_lightning.runs import folders
from gpt_lightning.runs.checkpoint import cannot_write, read_checkpoint, read_content


class DurableCheckpointIO(CheckpointIO):
    """Write checkpoints atomically and check their digests when they are read."""

    def save_checkpoint(self, checkpoint: Fields, path: Any, storage_options: Any = None) -> None:
        write_durable_checkpoint(checkpoint, Path(path))
        folders.check_digest(Path(path))  # what the disk has

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Fields:
        # ignores weights_only of the caller: a checkpoint runs no code
        loaded: Fields = read_content(Path(path), map_location or "cpu", mmap=False)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        for file in (Path(path), folders.sidecar(Path(path))):
            file.unlink(missing_ok=True)


class HashingFile(io.FileIO):
    """Unbuffered file with the SHA-256 of the bytes written to it."""

    def __init__(self, path: Path):
        super().__init__(path, "w")
        self.digest = hashlib.sha256()  # covers all bytes so far

    def write(self, content: Any) -> int:
        """Write all bytes; one call of the system takes at most 2 GiB."""
        self.digest.update(content)
        rest = memoryview(content).cast("B")
        while rest:
            rest = rest[super().write(rest) :]
        return len(content)


def write_durable_checkpoint(checkpoint: Fields, path: Path) -> None:
    """Write a checkpoint and its digest.

    Raises:
        UserError: The disk is full, the folder cannot be written, or the checkpoint has an object
            that no resume could read; older files are untouched.
    """
    try:
        with replacement(path) as temporary:
            with HashingFile(temporary) as file:
                torch.save(checkpoint, file)
                os.fsync(file.fileno())
            # reads what precedes the tensors; raises for what no resume could read
            torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
            folders.write_sidecar(path, file.digest.hexdigest())
    except (OSError, RuntimeError) as error:
        raise cannot_write(path, error) from error
    except (PickleError, AttributeError, TypeError) as error:
        kind = re.search(r"(?:GLOBAL |object ')([\w.<>]+)", str(error))
        raise UserError(
            f"{path} is not saved, because no resume could read it: it has an object"
            f"{f' of {kind[1]}' if kind else ''}; the checkpoints before it are untouched: let "
            "state_dict of each callback return numbers, strings, tensors, lists and dicts"
        ) from error


# ---- for RunCheckpoint ---------------------------------------------------------------------------


def non_finite(step: int, folder: Path | None) -> UserError:
    """Return the error for a state that is not saved in a folder of checkpoints."""
    older = folders.saved_checkpoints(folder) if folder else []
    again = f"continue from step {older[0].step} with --resume auto" if older else "begin again"
    return UserError(
        f"the weights or the optimizer's state are not finite after step {step}, which is not "
        f"saved: lower model.learning_rate and {again}"
    )


def set_aside(folder: Path, step: int) -> None:
    """Rename the checkpoints of later steps when a run continues from `step`.

    The next resume would use the newest of them. Those of another branch of the run are named
    NAME.old, and deleted when the run has saved the same or a later step, or when the next resume
    sets other checkpoints aside. Those that are damaged, unchecked or of another run are named
    NAME.skipped, and never deleted.
    """
    later = [saved for saved in folders.saved_checkpoints(folder) if saved.step > step]
    if later:
        drop_aside(folder)
    for saved in later:
        path = saved.path.with_name(saved.path.name + folders.ASIDE)
        if not is_of_run(saved.path):
            path = skipped_path(saved.path)
        print(f"set aside   {path.name}: its step is after step {step}", file=sys.stderr)
        saved.path.replace(path)
        with contextlib.suppress(FileNotFoundError):  # a file without a digest
            folders.sidecar(saved.path).replace(folders.sidecar(path))


def is_of_run(path: Path) -> bool:
    """Return whether a checkpoint matches its digest and was saved by the run of its folder."""
    try:
        folders.check_digest(path)
        saved_by = read_checkpoint(path, check=False).record.run_id
        return saved_by == folders.run_id(path.parent.parent)
    except UserError:
        return False


def skipped_path(path: Path) -> Path:
    """Return a free name for a checkpoint that a resume could not use."""
    free = path.with_name(path.name + folders.SKIPPED)
    number = 1
    while os.path.lexists(free):
        number += 1
        free = path.with_name(f"{path.name}.{number}{folders.SKIPPED}")
    return free


def drop_aside(folder: Path, passed: float = math.inf) -> None:
    """Delete the run's checkpoints that were set aside, up to the step that it has passed."""
    for saved in folders.saved_checkpoints(folder, folders.ASIDE):
        if saved.step <= passed and folders.has_digest(saved.path):
            DurableCheckpointIO().remove_checkpoint(saved.path)


def use_durable_io(trainer: Trainer) -> None:
    """Let a Trainer that was made without DurableCheckpointIO write and read through it.

    Raises:
        UserError: The Trainer has another CheckpointIO.
    """
    strategy = trainer.strategy
    if type(strategy.checkpoint_io) is TorchCheckpointIO:  # Lightning's default
        strategy.checkpoint_io = DurableCheckpointIO()
    if not isinstance(strategy.checkpoint_io, DurableCheckpointIO):
        raise UserError(
            f"leave out {type(strategy.checkpoint_io).__name__}: RunCheckpoint has its own"
        )
