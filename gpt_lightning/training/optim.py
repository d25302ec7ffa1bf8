"""An update, in torch alone: parameter groups, clipping, what a device can skip."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gpt_lightning.errors import UserError
from gpt_lightning.runs.settings import Settings

FUSED_ADAMW_DEVICES = {"cpu", "cuda", "mps", "xpu"}  # torch.optim.AdamW, argument `fused`
DEFERRED_ON = {"cuda"}  # devices that skip an update themselves; the norm is checked later there


def make_adamw(
    named_parameters: Iterable[tuple[str, nn.Parameter]], settings: Settings, fused: bool
) -> AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) over the parameters that are trained.

    There are groups with and without weight decay, for each factor of the learning rate. Each has
    its peak of the rate, `lr`, and, unless it is 1, its `factor`.

    Args:
        named_parameters: Parameters to optimize; a tied matrix appears once.
        settings: Learning rate and its factors by pattern, of which the first that matches counts;
            averaging coefficients; weight decay of matrices and embeddings, or of all tensors.
        fused: True if an update is one kernel per dtype and device.
    """
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    factors = settings.learning_rate_factors or {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            factor = next((f for pattern, f in factors.items() if fnmatchcase(name, pattern)), 1.0)
            decays = settings.decay == "all" or parameter.dim() >= 2
            groups.setdefault((factor, not decays), []).append(parameter)
    options = [
        {
            "params": groups[factor, not_decayed],
            "weight_decay": 0.0 if not_decayed else settings.weight_decay,
            "lr": settings.learning_rate * factor,
        }
        | ({} if factor == 1.0 else {"factor": factor})
        for factor, not_decayed in sorted(groups)
    ]
    # None, not False: PyTorch's default loops over chunks of tensors, False over single tensors
    fuse = True if fused else None
    return AdamW(options, lr=settings.learning_rate, betas=settings.betas, fused=fuse)


def is_fused(settings: Settings, device: torch.device, precision: Any) -> bool:
    """Return whether AdamW's update is one kernel.

    Args:
        settings: Setting of `fused`.
        device: Device of the parameters.
        precision: Lightning's precision plugin, with a GradScaler in float16. A fused step unscales
            gradients itself: with a GradScaler there is no moment to clip them.

    Raises:
        UserError: The setting is true, and there is a GradScaler.
    """
    scaled = getattr(precision, "scaler", None) is not None
    if settings.fused == "auto":
        return device.type in FUSED_ADAMW_DEVICES and not scaled
    if settings.fused and scaled:
        raise UserError(
            f"model.fused true would clip scaled gradients in {precision.precision}: set it to auto"
        )
    return settings.fused


def clip_gradients(
    parameters: Iterable[nn.Parameter], max_norm: float | None, optimizer: Any = None
) -> Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`.

    Args:
        parameters: Parameters with gradients.
        max_norm: Largest norm; None, 0 or less leaves the gradients as they are.
        optimizer: Optimizer of the coming update. On a device of DEFERRED_ON a fused AdamW scales
            whole gradients as it reads them, which saves a pass over them.

    Returns:
        The norm before clipping, a scalar on the parameters' device (no synchronization).
    """
    parameters = list(parameters)
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    scales = isinstance(optimizer, AdamW) and can_skip(optimizer, norm)
    scales &= norm.dtype == torch.float32  # the dtype that AdamW's kernel reads
    if hasattr(norm, "full_tensor"):  # shards: take the norm over all ranks
        norm, scales = norm.full_tensor(), False
    max_norm = max_norm or 0.0
    if scales:
        optimizer.grad_scale = None
        if max_norm > 0:  # AdamW divides by it, as for PyTorch's GradScaler
            optimizer.grad_scale = (norm / max_norm).clamp_(min=1.0)
    if scales or max_norm <= 0:
        return norm
    # PyTorch multiplies by min(1, max_norm / (norm + 1e-6)), also by 1
    if norm.device.type in DEFERRED_ON or not norm + 1e-6 <= max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a shard, without a copy; other tensors as they are."""
    rows = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return rows


def can_skip(optimizer: Optimizer, norm: Tensor) -> bool:
    """Return whether the device of the gradients' norm can decide to skip an update."""
    if norm.device.type not in DEFERRED_ON:
        return False
    if isinstance(optimizer, AdamW):
        return all(group["fused"] for group in optimizer.param_groups)
    return getattr(optimizer, "takes_found_inf", False)
