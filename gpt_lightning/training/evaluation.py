"""Mean losses of an evaluation over batches and ranks, without waiting for the device."""

import torch
from torchmetrics import Metric

from gpt_lightning.data.loader import IGNORE_INDEX
from gpt_lightning.errors import UserError


class MeanLoss(Metric):
    """Mean loss per token over batches and ranks; NaN if the loss of one batch is NaN.

    torchmetrics' MeanMetric reads the device at each batch, to leave out values that are NaN.
    """

    loss_sum: torch.Tensor
    tokens: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss_sum", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("tokens", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, loss: torch.Tensor, tokens: torch.Tensor) -> None:
        """Add the mean loss of a number of tokens, both scalars."""
        weight = tokens.to(self.dtype)
        self.loss_sum += loss.to(self.dtype) * weight
        self.tokens += weight

    def compute(self) -> torch.Tensor:
        return self.loss_sum / self.tokens


class Evaluation:
    """Losses of one evaluation.

    Attributes:
        means: Mean loss for each loader.
        positions: Positions of this rank in the first loader, with padding.
    """

    def __init__(self) -> None:
        self.means: list[MeanLoss] = []
        self.positions = 0

    def add(self, loss: torch.Tensor, y: torch.Tensor, loader: int) -> None:
        """Add the mean loss of the targets y, (B, T), of a batch of a loader."""
        tokens = (y != IGNORE_INDEX).sum()
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        self.positions += y.numel() if loader == 0 else 0
        while len(self.means) <= loader:
            mean = MeanLoss().to(loss.device)
            mean.set_dtype(torch.promote_types(loss.dtype, torch.float32))
            self.means.append(mean)
        self.means[loader].update(loss, tokens)

    def losses(self, split: str, estimates: bool) -> dict[str, torch.Tensor]:
        """Return the mean losses over all ranks by name: SPLIT/loss, SPLIT/loss/dataloader_idx_N.

        Args:
            split: val or test.
            estimates: True if the second loader reads the training split (data.eval_batches).
        """
        losses = {}
        for i, mean in enumerate(self.means):
            name = f"{split}/loss/dataloader_idx_{i}" if i else f"{split}/loss"
            if mean.update_called:
                losses["train/eval_loss" if estimates and i == 1 else name] = mean.compute()
        return losses


def check_losses(losses: dict[str, torch.Tensor], step: int) -> None:
    """Raise a UserError if a loss is not finite."""
    for name, loss in losses.items():
        if not loss.isfinite():
            raise UserError(
                f"the {name.replace('/', ' ')} is {loss.item()} at step {step}: lower "
                "model.learning_rate, or set trainer.gradient_clip_val"
            )
