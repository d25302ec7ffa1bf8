"""BetweenSteps: the moment between two optimizer steps, made visible around the training loader.

Lightning asks the loader for a batch only when all work on the last one is done, and it has no hook
at that moment: its own hooks run before the update, before the validation or before the metrics are
written. The sequence of one micro-batch is

    next(loader)             -> hook(): RunCheckpoint saves or stops here, if it is time to
      inner loader              reads the batch; its position moves by one batch
    on_train_batch_start
    training_step, backward     and the optimizer's step at the last micro-batch of a step
    on_train_batch_end          metrics are logged and written
    validation, if it is due    on_validation_end: the loss for the checkpoint's file name
    next(loader)             -> hook(): nothing is in flight, no further batch has been read

A checkpoint that is saved in hook() is therefore the run after `step` whole steps: the position of
the loader, the weights, the optimizer and the metrics files agree, and a resume reads the very next
batch. docs/resume.md states the law.
"""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import lightning as L

from gpt_lightning.data.loader import Batch, TrainLoader

if TYPE_CHECKING:
    from gpt_lightning.data.nanogpt_batches import NanoGPTLoader


class BetweenSteps:
    """Training loader that calls a function before it reads each batch.

    Lightning needs `__len__` (a resume through a loader without a length skips a batch) and the two
    state_dict methods (checkpoints hold what they return); they are those of the inner loader.

    Args:
        loader: Loader of training batches.
        hook: Function to call before each batch is read.
    """

    def __init__(self, loader: "TrainLoader | NanoGPTLoader", hook: Callable[[], None]) -> None:
        self.loader, self.hook = loader, hook

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        self.hook()
        while (batch := next(batches, None)) is not None:
            yield batch
            self.hook()

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def call_between_batches(trainer: L.Trainer) -> None:
    """Call `between_batches` of every callback that has it, in the order of the callbacks."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set by a connector
        act = getattr(callback, "between_batches", None)
        if act is not None:
            act(trainer)
