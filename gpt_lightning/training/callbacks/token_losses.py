"""TokenLosses: the file that `gpt-lightning predict` writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, replacement
from gpt_lightning.training.steps import run_folder

LOSSES_FILE = "token_losses.npy"


class TokenLosses(BasePredictionWriter):
    """Write each token's loss on the validation split to the run folder's `token_losses.npy`.

    Entry i, float32 in nats, is the negative log-likelihood of the split's token i + 1 given those
    before it in its window; a split of n tokens has n - 1 entries, and their mean is `val/loss`.
    With trainer.limit_predict_batches the file has the first entries.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage == "predict" and trainer.world_size > 1:
            raise UserError(
                f"predict on {trainer.world_size} devices would mix up the order: "
                "use --trainer.devices 1"
            )
        if stage == "predict" and not trainer.limit_predict_batches:
            raise UserError(
                "trainer.limit_predict_batches 0 leaves nothing to write: set it to 1 or more"
            )

    def write_on_epoch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, predictions: Sequence[Any], *_: Any
    ) -> None:
        whole = len(trainer.predict_dataloaders.dataset.stream) - 1  # type: ignore[union-attr]
        # what is beyond the split is padding
        losses = torch.cat([batch.flatten() for batch in predictions]).numpy()[:whole]
        part = "" if losses.size == whole else f" of {whole:,}"
        text = f"{losses.size:,}{part} token losses, mean {losses.mean(dtype=np.float64):.4f} nats"
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # it leaves no files
            print(f"fast_dev_run: no file of {text}")
            return
        path = (run_folder(trainer) or Path()) / LOSSES_FILE
        with explained("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacement(path) as temporary, temporary.open("wb") as file:
                np.save(file, losses)
        print(f"{path}: {text}")
