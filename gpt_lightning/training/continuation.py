"""Checkpoints of earlier runs: compare one with this run before any state is restored."""

from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.runs import resume
from gpt_lightning.runs.checkpoint import Checkpoint
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.steps import is_fitting, set_logged_steps

TUNERS_FILES = (".lr_find_", ".scale_batch_size_")  # beginnings of file names of Lightning's Tuner
FIRST_BATCH = {"epoch": 0, "window": 0, "generator": None, "next": None}  # states of all loaders


def continue_from(checkpoint: Fields, module: Any) -> None:
    """Check that a run may continue from a checkpoint, or evaluate it, and print the differences.

    Args:
        checkpoint: Lightning's dict; the state of its loops is prepared for the run.
        module: GPTModule of this run, which takes over the seed unless seed_everything has set one.

    Raises:
        UserError: The dict is not one of gpt-lightning, or of another model, other data or another
            order; or a callback would reset the step of a resumed run.
    """
    trainer = module.trainer
    data = token_data(trainer)
    fitting = is_fitting(trainer)
    path = Path(str(trainer.ckpt_path))
    theirs = Checkpoint.of(checkpoint, path)
    loader = data.reader.train_loader if fitting and data is not None else None
    if path.name.startswith(TUNERS_FILES):  # this run, before the Tuner's trials
        if loader is not None:
            loader.load_state_dict(FIRST_BATCH)
        return
    if fitting:
        finders = LearningRateFinder | BatchSizeFinder
        if any(isinstance(callback, finders) for callback in trainer.callbacks):
            raise UserError(
                "LearningRateFinder and BatchSizeFinder reset the step of a resumed run: set "
                "model.learning_rate and data.batch_size to what they found, and leave them out"
            )
    module.seed = theirs.record.run_identity.get("seed_everything", module.seed)
    allow_changes = data is not None and data.settings.allow_changes
    address = "this run's data" if data is None else data.address
    changed = resume.check(theirs.record, module.record(), address, fitting, allow_changes)
    if fitting and data is not None and not allow_changes:
        data.reader.train_stream.check_stamp(theirs.record.shards)
    if fitting:
        continue_loops(checkpoint["loops"]["fit_loop"])
    else:  # the loggers' x, which Lightning restores for fit alone
        set_logged_steps(trainer, theirs.step)
    if trainer.is_global_zero:
        print(resume.resumption("resume" if fitting else "checkpoint", path, theirs, changed))


def continue_loops(loops: Fields) -> None:
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
