"""RunCheckpoint: saves a run and deletes old checkpoints.

Everything happens between two micro-batches, when nothing is in flight: the last step's update is
done, its metrics are in the files, its validation is over, and the next batch has not been
requested. BetweenSteps, around the training loader, calls `between_batches` at that moment. A
checkpoint therefore holds exactly the run after `step` steps.
"""

import contextlib
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse.typing import NonNegativeInt, PositiveInt
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from gpt_lightning.errors import OutageError, UserError
from gpt_lightning.files import Fields
from gpt_lightning.parsing import checked
from gpt_lightning.runs import checkpoint_io, folders
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.folders import RunPaths, Saved, saved_checkpoints
from gpt_lightning.runs.mirror import MirroredCheckpointIO, copy_url
from gpt_lightning.training import between_steps, run_state, step_shape
from gpt_lightning.training.behaviours.non_finite import all_finite
from gpt_lightning.training.callbacks.speed import SpeedMonitor, phase
from gpt_lightning.training.datamodule import token_data


@checked("checkpoint")
@dataclass(eq=False)
class RunCheckpoint(between_steps.StepCallback):
    """Save after each validation, at the end, every N steps, and before StopSignals ends a run.

    Files are `checkpoints/step-0000250-loss-1.2345.ckpt`, with the loss if the step was validated,
    each with its SHA-256 in a second file.

    Args:
        every_n_steps: Steps between saves, in addition to validations; null: only validations.
        keep_last: Number of the newest files to keep.
        keep_best: Number of files with the lowest validation loss to keep.
        keep_every_n_steps: Steps between two files that are never deleted; null: none.
        folder: Folder or URL (s3://, gs://) for a copy of each checkpoint, with config.yaml and
            metrics.jsonl, in FOLDER/RUN_NAME/version_N. --resume auto continues from there.
        enabled: True saves checkpoints; False saves none.
    """

    every_n_steps: PositiveInt | None = None
    keep_last: PositiveInt = 2
    keep_best: NonNegativeInt = 1
    keep_every_n_steps: PositiveInt | None = None
    folder: str | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        self.best_loss = math.inf  # lowest validation loss of the run
        self._loss: float | None = None  # validation loss at the current step
        self._due = False
        self._saved_step = -1
        self._lock = contextlib.ExitStack()

    # ---- the moments to save ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        data = token_data(trainer)
        # Trainer's fast_dev_run leaves no files
        self._writes = self.enabled and not trainer.fast_dev_run  # type: ignore[attr-defined]
        if stage == "fit" and data is not None and self._writes:
            data.tokenizer.spec()  # checkpoints have it; raises before there is a run folder
        if (logger := run_state.run_logger(trainer)) and trainer.world_size > 1:
            made: Any = logger.folder if trainer.is_global_zero else None
            logger.folder = trainer.strategy.broadcast(made)  # rank 0 has made it
        if stage == "fit" and self.enabled:
            checkpoint_io.use_durable_io(trainer)
        # RunCheckpoint comes first in each hook: at the end WeightAveraging copies its average into
        # the model, and a longer run must not continue from the average.
        run: Any = trainer
        run.callbacks.sort(key=lambda callback: callback is not self)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and self._writes:
            weights = sum(p.numel() * p.element_size() for p in pl_module.parameters())
            folder = self.checkpoint_folder(trainer)
            check_others(trainer, folder)
            if self.folder is not None:
                url = copy_url(self.folder, folder.parent)
                mirror = MirroredCheckpointIO(url, self._kept)
                mirror.copy(folder.parent)
                trainer.strategy.checkpoint_io = mirror
            folders.check_writable(folder, 0)
            self._lock.enter_context(folders.lock_folder(folder))
            folders.sweep(folder)
            folders.check_writable(folder, 3 * weights)  # AdamW has two more of each

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.fast_dev_run:  # type: ignore[attr-defined]
            # an interval that was a fraction of an epoch is a number of micro-batches by now
            step_shape.check_accumulation(trainer.accumulate_grad_batches, trainer.val_check_batch)
        self._saved_step = trainer.global_step  # the state that a run starts from is on disk
        first = trainer.strategy.broadcast(trainer.global_step)
        if first != trainer.global_step:  # disks of two machines
            raise UserError(
                f"rank {trainer.global_rank} continues from step {trainer.global_step}, rank 0 "
                f"from step {first}: give all machines the same checkpoints, in a shared folder or "
                "with --checkpoint.folder"
            )
        if trainer.is_global_zero and self._writes:
            checkpoint_io.set_aside(self.checkpoint_folder(trainer), trainer.global_step)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if run_state.at_step_boundary(trainer):
            run_state.set_logged_steps(trainer, trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        every = self.every_n_steps
        if run_state.at_step_boundary(trainer):
            self._loss = None
            self._due |= every is not None and trainer.global_step % every == 0

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.sanity_checking or not run_state.is_fitting(trainer):
            return
        if "val/loss" in trainer.callback_metrics:
            self._loss = float(trainer.callback_metrics["val/loss"])
            self.best_loss = min(self.best_loss, self._loss)
        self._due = True

    def between_batches(self, trainer: Trainer) -> None:
        """Save if it is time to."""
        if not run_state.at_step_boundary(trainer):
            return
        if between_steps.stop_due(trainer):
            self.save(trainer)
            if trainer.is_global_zero:
                reason = between_steps.stop_reason(trainer)
                # Lightning's Timer counts the time of all sessions
                more = " with a larger --trainer.max_time" if reason == "max_time" else ""
                ways = f"; --resume auto{more} continues" if self._writes else ""
                print(f"{reason}: stopped after step {trainer.global_step}{ways}", file=sys.stderr)
        elif self._due:
            self.save(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save(trainer)

    def state_dict(self) -> Fields:
        return {"best_loss": self.best_loss}

    def load_state_dict(self, state_dict: Fields) -> None:
        self.best_loss = state_dict["best_loss"]

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Unlock the folder."""
        self._lock.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Save if the data of a validation do not come; other ranks may be in it."""
        try:
            alone = trainer.world_size == 1 and self._saved_step >= 0
            whole = alone and not run_state.unfinished_micro_batches(trainer)
            if isinstance(exception, OutageError) and whole:
                self.save(trainer)
        finally:
            self.teardown()

    # ---- the files -------------------------------------------------------------------------------

    def checkpoint_folder(self, trainer: Trainer) -> Path:
        """Return the folder of the run's checkpoints."""
        return RunPaths(run_state.run_folder(trainer) or Path(trainer.default_root_dir)).checkpoints

    def save(self, trainer: Trainer) -> None:
        """Write the run as it is now, read it back, and delete files that are no longer kept.

        Raises:
            UserError: The run has non-finite numbers, or the checkpoint cannot be written. Older
                files are untouched.
            RuntimeError: A step has begun.
        """
        self._due = False
        if run_state.unfinished_micro_batches(trainer):
            raise RuntimeError("a checkpoint can be saved between two optimizer steps only")
        if self._saved_step == trainer.global_step:
            return
        if not self._writes:
            self._check_finite(trainer)
            return
        name = folders.checkpoint_name(trainer.global_step, self._loss)
        path = self.checkpoint_folder(trainer) / name
        if trainer.is_global_zero and not path.parent.is_dir():
            raise UserError(
                f"step {trainer.global_step} is not saved: {path.parent} is not there any more; "
                "resume the folder in which the run is now"
            )
        with phase(trainer, "checkpoint"):
            self._check_finite(trainer)
            if logger := run_state.run_logger(trainer):
                logger.sync()
            trainer.save_checkpoint(path, weights_only=False)
            if trainer.is_global_zero:
                self._saved(path)
        self._saved_step = trainer.global_step

    def _check_finite(self, trainer: Trainer) -> None:
        """Raise if the last update has made the weights or the optimizer's state non-finite."""
        parameters = trainer.lightning_module.parameters()
        finite = all_finite(parameters, [optimizer.state for optimizer in trainer.optimizers])
        if not trainer.strategy.reduce_boolean_decision(finite):
            folder = self.checkpoint_folder(trainer) if self._writes else None
            raise checkpoint_io.non_finite(trainer.global_step, folder)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Copy the last checkpoint to `folder` if it is not there yet.

        Raises:
            UserError: The checkpoint cannot be copied.
        """
        mirror = trainer.strategy.checkpoint_io
        if not isinstance(mirror, MirroredCheckpointIO):
            return
        run = self.checkpoint_folder(trainer).parent
        speed = run_state.find_callback(trainer, SpeedMonitor)
        if speed:
            speed.on_fit_end(trainer, pl_module)  # the copy has the last line of timeline.jsonl
        try:
            with phase(trainer, "checkpoint"):
                mirror.copy(run)
        except UserError as error:
            raise UserError(
                f"the last checkpoint is not in {mirror.url}: {error}; it is in {run}: the same "
                "command with --resume auto copies it"
            ) from error

    def _saved(self, written: Path) -> None:
        """Delete the files that are no longer kept.

        A file whose digest cannot be read is neither counted nor deleted.
        """
        found = saved_checkpoints(written.parent)
        saved = [file for file in found if folders.has_digest(file.path)]
        kept = {written.name} | self._kept(saved)
        for file in saved:
            if file.path.name not in kept:
                DurableCheckpointIO().remove_checkpoint(file.path)
        step = next(file.step for file in saved if file.path == written)
        checkpoint_io.drop_aside(written.parent, step)

    def _kept(self, saved: list[Saved]) -> set[str]:
        """Return the names to keep of some checkpoints, the newest first."""
        kept = {file.path.name for file in saved[: self.keep_last]}
        scored = sorted((f.loss, -f.step, f.path.name) for f in saved if f.loss is not None)
        kept |= {name for *_, name in scored[: self.keep_best]}
        if self.keep_every_n_steps is not None:
            kept |= {f.path.name for f in saved if f.step % self.keep_every_n_steps == 0}
        return kept


def check_others(trainer: Trainer, folder: Path) -> None:
    """Raise a UserError if a ModelCheckpoint's files would have names of ours, which are deleted.

    Args:
        trainer: Trainer with the callbacks.
        folder: Folder of our checkpoints.
    """
    for other in trainer.checkpoint_callbacks:
        if isinstance(other, ModelCheckpoint):
            path = Path(other.format_checkpoint_name({}))
            if path.parent.resolve() == folder.resolve() and folders.sort_saved([path]):
                raise UserError(
                    f"ModelCheckpoint: filename {other.filename} would give its files names of the "
                    "run's own checkpoints, which are deleted: give another filename or dirpath"
                )
