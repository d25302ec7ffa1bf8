"""Evaluations: mean losses over batches and ranks, without waiting for the device at a batch."""

from collections.abc import Callable
from typing import cast

import torch
from lightning import LightningModule
from torch import Tensor, nn

from gpt_lightning.data.loader import Batch, tokens_and_targets
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.model.loss import sum_dtype
from gpt_lightning.training import steps
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.metrics import TokenLoss


class EvaluatedModule(LightningModule):
    """LightningModule that logs the loss of a split; a subclass has the model.

    Attributes:
        _evaluate: Function of tokens and targets, (B, T) each, to the loss; without targets to the
            logits, (B, T, V).
        eval_losses: A TokenLoss for each loader of the last evaluation.
        last_loss: Mean loss of the last step on this rank; None before the first.
    """

    _evaluate: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.eval_losses = nn.ModuleList()
        self._positions = 0  # of this rank in the first loader, with padding
        self.last_loss: Tensor | None = None

    def on_validation_epoch_start(self) -> None:
        self.eval_losses = nn.ModuleList()
        self._positions = 0

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = tokens_and_targets(batch)
        loss = self._evaluate(x, y)
        while len(self.eval_losses) <= dataloader_idx:
            self.eval_losses.append(TokenLoss().to(loss.device))
        cast(TokenLoss, self.eval_losses[dataloader_idx]).update(loss, y)
        if dataloader_idx == 0:
            self._positions += y.numel()

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return each target's loss in nats, float32 (B, T); 0 at padded positions."""
        x, y = tokens_and_targets(batch)
        logits = self._evaluate(x)  # (B, T, V)
        logits = logits.to(sum_dtype(logits.dtype))
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")

    def _mean_losses(self, split: str, estimates: bool) -> dict[str, Tensor]:
        """Return the mean losses over all ranks by name: SPLIT/loss, SPLIT/loss/dataloader_idx_N.

        Args:
            split: val or test.
            estimates: True if the second loader reads the training split (data.eval_batches).

        Raises:
            UserError: A loss is not finite.
        """
        losses = {}
        for i, metric in enumerate(cast(list[TokenLoss], self.eval_losses)):
            name = f"{split}/loss"
            if i > 0:
                name = f"{split}/loss/dataloader_idx_{i}"
            if i == 1 and estimates:
                name = "train/eval_loss"
            loss = metric.compute()
            if not loss.isfinite():
                fix = "lower model.learning_rate, or set trainer.gradient_clip_val"
                if not self.trainer.strategy.reduce(metric.tokens, reduce_op="sum"):
                    fix = "give the split a label other than -100"
                place = f"{name.replace('/', ' ')} is {loss} at step {self.trainer.global_step}"
                raise UserError(f"the {place}: {fix}")
            losses[name] = loss
        return losses

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss over the evaluated tokens in nats, the perplexity, and bits per byte.

        If the tokens are not the whole split, their number is logged too. The losses of further
        loaders are SPLIT/loss/dataloader_idx_N.

        Raises:
            UserError: A loss is not finite.
        """
        split = "test" if self.trainer.testing else "val"
        data = token_data(self.trainer)
        estimates = data is not None and data.settings.eval_batches is not None
        metrics: Fields = self._mean_losses(split, estimates)
        if f"{split}/loss" in metrics:
            metrics[f"{split}/perplexity"] = metrics[f"{split}/loss"].exp()
        self.log_dict(metrics, sync_dist=True, add_dataloader_idx=False)
        if data is not None and self.eval_losses:  # a subclass may log a loss of its own
            positions = self._positions * self.trainer.world_size
            facts = data.evaluated_part(split, positions)
            if f"{split}/loss" in metrics:
                facts |= data.bits_per_byte(split, float(metrics[f"{split}/loss"]))
            # float64, on the CPU: MPS has none; equal on all ranks
            exact = {k: torch.tensor(v, dtype=torch.float64) for k, v in facts.items()}
            self.log_dict(exact, sync_dist=True, rank_zero_only=True)
        if steps.is_fitting(self.trainer):
            self._log_last_loss()

    on_test_epoch_end = on_validation_epoch_end

    def _log_last_loss(self) -> None:
        """Show callbacks the loss of the last step, which may not have been a log step."""
        if self.last_loss is not None:
            self.log("train/loss", self.last_loss, sync_dist=True, logger=False)
