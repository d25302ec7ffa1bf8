"""StopBetweenSteps: trainer.should_stop ends a run between two optimizer steps."""

from typing import Any

from lightning import Callback, Trainer

from gpt_lightning.training import between_steps, run_state


class StopBetweenSteps(Callback):
    """Store a request to stop, which between_steps.stop_due obeys between two steps.

    Lightning obeys trainer.should_stop after any micro-batch, and validates once more: a resume
    would lose a part of a step.
    """

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        pl_module.stop_requested = False

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.should_stop:
            trainer.should_stop = False
            pl_module.stop_requested = True
        if pl_module.stop_requested and not isinstance(
            trainer.train_dataloader, between_steps.BetweenSteps
        ):
            trainer.should_stop = run_state.at_step_boundary(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.on_train_batch_end(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if run_state.is_fitting(trainer) and not trainer.sanity_checking:
            self.on_train_batch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        # a request of one rank must not end the run there; all ranks know of one that is due
        if trainer.world_size > 1 and not between_steps.stop_due(trainer):
            self.on_train_batch_end(trainer, pl_module)
