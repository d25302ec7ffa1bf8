"""Learning rate, seeds, parameter groups and clipping: functions of torch alone."""

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch.optim import AdamW

FUSED_ADAMW_DEVICES = {"cpu", "cuda", "mps", "xpu"}  # torch.optim.AdamW, argument `fused`
# Devices where reading a number waits for all queued work, so that no step's norm is read at once
DEFERRED_ON = {"cuda"}
MASK = 2**64 - 1


def learning_rate(
    step: int,
    *,
    peak: float,
    minimum: float,
    warmup_steps: int,
    decay_steps: int,
    schedule: Literal["cosine", "constant"],
) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    Warm-up is linear and reaches `peak` one step after its last step. Then half a cosine falls to
    `minimum` at `decay_steps` and stays there, or the rate is constant. Source: nanoGPT, train.py,
    get_lr.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if schedule == "constant":
        return peak
    if step >= decay_steps:
        return minimum
    progress = (step - warmup_steps) / (decay_steps - warmup_steps)  # 0 .. 1
    return minimum + 0.5 * (1.0 + math.cos(math.pi * progress)) * (peak - minimum)


def mix(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on every number and on their order.

    SplitMix64's finalizer (Steele, Lea and Flood 2014) over each number in turn.
    """
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & MASK
        state ^= state >> 31
    return state >> 1


def decay_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    weight_decay: float,
    decay: Literal["matrices", "all"] = "matrices",
) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay.

    Args:
        named_parameters: Parameters to optimize; a tied matrix appears once.
        weight_decay: Weight decay of the first group.
        decay: matrices: only tensors of two or more dimensions decay (matrix products and
            embeddings), biases and layer norms do not. all: every tensor decays, as in PyTorch's
            optimizers without groups.
    """
    parameters = [p for _, p in named_parameters if p.requires_grad]
    if decay == "all":
        return [{"params": parameters, "weight_decay": weight_decay}]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def make_adamw(
    groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], fused: bool
) -> AdamW:
    """Return AdamW (Loshchilov and Hutter 2019) over parameter groups.

    Args:
        groups: Parameter groups with their weight decay.
        lr: Peak of the learning rate, which the schedule scales.
        betas: Averaging coefficients.
        fused: True if an update is one kernel per dtype and device.
    """
    groups = [{**group, "peak_lr": lr} for group in groups]
    # None, not False: PyTorch's default loops over chunks of tensors, False over single tensors
    return AdamW(groups, lr=lr, betas=betas, fused=True if fused else None)


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float | None
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`.

    Args:
        parameters: Parameters with gradients.
        max_norm: Largest norm; None leaves the gradients as they are.

    Returns:
        The norm before clipping, a scalar on the parameters' device (no synchronization).
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not max_norm:
        return norm
    # PyTorch multiplies by min(1, max_norm / (norm + 1e-6)), also by 1
    if norm.device.type in DEFERRED_ON or not norm + 1e-6 <= max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
