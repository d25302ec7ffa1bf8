"""RunCheckpoint: the best model by validation loss, and the last."""

from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from gpt_lightning.callbacks.speed import phase


class RunCheckpoint(ModelCheckpoint):
    """Keeps the best model and the last.

    After each validation `checkpoints/best-step-N-loss-L.ckpt`, if L is among the lowest, and
    `checkpoints/last.ckpt`; the latter once more at the end of the run.

    Args:
        keep_best: How many of the best by validation loss are kept.
    """

    def __init__(self, keep_best: int = 1) -> None:
        super().__init__(
            filename="best-step-{step:07d}-loss-{val/loss:.4f}",
            auto_insert_metric_name=False,
            monitor="val/loss",
            mode="min",
            save_top_k=keep_best,
            save_last=True,
            save_on_train_epoch_end=False,
        )
        self._saved_step = -1

    def on_save_checkpoint(
        self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._saved_step = trainer.global_step

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with phase(trainer, "checkpoint"):
            super().on_validation_end(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # the steps after the last validation, or a run without one
        if self._saved_step != trainer.global_step:
            with phase(trainer, "checkpoint"):
                assert self.dirpath is not None
                trainer.save_checkpoint(Path(self.dirpath) / "last.ckpt", weights_only=False)
