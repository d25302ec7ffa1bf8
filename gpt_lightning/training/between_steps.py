"""The moment between two optimizer steps, when nothing is in flight, and what acts then."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer

from gpt_lightning.data.loader import Batch
from gpt_lightning.training.run_state import at_step_boundary


class BetweenSteps:
    """Training loader that calls a function before it reads each batch.

    Lightning asks the loader for a batch only when all work on the last one is done, and it has no
    hook at that moment: its own hooks run before the update, before the validation or before the
    metrics are written. The sequence of one micro-batch is

        next(loader)             -> hook(): RunCheckpoint saves or stops here, if it is time to
          inner loader              reads the batch; its position moves by one batch
        on_train_batch_start
        training_step, backward     and the optimizer's step at the last micro-batch of a step
        on_train_batch_end          metrics are logged and written
        validation, if it is due    on_validation_end: the loss for the checkpoint's file name
        next(loader)             -> hook(): nothing is in flight, no further batch has been read

    A checkpoint that is saved in hook() is therefore the run after `step` whole steps: the position
    of the loader, the weights, the optimizer and the metrics files agree, and a resume reads the
    very next batch. docs/resume.md states the law.

    Lightning needs `__len__` (a resume through a loader without a length skips a batch) and the two
    state_dict methods (checkpoints hold what they return); they are those of the inner loader, if
    it has them. A resume through another one starts its epoch from the first batch.

    Args:
        loader: Loader of training batches, ours or a subclass's own.
        hook: Function to call before each batch is read; False ends the batches.
    """

    def __init__(self, loader: Any, hook: Callable[[], bool]):
        self.loader, self.hook = loader, hook
        if hasattr(loader, "state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while self.hook() and (batch := next(batches, None)) is not None:
            yield batch


def with_hook(make_loader: Callable[[], Any], trainer: Trainer) -> Any:
    """Return the loader that a subclass's train_dataloader makes, with BetweenSteps around it."""
    loader = make_loader()
    if isinstance(loader, BetweenSteps) or not hasattr(loader, "__iter__"):  # or for Lightning
        return loader
    return BetweenSteps(loader, functools.partial(call_between_batches, trainer))


class StepCallback(Callback):
    """Callback with hooks at moments for which Lightning has none."""

    def before_batches(self, trainer: Trainer) -> None:
        """Act between two micro-batches, before `between_batches` of any callback.

        All ranks enter `between_batches` with what is exchanged here.
        """

    def between_batches(self, trainer: Trainer) -> None:
        """Act between two micro-batches, when nothing is in flight; see BetweenSteps."""

    def before_validation(self, trainer: Trainer) -> None:
        """Act before the loader of a validation, which follows a step, starts its workers."""


def step_callbacks(trainer: Trainer) -> list[StepCallback]:
    """Return the callbacks with hooks between two steps, in order."""
    run: Any = trainer
    return [callback for callback in run.callbacks if isinstance(callback, StepCallback)]


def call_between_batches(trainer: Trainer) -> bool:
    """Call `before_batches`, then `between_batches`, of every StepCallback, in order.

    Returns:
        False if the run stops here because trainer.should_stop was set.
    """
    for callback in step_callbacks(trainer):
        callback.before_batches(trainer)
    for callback in step_callbacks(trainer):
        callback.between_batches(trainer)
    if not stop_due(trainer):
        return True
    trainer.should_stop = True  # Lightning ends a run without a further batch
    return False


def stop_due(trainer: Trainer) -> bool:
    """Return whether the run stops now, between two steps, for trainer.should_stop.

    Lightning obeys should_stop after any micro-batch, and validates once more. A resume would then
    lose a part of a step, and have a row that an uninterrupted run does not have. Therefore
    GPTModule stores the request, and the run stops here.
    """
    requested = getattr(trainer.lightning_module, "stop_requested", False)
    if not requested or not at_step_boundary(trainer):
        return False
    loop: Any = trainer.fit_loop
    epochs, steps = loop.epoch_progress.current.processed, trainer.global_step
    return epochs >= (loop.min_epochs or 0) and steps >= (loop.min_steps or 0)


def stop_reason(trainer: Trainer) -> str:
    """Return the name of the setting or callback that has set trainer.should_stop."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer):
            remaining_s = callback.time_remaining()
            if remaining_s is not None and remaining_s <= 0:
                return "max_time"
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return f"EarlyStopping: {callback.stopping_reason_message}"
    return "trainer.should_stop"
