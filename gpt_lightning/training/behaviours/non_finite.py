"""NonFiniteGuard: no update with a non-finite loss or gradient, and no waiting for the device."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning import Callback, Trainer
from torch import Tensor, nn

from gpt_lightning.errors import UserError
from gpt_lightning.training.optim import can_skip, local

MOST_UNREAD = 1000  # steps whose loss and norm stay on the device


class NonFiniteGuard(Callback):
    """Raise on a non-finite loss or gradient, before any checkpoint, with the weights unchanged.

    On a device of DEFERRED_ON the device itself decides: a fused AdamW skips its update if
    `found_inf` is 1 (PyTorch's GradScaler uses the same argument), from the first bad step on. The
    values of the steps stay on the device until `check` reads them: at the next log step, before a
    checkpoint, or at the end. Before the update of any other optimizer they are read at once.
    """

    def __init__(self) -> None:
        self._unread: list[tuple[int, Tensor, Tensor]] = []  # step, loss, norm
        # two tensors of the device: 0 or, from the first bad step on, NaN; and found_inf
        self._sticky: Any = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._unread = []
        self._sticky = None

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.check()

    def watch(self, optimizer: Any, loss: Tensor, norm: Tensor, step: int) -> None:
        """Skip the coming update, or raise now or in `check`, if a value is not finite.

        Args:
            optimizer: Optimizer that is about to step.
            loss: Mean loss, a scalar.
            norm: Norm of all gradients, a scalar on the same device.
            step: Number of the step, 1 for the first.

        Raises:
            UserError: a value is not finite, and could be read at once.
        """
        self._unread.append((step, loss, norm))
        skips = can_skip(optimizer, norm)
        if not skips or len(self._unread) > MOST_UNREAD:
            self.check()
        if skips:
            self._sticky = self._sticky or norm.float().new_zeros(2).unbind()
            zero, found = self._sticky
            zero.add_(loss + norm, alpha=0.0)
            optimizer.found_inf = torch.ne(zero, zero, out=found)  # AdamW reads it

    def check(self) -> None:
        """Synchronize and raise if there was a bad step.

        Raises:
            UserError: names the first bad step; no update has been made since.
        """
        if not self._unread:
            return
        steps, losses, norms = zip(*self._unread, strict=True)
        self._unread = []
        values = torch.stack([*losses, *norms]).view(2, -1).tolist()  # one wait for the device
        for step, loss, norm in zip(steps, *values, strict=True):
            if math.isfinite(loss + norm):
                continue
            self._sticky = None
            where = f"at step {step}: weights were not changed:"
            if math.isfinite(norm):
                raise UserError(
                    f"the loss is {loss} {where} give each batch a label other than -100"
                )
            raise UserError(
                f"gradient norm is {norm} {where} lower model.learning_rate and continue with "
                "--resume auto"
            )


@torch.no_grad()
def all_finite(weights: Iterable[Tensor], states: Iterable[Mapping[Any, Any]] = ()) -> bool:
    """Return whether all numbers in weights and in the states of optimizers are finite."""
    values = (value for state in states for held in state.values() for value in held.values())
    tensors = (v.detach() for v in (*weights, *values) if isinstance(v, Tensor))
    numbers = [local(tensor) for tensor in tensors if tensor.is_floating_point()]
    if bool(nn.utils.get_total_norm(numbers).isfinite()):  # one wait for the device
        return True
    return all(bool(tensor.isfinite().all()) for tensor in numbers)  # a norm may overflow
