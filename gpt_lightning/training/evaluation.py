"""MeanLoss: mean loss over batches and ranks, without waiting for the device."""

import torch
from torchmetrics import Metric


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
