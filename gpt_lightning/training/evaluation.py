"""EvaluationModule: mean loss over splits and all ranks, without waiting for the device."""

import torch
from torchmetrics import Metric

from gpt_lightning.data.loader import IGNORE_INDEX, Batch
from gpt_lightning.errors import UserError
from gpt_lightning.training.build import BuildModule
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.steps import call_hook, is_fitting


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


class EvaluationModule(BuildModule):
    """Base class of GPTModule with the steps of validate, test and predict."""

    def __init__(self) -> None:
        super().__init__()
        self._losses: list[MeanLoss] = []  # for each loader
        self._evaluated = 0  # positions of this rank in the first loader, with padding

    def on_validation_model_zero_grad(self) -> None:
        super().on_validation_model_zero_grad()
        # on_validation_start comes later, when the loader's workers have been started
        call_hook(self.trainer, "before_validation")

    def on_validation_epoch_start(self) -> None:
        self._evaluated = 0
        self._losses = []

    on_test_epoch_start = on_validation_epoch_start

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        x, y = batch
        tokens = (y != IGNORE_INDEX).sum()
        loss = self._evaluate(x, y)
        loss = torch.where(tokens > 0, loss, 0.0)  # a rank's last batch may be padding alone
        self._evaluated += y.numel() if dataloader_idx == 0 else 0
        while len(self._losses) <= dataloader_idx:
            mean = MeanLoss().to(self.device)
            mean.set_dtype(torch.promote_types(loss.dtype, torch.float32))
            self._losses.append(mean)
        self._losses[dataloader_idx].update(loss, tokens)

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        """Return each target's loss in nats, float32 (B, T); 0 at padded positions."""
        x, y = batch
        logits = self._evaluate(x)  # (B, T, V)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return torch.nn.functional.cross_entropy(logits.transpose(1, 2), y, reduction="none")

    def _evaluate(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        if self.evaluates_compiled or not self.compiles[0]:
            return self.model(idx, targets)
        with torch.compiler.set_stance("force_eager"):
            return self.model(idx, targets)

    def on_validation_epoch_end(self) -> None:
        """Log the mean loss over the evaluated tokens in nats, and the perplexity.

        If the tokens are not the whole split, their number is logged too. The losses of further
        loaders are SPLIT/loss/dataloader_idx_N.

        Raises:
            UserError: A loss is not finite.
        """
        split, data = "test" if self.trainer.testing else "val", token_data(self.trainer)
        # with data.eval_batches the second loader reads the training split
        estimates = data is not None and data.settings.eval_batches is not None
        losses: dict[str, torch.Tensor] = {}
        for i, mean in enumerate(self._losses):
            name = f"{split}/loss/dataloader_idx_{i}" if i else f"{split}/loss"
            if mean.update_called:
                losses["train/eval_loss" if estimates and i == 1 else name] = mean.compute()
        metrics: dict[str, torch.Tensor | float] = dict(losses)
        if f"{split}/loss" in losses:
            metrics[f"{split}/perplexity"] = losses[f"{split}/loss"].exp()
        if is_fitting(self.trainer):
            # not a tensor of the CPU, which NCCL cannot reduce; Lightning makes one on the device
            metrics["step"] = float(self.trainer.global_step)
        self.log_dict(metrics, sync_dist=True, add_dataloader_idx=False)
        if data is not None:
            tokens = data.evaluated_part(split, self._evaluated * self.trainer.world_size)
            # float64, on the CPU: MPS has none; equal on all ranks
            exact = {k: torch.tensor(v, dtype=torch.float64) for k, v in tokens.items()}
            self.log_dict(exact, sync_dist=True, rank_zero_only=True)
        for name, loss in losses.items():
            if not loss.isfinite():
                raise UserError(
                    f"the {name.replace('/', ' ')} is {loss.item()} at step "
                    f"{self.trainer.global_step}: lower model.learning_rate, or set "
                    "trainer.gradient_clip_val"
                )

    on_test_epoch_end = on_validation_epoch_end
