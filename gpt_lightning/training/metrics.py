"""Metrics of torchmetrics: the mean loss of an evaluation."""

import torch
from torch import Tensor
from torchmetrics import Metric

from gpt_lightning.data.loader import IGNORE_INDEX
from gpt_lightning.model.loss import sum_dtype


class TokenLoss(Metric):
    """Mean loss per target over batches and ranks; NaN if the loss of one batch is NaN.

    torchmetrics' MeanMetric either ignores its weights or waits for the device at each batch.

    Attributes:
        nats: Summed loss of the targets on this rank, at least in float32.
        tokens: Number of targets on this rank.
    """

    full_state_update = False
    nats: Tensor
    tokens: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("nats", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("tokens", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, loss: Tensor, targets: Tensor) -> None:
        """Add the mean loss of the targets, (B, T), of a batch; padding has no weight."""
        tokens = (targets != IGNORE_INDEX).sum()
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        # not in place: the sum takes the dtype of a loss in float64
        self.nats = self.nats + loss.to(sum_dtype(loss.dtype)) * tokens
        self.tokens = self.tokens + tokens

    def compute(self) -> Tensor:
        """Return the mean loss; NaN without a target."""
        return self.nats / self.tokens
