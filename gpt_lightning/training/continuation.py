"""Checkpoints of earlier runs: compare one with this run before any state is restored."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from gpt_lightning.data.readers import WindowReader
from gpt_lightning.errors import UserError
from gpt_lightning.removed import without_removed
from gpt_lightning.runs import resume
from gpt_lightning.runs.checkpoint import Checkpoint, RunRecord
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.steps import find_callback, is_fitting, set_logged_steps

TUNERS_FILES = (".lr_find_", ".scale_batch_size_")  # beginnings of file names of Lightning's Tuner


def loaded(trainer: L.Trainer, checkpoint: dict[str, Any]) -> Checkpoint | None:
    """Return the content of the checkpoint that a Trainer has loaded.

    Args:
        trainer: Trainer of this run.
        checkpoint: Lightning's dict.

    Returns:
        None for the file in which Lightning's Tuner has saved this run before its trials.

    Raises:
        UserError: The dict is not one of gpt-lightning, or a finder would reset the step.
    """
    path = Path(str(trainer.ckpt_path))
    if path.name.startswith(TUNERS_FILES):
        if data := token_data(trainer):  # the trials may have changed the batch size
            data.restart()
        return None
    theirs = Checkpoint.of(checkpoint, path)
    if is_fitting(trainer):  # raises for settings that this version cannot continue with
        without_removed(checkpoint["hyper_parameters"], "model.")
    data = token_data(trainer) if is_fitting(trainer) else None
    if data is not None and isinstance(data.reader, WindowReader):
        before = data.reader.train_loader.identity()
        data.reader.keep_shuffle(theirs.record.data_identity)
        kept = resume.differences(before, data.reader.train_loader.identity())
        if kept and trainer.is_global_zero:
            print(f"order       of the checkpoint: {', '.join(kept)}")
    finders = (find_callback(trainer, kind) for kind in (LearningRateFinder, BatchSizeFinder))
    if is_fitting(trainer) and any(finders):
        raise UserError(
            "LearningRateFinder and BatchSizeFinder reset the step of a resumed run: set "
            "model.learning_rate and data.batch_size to the values that they found, and resume "
            "without them"
        )
    return theirs


def compare(trainer: L.Trainer, theirs: Checkpoint, ours: RunRecord) -> None:
    """Check that a run may continue from a checkpoint, or evaluate it, and print the differences.

    Args:
        trainer: Trainer of this run.
        theirs: Content of the checkpoint.
        ours: Record of this run.

    Raises:
        UserError: The checkpoint is of another model, other data or another order.
    """
    data, fitting = token_data(trainer), is_fitting(trainer)
    allow_changes = data is not None and data.settings.allow_changes
    address = "this run's data" if data is None else data.address
    changed = resume.check(theirs.record, ours, address, fitting, allow_changes)
    if fitting and data is not None and not allow_changes:
        data.reader.check_stamps(theirs.record.shards)
    if not fitting:  # the loggers' x, which Lightning restores for fit alone
        set_logged_steps(trainer, theirs.step)
    if trainer.is_global_zero:
        name = "resume" if fitting else "checkpoint"
        print(resume.resumption(name, Path(str(trainer.ckpt_path)), theirs, changed))


def continue_loops(loops: dict[str, Any]) -> None:
    """Change the loops' state of a finished run to the state of a run that is not finished.

    Lightning counts the last epoch as done even if max_steps has ended it early. After a whole
    epoch, Lightning resumes with an empty epoch (max_steps) or at the beginning of the data
    (max_epochs).

    Args:
        loops: State of the fit loop in a checkpoint.
    """
    batches = loops["epoch_loop.batch_progress"]
    epochs = loops["epoch_progress"]["total"], loops["epoch_progress"]["current"]
    if not batches["is_last_batch"]:
        for count in epochs:
            count["processed"] = count["completed"] = max(0, count["started"] - 1)
    elif epochs[0]["completed"] == epochs[0]["started"]:
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False
        for count in epochs:
            count["ready"] = count["started"] = count["completed"] + 1
