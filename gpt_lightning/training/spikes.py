"""SpikeGuard: finds optimizer steps whose loss or gradient norm is an outlier, to skip them.

The idea is that of OLMo-core's SkipStepOptimizer.
"""

import math
import sys
from collections import deque
from typing import Any

import lightning as L
import torch

from gpt_lightning.training.steps import at_log_step

WINDOW = 128  # steps


class SpikeGuard:
    """Compare each step's loss and gradient norm with those of the last 128 steps.

    Skipped steps are part of the 128, so that a lasting change of the level is accepted after some
    steps.

    Args:
        sigmas: Standard deviations above the mean from which on a step is skipped.
        state: State of an earlier session of the run; empty for a new run.
    """

    def __init__(self, sigmas: float, state: dict[str, Any]) -> None:
        self.sigmas = sigmas
        self.skipped: int = state.get("skipped", 0)
        names = ("loss", "gradient norm")
        self._windows = {name: deque(state.get(name, ()), WINDOW) for name in names}

    def spike(self, loss: float, norm: float) -> str:
        """Return a description of the outlier; empty if neither value is an outlier.

        The first 64 steps are never outliers. The gradient scaler and NonFiniteGuard handle
        non-finite values.
        """
        values = {"loss": loss, "gradient norm": norm}
        if not all(map(math.isfinite, values.values())):
            return ""
        found = ""
        for name, value in values.items():
            window = self._windows[name]
            mean = sum(window) / max(1, len(window))
            sigma = math.sqrt(sum((old - mean) ** 2 for old in window) / max(1, len(window)))
            if len(window) >= WINDOW // 2 and value > mean + self.sigmas * sigma:
                found = found or (
                    f"{name} {value:.4g} is more than {self.sigmas:g} standard deviations "
                    f"({sigma:.2g}) above the mean {mean:.4g} of {len(window)} steps"
                )
            window.append(value)
        self.skipped += found != ""
        return found

    def skip(
        self, module: L.LightningModule, loss: torch.Tensor | None, norm: torch.Tensor
    ) -> None:
        """Drop the gradients of a step that is an outlier: no optimizer changes anything then.

        Args:
            module: Module whose gradients are dropped.
            loss: Mean loss of the step on this rank, a scalar.
            norm: Norm of all gradients, a scalar.
        """
        assert loss is not None, "the optimizer steps after a forward pass"
        trainer, step = module.trainer, module.trainer.global_step + 1
        means = trainer.strategy.reduce(torch.stack([loss, norm.to(loss)]), reduce_op="mean")
        spike = self.spike(*means.tolist())
        if spike:
            for parameter in module.parameters():
                parameter.grad = None
            if trainer.is_global_zero:
                print(f"step {step} skipped: {spike}", file=sys.stderr)
        if at_log_step(trainer, step):
            module.log("optim/skipped_steps", float(self.skipped))

    def state(self) -> dict[str, Any]:
        """Return the windows and the number of skipped steps for a checkpoint."""
        return {"skipped": self.skipped, **{name: [*old] for name, old in self._windows.items()}}
