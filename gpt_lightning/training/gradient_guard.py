"""No update with gradients that are not finite, and no waiting for the device to know."""

import torch
from torch.optim import AdamW, Optimizer

from gpt_lightning.errors import UserError

# Where a step's norm is not read at once: the processor would wait until the device has done
# everything that it was handed. Elsewhere there is nothing to wait for, or no kernel that can skip.
DEFERRED_ON = {"cuda"}


class NonFiniteGuard:
    """Raises when gradients are not finite, before any checkpoint and with the weights unharmed.

    Where reading a number stops the device, the decision is the device's: a fused AdamW skips its
    update if `found_inf` is 1 (PyTorch's GradScaler uses the same argument), and so it does from
    the first bad step on. Which step that was is kept on the device until `check` reads it, at the
    next log step, before a checkpoint, or at the end. Other optimizers are asked at each step.
    """

    def __init__(self) -> None:
        self._step: torch.Tensor | None = None  # the first bad step on the device, 0 for none
        self._norm: torch.Tensor | None = None  # its norm

    def watch(self, optimizer: Optimizer, norm: torch.Tensor, step: int) -> None:
        """Lets an optimizer step happen or not.

        Args:
            optimizer: That is about to step.
            norm: Of all gradients, a scalar on their device.
            step: The step's number, 1 for the first.

        Raises:
            UserError: the norm is not finite, where it could be read at once.
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
        """Waits for the device and tells of the first bad step.

        Raises:
            UserError: there was one; no update has been made since.
        """
        if self._step is None or self._norm is None:
            return
        step = int(self._step)
        if step:
            norm, self._step = self._norm, None  # told once
            raise not_finite(norm, step)


def unwrapped(optimizer: Optimizer) -> Optimizer:
    """The optimizer itself, which Lightning may have wrapped."""
    inner = getattr(optimizer, "optimizer", optimizer)
    assert isinstance(inner, Optimizer)
    return inner


def can_skip(optimizer: Optimizer, norm: torch.Tensor) -> bool:
    """Whether the device can decide to skip an update."""
    return (
        norm.device.type in DEFERRED_ON
        and type(norm) is torch.Tensor  # of sharded gradients it is another
        and isinstance(optimizer, AdamW)
        and all(group["fused"] for group in optimizer.param_groups)
    )


def not_finite(norm: torch.Tensor, step: int) -> UserError:
    """What the user reads."""
    return UserError(
        f"gradient norm is {norm.item()} at step {step}: weights were not changed; "
        "lower model.learning_rate, or go on from a checkpoint before it with --resume auto"
    )
