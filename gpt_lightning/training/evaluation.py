"""Losses of an evaluation by name, over all ranks."""

from typing import TYPE_CHECKING, cast

from torch import Tensor

from gpt_lightning.errors import UserError
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.metrics import TokenLoss

if TYPE_CHECKING:
    from gpt_lightning.training.module import GPTModule


def mean_losses(module: "GPTModule", split: str) -> dict[str, Tensor]:
    """Return the mean loss of each loader, and the perplexity of the first.

    The losses of further loaders are SPLIT/loss/dataloader_idx_N; the second one of data with
    eval_batches reads the training split, and its loss is train/eval_loss.

    Args:
        module: Module with the sums of an evaluation.
        split: val or test.

    Raises:
        UserError: A loss is not finite.
    """
    data = token_data(module.trainer)
    estimates = data is not None and data.settings.eval_batches is not None
    losses: dict[str, Tensor] = {}
    for i, metric in enumerate(cast(list[TokenLoss], module.eval_losses)):
        name = f"{split}/loss"
        if i > 0:
            name = f"{split}/loss/dataloader_idx_{i}"
        if i == 1 and estimates:
            name = "train/eval_loss"
        losses[name] = metric.compute()
        if not losses[name].isfinite():
            fix = "lower model.learning_rate, or set trainer.gradient_clip_val"
            if not module.trainer.strategy.reduce(metric.tokens, reduce_op="sum"):
                fix = "give the split a label other than -100"
            place = f"{name.replace('/', ' ')} is {losses[name]} at step {module.global_step}"
            raise UserError(f"the {place}: {fix}")
    if f"{split}/loss" in losses:
        losses[f"{split}/perplexity"] = losses[f"{split}/loss"].exp()
    return losses
