"""State of a Trainer's run, some of which Lightning leaves untyped: steps, callbacks, folder."""

from pathlib import Path
from typing import Any, TypeVar

from lightning import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from gpt_lightning.runs.logger import RunLogger
from gpt_lightning.training.sharding import ShardedStrategy

CallbackT = TypeVar("CallbackT", bound=Callback)


def total_steps(trainer: Trainer, batches: float | None = None) -> int:
    """Return the optimizer steps of the whole run; 0 if it has no end.

    Trainer.estimated_stepping_batches drops the loader's state on a resume with max_epochs.

    Args:
        trainer: Trainer with max_steps, max_epochs or both.
        batches: Micro-batches of an epoch; None: those of the loader that is set up.
    """
    ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epoch = trainer.num_training_batches if batches is None else batches
        ends.append(trainer.max_epochs * (int(epoch) // trainer.accumulate_grad_batches))
    return min(ends, default=0)


def at_log_step(trainer: Trainer, step: int) -> bool:
    """Return whether an optimizer step is logged (1 is the first)."""
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # 0 logs nothing
    return every > 0 and step % every == 0


def at_step_boundary(trainer: Trainer) -> bool:
    """Return whether the optimizer has used all micro-batches so far."""
    return not getattr(trainer.lightning_module, "micro_batches", 0)


def unfinished_micro_batches(trainer: Trainer) -> int:
    """Return the micro-batches that were read since the last optimizer step ended."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    counted = getattr(trainer.lightning_module, "micro_batches", 0)
    return counted or batches.ready - batches.processed


def find_callback(trainer: Trainer, kind: type[CallbackT]) -> CallbackT | None:
    """Return the run's first callback of a class, or None."""
    run: Any = trainer
    return next((c for c in run.callbacks if isinstance(c, kind)), None)


def set_logged_steps(trainer: Trainer, steps: int) -> None:
    """Set Lightning's counter of steps for loggers.

    After a resume from the end of a run this counter is one too high, and rows would be logged a
    step early (training_epoch_loop.py, reset). An evaluation does not restore it.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def run_logger(trainer: Trainer) -> RunLogger | None:
    """Return the owner of the run folder; None with a Trainer that has no RunLogger."""
    return next((logger for logger in trainer.loggers if isinstance(logger, RunLogger)), None)


def run_folder(trainer: Trainer) -> Path | None:
    """Return the run folder, if any."""
    return getattr(run_logger(trainer), "folder", None)


def is_fitting(trainer: Trainer) -> bool:
    """Return whether the command is `fit`, also while it validates."""
    return trainer.state.fn == TrainerFn.FITTING


def is_sharded(trainer: Trainer) -> bool:
    """Return whether ranks have shards of the weights (sharding.py), not all of them."""
    return isinstance(getattr(trainer, "strategy", None), ShardedStrategy)
