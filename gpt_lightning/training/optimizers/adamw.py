"""AdamW for all parameters, and its update on a CPU in straight line."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _compile
from torch.optim import AdamW, Optimizer, adam
from torch.optim import optimizer as base

from gpt_lightning.model.gpt import GPT
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.optim import decay_groups, make_adamw

# SHA-256 (lean_step.files_digest) of the files with Adam, Optimizer, and what wraps their functions
DIGEST = "34ac1823"
FILES = frozenset(str(module.__file__) for module in (adam, base, _compile))
SWITCHES = "amsgrad", "maximize", "differentiable"  # of a group; off in the usual case


def build(model: GPT, settings: Settings, fused: bool) -> AdamW:
    """Return AdamW, with weight decay of the tensors that settings.decay names."""
    factors = settings.learning_rate_factors or {}
    groups = decay_groups(model.named_parameters(), settings.weight_decay, settings.decay, factors)
    return make_adamw(groups, settings.learning_rate, settings.betas, fused)


# ---- lean update ---------------------------------------------------------------------------------
#
# For each step PyTorch's AdamW runs some 100 functions around its kernel, for hooks, profilers,
# capture and tensors of several devices; a step of milliseconds finds none of them in the
# processor's caches. LeanAdamW gives the same tensors to the same kernel. Whatever differs is left
# to PyTorch: another optimizer or version of it, hooks, a profiler, a parameter without a gradient,
# the first step.


class LeanAdamW:
    """Updates of one optimizer.

    Args:
        optimizer: Any optimizer.
        usual: PyTorch's files are the known ones, and the parameters are on a CPU.
    """

    def __init__(self, optimizer: Any, usual: bool) -> None:
        self.optimizer = optimizer
        self.usual = usual and type(optimizer) is AdamW and is_pytorchs(AdamW.step, AdamW.zero_grad)
        self.fields = vars(optimizer) if self.usual else {}

    def applies(self) -> bool:
        """Return whether nobody watches or changes the coming call."""
        optimizer, fields = self.optimizer, self.fields
        return (
            self.usual
            and not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]
            and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
            and not (base._global_optimizer_pre_hooks or base._global_optimizer_post_hooks)
            and not ("step" in fields or "zero_grad" in fields)  # of a scheduler or another author
        )

    def step(self, closure: Callable[[], Any]) -> None:
        """Do what `optimizer.step(closure)` does."""
        optimizer = self.optimizer
        if not self.applies():
            optimizer.step(closure=closure)
            return
        with torch.enable_grad():
            closure()
        updates = [(group, tensors_of(optimizer, group)) for group in optimizer.param_groups]
        if any(tensors is None for _, tensors in updates):
            step: Any = AdamW.step
            step.__wrapped__(optimizer)  # without hooks: there were none when the step began
            return
        with torch.no_grad():
            for group, tensors in updates:
                update(group, *tensors)  # type: ignore[misc]  # not None

    def zero_grad(self) -> None:
        """Do what `optimizer.zero_grad()` does."""
        if not self.applies():
            self.optimizer.zero_grad()
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


def is_pytorchs(*functions: Any) -> bool:
    """Return whether functions, and all that wraps them, are of the known files."""
    for function in functions:
        while function is not None:
            if function.__code__.co_filename not in FILES:
                return False
            function = getattr(function, "__wrapped__", None)
    return True


def tensors_of(optimizer: Optimizer, group: dict[str, Any]) -> list[list[Tensor]] | None:
    """Return the tensors of a group: parameters, gradients, averages, squares and step counters.

    None if PyTorch would not update all of them with its fused kernel, or makes their state first.
    """
    parameters = group["params"]
    gradients = [parameter.grad for parameter in parameters]
    states: list[Any] = [optimizer.state.get(parameter) for parameter in parameters]
    usual = group["fused"] and group["decoupled_weight_decay"]
    usual = usual and not vars(optimizer).keys() & {"grad_scale", "found_inf"}
    usual = usual and not any(map(group.get, SWITCHES)) and type(group["lr"]) is float
    missing = any(gradient is None or gradient.is_sparse for gradient in gradients)
    if not (usual and parameters and all(states)) or missing:
        return None
    held = [[state[key] for state in states] for key in ("exp_avg", "exp_avg_sq", "step")]
    return [parameters, gradients, *held]


def update(
    group: dict[str, Any],
    parameters: list[Tensor],
    gradients: list[Tensor],
    averages: list[Tensor],
    squares: list[Tensor],
    steps: list[Tensor],
) -> None:
    """Update the parameters of a group in place."""
    torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    torch._fused_adamw_(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
