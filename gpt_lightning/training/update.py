"""The update of a module's weights: its optimizer, its loss and rates, its clipped gradients."""

import dataclasses
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gpt_lightning.errors import UserError
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import optimizers
from gpt_lightning.training.optim import clip_gradients, is_fused

if TYPE_CHECKING:
    from gpt_lightning.training.module import GPTModule


def build_optimizer(module: "GPTModule") -> Optimizer:
    """Return the optimizer of a module's settings, whose groups have the peaks of their rates."""
    settings = module.settings
    if not any(parameter.requires_grad for parameter in module.model.parameters()):
        way_out = ": shorten model.freeze" if settings.freeze else ""
        raise UserError(f"{type(module.model).__name__} has no parameter to train{way_out}")
    fused = is_fused(settings, module.device, module.trainer.precision_plugin)
    optimizer: Optimizer = optimizers.load(settings).build(module.model, settings, fused)
    return optimizer


def with_peak(settings: Settings, peak: float) -> Settings:
    """Return settings with another peak of the learning rate, and the same share at its minimum."""
    minimum = settings.min_learning_rate
    assert minimum is not None  # Settings fills in the default
    minimum *= peak / settings.learning_rate
    return dataclasses.replace(settings, learning_rate=peak, min_learning_rate=minimum)


def micro_batch_loss(module: "GPTModule", loss: Tensor, known: Tensor | None) -> Tensor:
    """Return the loss of a micro-batch.

    Args:
        module: Module that trains.
        loss: Loss that Lightning differentiates: over the number of micro-batches, times the scale
            of a GradScaler.
        known: Loss that GPTModule.training_step has returned; None for a subclass's own.

    Raises:
        UserError: It is no scalar, or nothing can be trained by it.
    """
    if not loss.requires_grad or loss.numel() != 1:
        raise UserError(
            f"{type(module).__name__}.training_step returns a loss of shape {tuple(loss.shape)} "
            f"and requires_grad {loss.requires_grad}; expected a scalar of trained parameters"
        )
    if known is not None:
        return known
    scaler: Any = getattr(module.trainer.precision_plugin, "scaler", None)
    scale = scaler.get_scale() if scaler else 1.0
    return loss.detach() * (module.trainer.accumulate_grad_batches / scale)


def logged_rates(module: "GPTModule", optimizer: Optimizer) -> dict[str, float]:
    """Return the rates of the coming update: that of the settings' peak, and Muon's."""
    first = optimizer.param_groups[0]["lr"]
    if not module.schedule:
        return {"optim/lr": first}
    rate = module.settings.learning_rate * module.schedule.share
    if module.settings.optimizer == "muon":
        return {"optim/lr_muon": first, "optim/lr": rate}
    return {"optim/lr": rate}


def clip(module: "GPTModule", optimizer: Any, limit: float | None, by_value: bool) -> Tensor:
    """Clip a module's gradients, and let its guard watch their norm and the loss.

    Args:
        module: Module whose step ends.
        optimizer: Optimizer that is about to step, or Lightning's wrapper.
        limit: trainer.gradient_clip_val.
        by_value: True clips each number, False the norm of all.

    Returns:
        The norm before clipping, a scalar on the module's device.
    """
    ours = getattr(optimizer, "optimizer", optimizer)
    parameters = list(module.parameters())
    norm = clip_gradients(parameters, None if by_value else limit, ours).to(module.device)
    loss = norm if module.last_loss is None else module.last_loss.to(norm)
    # a GradScaler skips the step and lowers the scale
    if getattr(module.trainer.precision_plugin, "scaler", None) is None:
        module.guard.watch(ours, loss, norm, module.global_step + 1)
    if by_value and limit is not None and limit > 0:
        nn.utils.clip_grad_value_(parameters, limit)
    return norm
