"""Record of a run in its checkpoints, and its comparison before any state is restored."""

from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder

from gpt_lightning import parsing
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.model.network import missing_network
from gpt_lightning.runs import resume
from gpt_lightning.runs.checkpoint import Checkpoint, RunRecord, environment, run_identity
from gpt_lightning.runs.folders import run_id
from gpt_lightning.training import build, run_state
from gpt_lightning.training.behaviours.step_seeds import run_seed
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.run_state import is_fitting, set_logged_steps

if TYPE_CHECKING:
    from gpt_lightning.training.module import GPTModule

TUNERS_FILES = (".lr_find_", ".scale_batch_size_")  # beginnings of file names of Lightning's Tuner
FIRST_BATCH = {"epoch": 0, "window": 0, "generator": None, "next": None}  # states of all loaders


def hyperparameters(module: "GPTModule") -> Fields:
    """Return a module's arguments as plain values: `GPTModule(**hyperparameters)` is this module.

    Without `init_from`, whose weights are in the checkpoint.
    """
    own = {"network": module.network.record()} if module.network else {}
    return RunRecord(config=module.config, settings=module.settings).hyperparameters() | own


def record_of(module: "GPTModule") -> RunRecord:
    """Return the description of a module's run that its checkpoints hold."""
    trainer = module.trainer
    data = token_data(trainer)
    logger = run_state.run_logger(trainer)
    return RunRecord(
        config=module.config,
        settings=module.settings,
        network=module.network.record() if module.network else None,
        run_identity=run_identity(trainer, run_seed(module), build.decay_steps(module)),
        environment=environment(trainer, build.compiles(module)[0], module.attention_kernel),
        micro_batches=run_state.unfinished_micro_batches(trainer),
        run_id=run_id(logger.folder) if logger else None,
        metrics_rows=logger.rows if logger else None,
        script=parsing.script,
        **({} if data is None else data.record()),
    )


def continue_from(checkpoint: Fields, module: "GPTModule") -> None:
    """Check that a run may continue from a checkpoint, or evaluate it, and print the differences.

    Args:
        checkpoint: Lightning's dict; the state of its loops is prepared for the run.
        module: GPTModule of this run, which takes over the seed unless seed_everything has set one.

    Raises:
        UserError: The dict is not one of gpt-lightning, or of another model, other data or another
            order; or a callback would reset the step of a resumed run.
    """
    if module.attached_trainer is None:  # load_from_checkpoint: no run to compare with
        theirs = checkpoint.get("gpt_lightning", {}).get("network")
        if theirs and not module.network:
            raise missing_network("the checkpoint", theirs)
        return
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
        finds_rate = run_state.find_callback(trainer, LearningRateFinder)
        if finds_rate or run_state.find_callback(trainer, BatchSizeFinder):
            raise UserError(
                "LearningRateFinder and BatchSizeFinder reset the step of a resumed run: set "
                "model.learning_rate and data.batch_size to what they found, and leave them out"
            )
    module.seed = theirs.record.run_identity.get("seed_everything", module.seed)
    allow_changes = data is not None and data.settings.allow_changes
    address = "this run's data" if data is None else data.address
    changed = resume.check(theirs.record, record_of(module), address, fitting, allow_changes)
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
