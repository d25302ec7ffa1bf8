"""Evaluations: mean losses over batches and ranks, without waiting for the device."""

from collections.abc import Callable

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from gpt_lightning.data.loader import IGNORE_INDEX, Batch, tokens_and_targets
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.model.loss import sum_dtype
from gpt_lightning.training import steps
from gpt_lightning.training.datamodule import token_data


class Evaluation:
    """Losses of one evaluation; a mean is NaN if the loss of one batch is NaN.

    Attributes:
        sums: For each loader the summed loss and the number of targets, (2,).
        positions: Positions of this rank in the first loader, with padding.
    """

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.positions = 0

    def add(self, loss: Tensor, y: Tensor, loader: int) -> None:
        """Add the mean loss of the targets y, (B, T), of a batch of a loader."""
        tokens = (y != IGNORE_INDEX).sum()
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        self.positions += y.numel() if loader == 0 else 0
        loss = loss.to(sum_dtype(loss.dtype))
        while len(self.sums) <= loader:
            self.sums.append(loss.new_zeros(2))
        self.sums[loader] += torch.stack([loss * tokens, tokens.to(loss.dtype)])

    def losses(
        self, split: str, estimates: bool, strategy: Strategy, step: int
    ) -> dict[str, Tensor]:
        """Return the mean losses over all ranks by name: SPLIT/loss, SPLIT/loss/dataloader_idx_N.

        Args:
            split: val or test.
            estimates: True if the second loader reads the training split (data.eval_batches).
            strategy: Strategy of the run, which adds the sums of all ranks.
            step: Optimizer step of the model.

        Raises:
            UserError: A loss is not finite.
        """
        losses = {}
        for i, sums in enumerate(self.sums):
            name = f"{split}/loss/dataloader_idx_{i}" if i else f"{split}/loss"
            name = "train/eval_loss" if estimates and i == 1 else name
            loss_sum, tokens = strategy.reduce(sums, reduce_op="sum")
            losses[name] = loss = loss_sum / tokens
            if not loss.isfinite():
                fix = "lower model.learning_rate, or set trainer.gradient_clip_val"
                fix = fix if tokens else "give the split a label other than -100"
                raise UserError(f"the {name.replace('/', ' ')} is {loss} at step {step}: {fix}")
        return losses


class EvaluatedModule(LightningModule):
    """LightningModule that logs the loss of a split; a subclass has the model.

    Attributes:
        _evaluate: Function of tokens and targets, (B, T) each, to the loss; without targets to the
            logits, (B, T, V).
        last_loss: Mean loss of the last step on this rank; None before the first.
    """

    _evaluate: Callable[..., Tensor]

    def __init__(self) -> None:
        super().__init__()
        self._evaluation = Evaluation()
        self.last_loss: Tensor | None = None

    def on_validation_epoch_start(self) -> None:
        self._evaluation = Evaluation()

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = tokens_and_targets(batch)
        self._evaluation.add(self._evaluate(x, y), y, dataloader_idx)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Return each target's loss in nats, float32 (B, T); 0 at padded positions."""
        x, y = tokens_and_targets(batch)
        logits = self._evaluate(x)  # (B, T, V)
        logits = logits.to(sum_dtype(logits.dtype))
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss over the evaluated tokens in nats, the perplexity, and bits per byte.

        If the tokens are not the whole split, their number is logged too. The losses of further
        loaders are SPLIT/loss/dataloader_idx_N.

        Raises:
            UserError: A loss is not finite.
        """
        split = "test" if self.trainer.testing else "val"
        data = token_data(self.trainer)
        fitting = steps.is_fitting(self.trainer)
        estimates = data is not None and data.settings.eval_batches is not None
        strategy, step = self.trainer.strategy, self.trainer.global_step
        metrics: Fields = self._evaluation.losses(split, estimates, strategy, step)
        if f"{split}/loss" in metrics:
            metrics[f"{split}/perplexity"] = metrics[f"{split}/loss"].exp()
        if fitting:
            # not a tensor of the CPU, which NCCL cannot reduce; Lightning makes one on the device
            metrics["step"] = float(step)
        self.log_dict(metrics, sync_dist=True, add_dataloader_idx=False)
        if data is not None and self._evaluation.sums:  # a subclass may log a loss of its own
            positions = self._evaluation.positions * self.trainer.world_size
            facts = data.evaluated_part(split, positions)
            if f"{split}/loss" in metrics:
                facts |= data.bits_per_byte(split, float(metrics[f"{split}/loss"]))
            # float64, on the CPU: MPS has none; equal on all ranks
            exact = {k: torch.tensor(v, dtype=torch.float64) for k, v in facts.items()}
            self.log_dict(exact, sync_dist=True, rank_zero_only=True)
        if fitting:
            self._log_last_loss()

    on_test_epoch_end = on_validation_epoch_end

    def _log_last_loss(self) -> None:
        """Show callbacks the loss of the last step, which may not have been a log step."""
        if self.last_loss is not None:
            self.log("train/loss", self.last_loss, sync_dist=True, logger=False)
