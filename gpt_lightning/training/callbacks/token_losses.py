"""TokenLosses: the file that `gpt-lightning predict` writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from gpt_lightning.errors import UserError
from gpt_lightning.training.steps import run_folder

LOSSES_FILE = "token_losses.npy"


class TokenLosses(BasePredictionWriter):
    """Write each token's loss on the validation split to the run folder's `token_losses.npy`.

    Entry i, float32 in nats, is the negative log-likelihood of the split's token i + 1 given those
    before it in its window; a split of n tokens has n - 1 entries, and their mean is `val/loss`.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "predict" and trainer.world_size > 1:
            raise UserError(
                f"predict on {trainer.world_size} devices would mix up the order: "
                "use --trainer.devices 1"
            )

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], *_: Any
    ) -> None:
        losses = torch.cat([batch.flatten() for batch in predictions]).numpy()
        n_tokens = len(trainer.predict_dataloaders.dataset.stream)  # type: ignore[union-attr]
        folder = run_folder(trainer) or Path()
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / LOSSES_FILE, losses[: n_tokens - 1])  # the rest is padding
        mean = losses[: n_tokens - 1].mean(dtype=np.float64)
        print(f"{folder / LOSSES_FILE}: {n_tokens - 1:,} token losses, mean {mean:.4f} nats")
