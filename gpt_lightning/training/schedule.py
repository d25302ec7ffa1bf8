"""Learning rate of a step: warm-up and decay, as PyTorch's LambdaLR."""

import math

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from gpt_lightning.files import Fields
from gpt_lightning.runs.settings import Settings


def share_of_peak(step: int, settings: Settings, decay_steps: int) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first), as a share of its peak.

    Warm-up is linear and reaches 1 one step after its last step. Then, or from `decay_start` on,
    half a cosine, or a line, falls to the minimum at `decay_steps` and stays there, or the rate is
    constant. Source: nanoGPT, train.py, get_lr.

    Args:
        step: Optimizer step.
        settings: Schedule, its warm-up and start, and the minimum for `settings.learning_rate`.
        decay_steps: Step at which the decay ends.
    """
    assert settings.min_learning_rate is not None  # Settings fills in the default
    if step < settings.warmup_steps:
        return (step + 1) / (settings.warmup_steps + 1)
    start = max(settings.warmup_steps, settings.decay_start)
    if settings.schedule == "constant" or step < start:
        return 1.0
    minimum = settings.min_learning_rate / settings.learning_rate
    if step >= decay_steps:
        return minimum
    progress = (step - start) / (decay_steps - start)  # 0 .. 1
    falling = 1.0 - progress
    if settings.schedule == "cosine":
        falling = 0.5 * (1.0 + math.cos(math.pi * progress))
    return minimum + falling * (1.0 - minimum)


class Schedule(LambdaLR):
    """Learning rates of all parameter groups, each with its own peak, on one schedule.

    The peak of a group is the `lr` with which the optimizer was built. A checkpoint holds the
    number of the step alone: after a resume, peaks, weight decay and betas are those of the command
    line. Groups that a callback adds later keep their own rates.

    Args:
        optimizer: Optimizer whose rates are set.
        settings: Schedule, warm-up and minimum.
        decay_steps: Optimizer step at which the decay ends.
    """

    def __init__(self, optimizer: Optimizer, settings: Settings, decay_steps: int):
        self.decay_steps = decay_steps
        super().__init__(optimizer, lambda step: share_of_peak(step, settings, decay_steps))

    @property
    def share(self) -> float:
        """Share of the peaks in the coming step."""
        return self.lr_lambdas[0](self.last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Return the rate of each group in the coming step."""
        added = self.optimizer.param_groups[len(self.base_lrs) :]
        return [peak * self.share for peak in self.base_lrs] + [group["lr"] for group in added]

    def begin(self, groups: list[Fields], step: int) -> None:
        """Set the options of parameter groups, and the rates of the step with which a run begins.

        Args:
            groups: Groups of an optimizer that was built for this run.
            step: Optimizer steps done.
        """
        for group, new in zip(self.optimizer.param_groups, groups, strict=False):
            group.update(new | {"params": group["params"], "initial_lr": new["lr"]})
            place_steps(self.optimizer, group)
        self.base_lrs = [group["lr"] for group in groups]
        self.last_epoch = step
        for group, rate in zip(self.optimizer.param_groups, self.get_lr(), strict=True):
            group["lr"] = rate

    def state_dict(self) -> Fields:
        return {"last_epoch": self.last_epoch}

    def load_state_dict(self, state_dict: Fields) -> None:
        self.last_epoch = state_dict["last_epoch"]


def place_steps(optimizer: Optimizer, group: Fields) -> None:
    """Put AdamW's step counters where its kernel reads them, after a resume with another `fused`.

    Fused kernels read them on the parameters' device, all others on the host.
    """
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if "step" in state:
            state["step"] = state["step"].to(parameter.device if group.get("fused") else "cpu")
