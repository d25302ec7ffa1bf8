"""Mean losses of an evaluation over batches and ranks, without waiting for the device."""

import torch
from lightning.pytorch.strategies import Strategy

from gpt_lightning.data.loader import IGNORE_INDEX
from gpt_lightning.errors import UserError


class Evaluation:
    """Losses of one evaluation; a mean is NaN if the loss of one batch is NaN.

    Attributes:
        sums: For each loader the summed loss and the number of targets, (2,).
        positions: Positions of this rank in the first loader, with padding.
    """

    def __init__(self) -> None:
        self.sums: list[torch.Tensor] = []
        self.positions = 0

    def add(self, loss: torch.Tensor, y: torch.Tensor, loader: int) -> None:
        """Add the mean loss of the targets y, (B, T), of a batch of a loader."""
        tokens = (y != IGNORE_INDEX).sum()
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        self.positions += y.numel() if loader == 0 else 0
        loss = loss.to(torch.promote_types(loss.dtype, torch.float32))
        while len(self.sums) <= loader:
            self.sums.append(loss.new_zeros(2))
        self.sums[loader] += torch.stack([loss * tokens, tokens.to(loss.dtype)])

    def losses(
        self, split: str, estimates: bool, strategy: Strategy, step: int
    ) -> dict[str, torch.Tensor]:
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
                raise UserError(
                    f"the {name.replace('/', ' ')} is {loss.item()} at step {step}: lower "
                    "model.learning_rate, or set trainer.gradient_clip_val"
                )
        return losses
