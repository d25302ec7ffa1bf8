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
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from pickle import PickleError
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from lightning import Trainer
from lightning.pytorch.plugins.io import CheckpointIO, TorchCheckpointIO

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, replacement
from gpt_lightning.runs import folders
from gpt_lightning.runs.checkpoint import cannot_write, read_checkpoint, read_content

if TYPE_CHECKING:
    from gpt_lightning.runs.shards import HostCopy


class DurableCheckpointIO(CheckpointIO):
    """Write checkpoints atomically and check their digests when they are read.

    Attributes:
        allocate: Argument of read_shards for sharded checkpoints; None: read whole tensors.
    """

    allocate: Callable[[torch.Tensor], torch.Tensor] | None = None

    def save_checkpoint(self, checkpoint: Fields, path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Args:
            checkpoint: Lightning's dict.
            path: File to write.
            storage_options: Function that writes the checkpoint, from RunCheckpoint; None: write it
                now.
        """
        (storage_options or write_durable_checkpoint)(checkpoint, Path(path))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> Fields:
        # ignores weights_only of the caller: a checkpoint runs no code
        loaded = read_content(Path(path), map_location or "cpu", mmap=False)
        if isinstance(loaded, dict) and "shards" in loaded:
            from gpt_lightning.runs import shards  # most runs do not need it

            loaded = shards.read_shards(loaded, Path(path), self.allocate or shards.whole)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        for file in (Path(path), folders.sidecar(Path(path))):
            file.unlink(missing_ok=True)
        sweep_shards(Path(path).parent)


class Saver:
    """Write the checkpoints of one run, one after the other.

    Loader workers may be forked while the thread runs. The thread holds no lock that a worker
    needs. The thread's file has no buffer that a worker could flush, and the worker closes its copy
    of the file.

    Args:
        asynchronous: False writes before `save` returns; True copies, and writes in a thread.
        written: Function to call with each path that was written and read back, in the thread.
        check: Function to call before a copy is written, with it and its path; it may raise.
    """

    def __init__(
        self,
        asynchronous: bool,
        written: Callable[[Path], None],
        check: Callable[[Fields, Path], None] = lambda checkpoint, path: None,
    ):
        self._written, self._check = written, check
        self._copy: HostCopy | None = None
        if asynchronous:
            from gpt_lightning.runs import shards  # most runs do not need it

            self._copy = shards.HostCopy()
        self.is_prepared = not asynchronous
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self.work: Future[Any] | None = None  # running in the thread, or ended with an error

    def save(self, checkpoint: Fields, path: Path) -> None:
        """Wait for the previous save, and save.

        Args:
            checkpoint: Lightning's dict.
            path: File to write.

        Raises:
            UserError: This checkpoint, or the previous one, cannot be written.
        """
        self.wait()
        if not self._copy:
            self._write(checkpoint, path)
        else:
            self.is_prepared = True
            self.work = self._thread.submit(self._write, self._copy(checkpoint), path)

    def prepare(self, checkpoint: Fields) -> None:
        """Begin to reserve the memory of the copy, so that the first save does not wait for it.

        Args:
            checkpoint: Dict with the tensors of the first checkpoint.
        """
        self.is_prepared = True
        if self._copy:
            self.work = self._thread.submit(self._copy, checkpoint)

    def wait(self) -> None:
        """Wait for the save in progress, if any.

        Raises:
            UserError: The last checkpoint could not be written.
        """
        if self.work:
            wait([self.work])
            self.check()

    def check(self) -> None:
        """Raise the error of the last save, if that save has failed; never wait."""
        if self.work and self.work.done():
            done, self.work = self.work, None
            done.result()

    def _write(self, checkpoint: Fields, path: Path) -> None:
        if self._copy:
            self._check(checkpoint, path)
        write_durable_checkpoint(checkpoint, path)
        folders.check_digest(path)
        self._written(path)


class HashingFile(io.FileIO):
    """Unbuffered file with the SHA-256 of the bytes written to it.

    A process that is forked meanwhile, such as a loader worker, closes its copy of the file.
    Otherwise the space of a deleted file would stay in use.
    """

    _open: ClassVar[set["HashingFile"]] = set()

    def __init__(self, path: Path):
        super().__init__(path, "w")
        self._open.add(self)
        self.digest = hashlib.sha256()  # covers all bytes so far

    def write(self, content: Any) -> int:
        """Write all bytes; one call of the system takes at most 2 GiB."""
        self.digest.update(content)
        rest = memoryview(content).cast("B")
        while rest:
            rest = rest[super().write(rest) :]
        return len(content)

    def close(self) -> None:
        self._open.discard(self)
        super().close()

    @classmethod
    def close_in_child(cls) -> None:
        for file in list(cls._open):
            file.close()


os.register_at_fork(after_in_child=HashingFile.close_in_child)


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
            shards = checkpoint.get("shards", {}).get("files")
            folders.write_sidecar(path, file.digest.hexdigest(), shards)
    except (OSError, RuntimeError) as error:
        raise cannot_write(path, error) from error
    except (PickleError, AttributeError, TypeError) as error:
        kind = re.search(r"(?:GLOBAL |object ')([\w.<>]+)", str(error))
        raise UserError(
            f"{path} is not saved, because no resume could read it: it has an object"
            f"{f' of {kind[1]}' if kind else ''}; the checkpoints before it are untouched: let "
            "state_dict of each callback return numbers, strings, tensors, lists and dicts"
        ) from error
    finally:
        if "shards" in checkpoint:  # those of the file before, or of a failed save
            sweep_shards(path.parent)


def sweep_shards(folder: Path) -> None:
    """Delete the shards in a folder of checkpoints that no file there names."""
    if (folder / folders.SHARDS).is_dir():
        from gpt_lightning.runs import shards  # most runs do not need it

        shards.sweep(folder)


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
