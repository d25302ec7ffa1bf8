"""Metrics of torchmetrics: the mean losses of an evaluation and of a training step."""

from typing import cast

import torch
from torch import Tensor, nn
from torchmetrics import Metric

from gpt_lightning.data.loader import IGNORE_INDEX
from gpt_lightning.model.loss import sum_dtype


class TokenLoss(Metric):
    """Mean loss per target over batches and ranks; NaN if the loss of one batch is NaN.

    torchmetrics' MeanMetric either ignores its weights or waits for the device at each batch.

    Attributes:
        nats: Summed loss of the targets on this rank, at least in float32.
        tokens: Number of targets on this rank.
        positions: Number of positions on this rank, padding included.
    """

    full_state_update = False
    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.positions = 0

    def update(self, loss: Tensor, targets: Tensor) -> None:
        """Add the mean loss of the targets, (B, T), of a batch; padding has no weight."""
        tokens = (targets != IGNORE_INDEX).sum()
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        # not in place: the sum takes the dtype of a loss in float64
        self.nats = self.nats + loss.to(sum_dtype(loss.dtype)) * tokens
        self.tokens = self.tokens + tokens
        self.positions += targets.numel()

    def compute(self) -> Tensor:
        """Return the mean loss; NaN without a target."""
        return self.nats / self.tokens


class LoaderLosses(nn.ModuleList):
    """A TokenLoss for each loader of an evaluation, in their order."""

    def update(self, loss: Tensor, targets: Tensor, loader: int) -> None:
        """Add the mean loss of the targets, (B, T), of a batch of a loader, 0 for the first."""
        while len(self) <= loader:
            self.append(TokenLoss().to(loss.device))
        cast(TokenLoss, self[loader]).update(loss, targets)


class StepLoss(Metric):
    """Mean loss of the micro-batches of an optimizer step on this rank.

    torchmetrics' MeanMetric would round the losses of 64-true to float32.

    Attributes:
        total: Sum of the losses since the last step.
    """

    full_state_update = False
    total: Tensor

    def __init__(self) -> None:
        super().__init__(sync_on_compute=False)
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, loss: Tensor) -> None:
        """Add the loss of a micro-batch, a scalar."""
        # a new tensor: the next run of a CUDA graph overwrites its output
        self.total = self.total + loss.reshape(())

    def compute(self) -> Tensor:
        """Return the mean loss; NaN without a micro-batch."""
        return self.total / self.update_count
