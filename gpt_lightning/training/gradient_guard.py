"""NonFiniteGuard: no update with non-finite gradients, and no waiting for the device to check."""

import torch
from torch.optim import AdamW, Optimizer

from gpt_lightning.errors import UserError
from gpt_lightning.training import optim


class NonFiniteGuard:
    """Raise on non-finite gradients, before any checkpoint and with the weights unchanged.

    On a device of optim.DEFERRED_ON the device itself decides: a fused AdamW skips its update if
    `found_inf` is 1 (PyTorch's GradScaler uses the same argument), from the first bad step on. The
    number of that step stays on the device until `check` reads it: at the next log step, before a
    checkpoint, or at the end. Before the update of any other optimizer the norm is read at once.
    """

    def __init__(self) -> None:
        self._step: torch.Tensor | None = None  # the first bad step on the device, 0 for none
        self._norm: torch.Tensor | None = None  # its norm

    def watch(self, optimizer: Optimizer, norm: torch.Tensor, step: int) -> None:
        """Skip the coming update, or raise, if the norm is not finite.

        Args:
            optimizer: Optimizer that is about to step.
            norm: Norm of all gradients, a scalar on their device.
            step: Number of the step, 1 for the first.

        Raises:
            UserError: the norm is not finite, and could be read at once.
        """
        optimizer = unwrapped(optimizer)
        if not can_skip(optimizer, norm):
            if not norm.isfinite():
                raise not_finite(norm, step)
            return
        if self._step is None or self._norm is None:
            self._step = torch.zeros((), dtype=torch.int64, device=norm.device)
            self._norm = torch.zeros_like(norm)
        new = ~norm.isfinite() & (self._step == 0)
        self._step = self._step.masked_fill(new, step)
        self._norm = torch.where(new, norm, self._norm)
        optimizer.found_inf = (self._step > 0).float()  # type: ignore[attr-defined]  # AdamW reads it

    def check(self) -> None:
        """Synchronize and raise if there was a bad step.

        Raises:
            UserError: names the first bad step; no update has been made since.
        """
        if self._step is None or self._norm is None:
            return
        step = int(self._step)
        if step:
            norm, self._step = self._norm, None  # raised once
            raise not_finite(norm, step)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside Lightning's wrapper, or the optimizer itself."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, Optimizer)
    return inner


def can_skip(optimizer: Optimizer, norm: torch.Tensor) -> bool:
    """Return whether the device can decide to skip an update."""
    return (
        norm.device.type in optim.DEFERRED_ON
        and type(norm) is torch.Tensor  # the norm of sharded gradients is another class
        and isinstance(optimizer, AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
    )


def not_finite(norm: torch.Tensor, step: int) -> UserError:
    """Return the error for a non-finite gradient norm."""
    return UserError(
        f"gradient norm is {norm.item()} at step {step}: weights were not changed; "
        "lower model.learning_rate, or resume from a checkpoint before it with --resume auto"
    )
