"""Metrics of an evaluation beside its losses, and the last training loss for callbacks."""

from typing import Any

import torch
from lightning import Callback, Trainer

from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.run_state import is_fitting


class EvaluatedPart(Callback):
    """Log bits per byte, and on how many tokens an evaluation is if not on the whole split."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        data = token_data(trainer)
        if data is None or not pl_module.eval_losses:  # a subclass may log a loss of its own
            return
        split = "test" if trainer.testing else "val"
        first = pl_module.eval_losses[0]
        facts = data.evaluated_part(split, first.positions * trainer.world_size)
        facts |= data.bits_per_byte(split, float(first.compute()))
        # float64, on the CPU: MPS has none; equal on all ranks
        exact = {key: torch.tensor(value, dtype=torch.float64) for key, value in facts.items()}
        pl_module.log_dict(exact, sync_dist=True, rank_zero_only=True)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.on_validation_epoch_end(trainer, pl_module)


class LastLoss(Callback):
    """Show callbacks the loss of the last step, which may not have been a log step."""

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        if is_fitting(trainer) and pl_module.last_loss is not None:
            pl_module.log("train/loss", pl_module.last_loss, sync_dist=True, logger=False)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.on_validation_epoch_end(trainer, pl_module)
