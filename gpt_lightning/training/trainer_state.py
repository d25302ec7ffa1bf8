"""Typed accessors for Trainer attributes that Lightning leaves untyped."""

from typing import TypeVar

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from gpt_lightning.training.datamodule import TokenDataModule

CallbackT = TypeVar("CallbackT", bound=L.Callback)


def token_data(trainer: L.Trainer) -> TokenDataModule | None:
    """Return the run's TokenDataModule; None for data of another class."""
    data = getattr(trainer, "datamodule", None)
    return data if isinstance(data, TokenDataModule) else None


def find_callback(trainer: L.Trainer, kind: type[CallbackT]) -> CallbackT | None:
    """Return the run's first callback of a class, or None."""
    callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return next((c for c in callbacks if isinstance(c, kind)), None)


def log_every_n_steps(trainer: L.Trainer) -> int:
    """Return the optimizer steps from one log to the next; 0 logs nothing."""
    return int(trainer.log_every_n_steps)  # type: ignore[attr-defined]


def at_log_step(trainer: L.Trainer, step: int) -> bool:
    """Return whether an optimizer step is logged (1 is the first)."""
    every = log_every_n_steps(trainer)
    return every > 0 and step % every == 0


def at_step_boundary(trainer: L.Trainer) -> bool:
    """Return whether the optimizer has used all micro-batches so far."""
    return not getattr(trainer.lightning_module, "micro_batches", 0)


def count_steps_once(trainer: L.Trainer) -> None:
    """Make Lightning's loggers count the steps of global_step.

    They have their own counter, which is one too high after a resume from the end of a run, so that
    rows would be logged a step early (training_epoch_loop.py, reset).
    """
    if at_step_boundary(trainer):
        trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def is_trial(trainer: L.Trainer) -> bool:
    """Return whether this is Trainer's fast_dev_run, which leaves no files."""
    return bool(trainer.fast_dev_run)  # type: ignore[attr-defined]


def is_fitting(trainer: L.Trainer) -> bool:
    """Return whether the command is `fit`, also while it validates."""
    return trainer.state.fn == TrainerFn.FITTING


def total_steps(trainer: L.Trainer) -> int:
    """Return the optimizer steps of the whole run; 0 if it has no end.

    Trainer.estimated_stepping_batches drops the loader's state on a resume with max_epochs.
    """
    ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        steps_per_epoch = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        ends.append(trainer.max_epochs * steps_per_epoch)
    return min(ends, default=0)
