"""An update, in torch alone: learning rate, seeds, parameter groups, clipping, two guards."""

import itertools
import math
from collections import deque
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import AdamW, Optimizer

from gpt_lightning.data.order import splitmix64
from gpt_lightning.errors import UserError

FUSED_ADAMW_DEVICES = {"cpu", "cuda", "mps", "xpu"}  # torch.optim.AdamW, argument `fused`
# Devices on which reading a scalar synchronizes; the norm is checked later there.
DEFERRED_ON = {"cuda", "mps"}
UNSKIPPED_ON = {"mps"}  # subset without `found_inf` support in the optimizer
MASK, GOLDEN = 2**64 - 1, np.uint64(0x9E3779B97F4A7C15)  # SplitMix64's increment


def learning_rate(
    step: int,
    *,
    peak: float,
    minimum: float,
    warmup_steps: int,
    decay_steps: int,
    schedule: Literal["cosine", "linear", "constant"],
    decay_start: int = 0,
) -> float:
    """Return the learning rate of optimizer step `step` (0 is the first).

    Warm-up is linear and reaches `peak` one step after its last step. Then, or from `decay_start`
    on, half a cosine, or a line, falls to `minimum` at `decay_steps` and stays there, or the rate
    is constant. Source: nanoGPT, train.py, get_lr.
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    start = max(warmup_steps, decay_start)
    if schedule == "constant" or warmup_steps <= step < start:
        return peak
    if step >= decay_steps:
        return minimum
    progress = (step - start) / (decay_steps - start)  # 0 .. 1
    if schedule == "linear":
        return minimum + (1.0 - progress) * (peak - minimum)
    return minimum + 0.5 * (1.0 + math.cos(math.pi * progress)) * (peak - minimum)


def mix(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on every number and on their order.

    SplitMix64's finalizer over each number in turn.
    """
    state = np.zeros(1, np.uint64)
    for number in numbers:
        state = splitmix64((state ^ np.uint64(number & MASK)) + GOLDEN)
    return int(state[0]) >> 1


def decay_groups(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
    weight_decay: float,
    decay: Literal["matrices", "all"] = "matrices",
    factors: Mapping[str, float] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Return parameter groups with and without weight decay, for each factor of the learning rate.

    Args:
        named_parameters: Parameters to optimize; a tied matrix appears once.
        weight_decay: Weight decay of the first group.
        decay: matrices: only tensors of two or more dimensions decay (matrix products and
            embeddings), biases and layer norms do not. all: every tensor decays, as in PyTorch's
            optimizers without groups.
        factors: Pattern of names -> factor of the learning rate; the first that matches counts.
            Groups of other factors than 1 have the key `factor`.
    """
    groups: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if parameter.requires_grad:
            factor = next((f for pattern, f in factors.items() if fnmatchcase(name, pattern)), 1.0)
            decays = decay == "all" or parameter.dim() >= 2
            groups.setdefault((factor, not decays), []).append(parameter)
    return [
        {
            "params": groups[factor, not_decayed],
            "weight_decay": 0.0 if not_decayed else weight_decay,
        }
        | ({} if factor == 1.0 else {"factor": factor})
        for factor, not_decayed in sorted(groups)
    ]


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
    groups = [{**group, "peak_lr": lr * group.get("factor", 1.0)} for group in groups]
    # None, not False: PyTorch's default loops over chunks of tensors, False over single tensors
    return AdamW(groups, lr=lr, betas=betas, fused=True if fused else None)


def place_steps(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Put AdamW's step counters where its kernel reads them, after a resume with another `fused`.

    Fused kernels read them on the parameters' device, all others on the host.
    """
    for parameter in group["params"]:
        state = optimizer.state.get(parameter, {})
        if "step" in state:
            state["step"] = state["step"].to(parameter.device if group.get("fused") else "cpu")


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float | None
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`.

    Args:
        parameters: Parameters with gradients.
        max_norm: Largest norm; None, 0 or less leaves the gradients as they are.

    Returns:
        The norm before clipping, a scalar on the parameters' device (no synchronization).
    """
    parameters = list(parameters)
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if hasattr(norm, "full_tensor"):  # shards: take the norm over all ranks
        norm = norm.full_tensor()
    if max_norm is None or max_norm <= 0:
        return norm
    # PyTorch multiplies by min(1, max_norm / (norm + 1e-6)), also by 1
    if norm.device.type in DEFERRED_ON or not norm + 1e-6 <= max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of a shard, without a copy; other tensors as they are."""
    rows: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return rows


# ---- no update with non-finite gradients, and no waiting for the device to check ----------------


@torch.no_grad()
def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether every number is finite: a sum per tensor, and one wait per device."""
    sums: dict[torch.device, list[torch.Tensor]] = {}
    numbers = [local(tensor.detach()) for tensor in tensors if tensor.is_floating_point()]
    for tensor in numbers:
        sums.setdefault(tensor.device, []).append(tensor.sum().float())
    if all(bool(torch.stack(found).isfinite().all()) for found in sums.values()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in numbers)  # a sum may overflow


def is_finite(weights: Iterable[torch.Tensor], states: list[dict[Any, dict[str, Any]]]) -> bool:
    """Return whether all numbers in weights and in the states of optimizers are finite."""
    values = (value for state in states for held in state.values() for value in held.values())
    tensors = (value for value in values if isinstance(value, torch.Tensor))
    return all_finite(itertools.chain(weights, tensors))


class NonFiniteGuard:
    """Raise on non-finite gradients, before any checkpoint and with the weights unchanged.

    On a device of DEFERRED_ON the device itself decides: a fused AdamW skips its update if
    `found_inf` is 1 (PyTorch's GradScaler uses the same argument), from the first bad step on. The
    number of that step stays on the device until `check` reads it: at the next log step, before a
    checkpoint, or at the end. Before the update of any other optimizer the norm is read at once.
    On MPS, updates before `check` are not skipped.
    """

    def __init__(self) -> None:
        # tensors of the device: the first bad step, 0 for none, and its norm
        self._first: tuple[torch.Tensor, torch.Tensor] | None = None

    def watch(self, optimizer: Optimizer, norm: torch.Tensor, step: int) -> None:
        """Skip the coming update, or raise now or in `check`, if the norm is not finite.

        Args:
            optimizer: Optimizer that is about to step.
            norm: Norm of all gradients, a scalar on their device.
            step: Number of the step, 1 for the first.

        Raises:
            UserError: the norm is not finite, and could be read at once.
        """
        unwrapped: Any = getattr(optimizer, "optimizer", optimizer)  # Lightning wraps ours
        skips = can_skip(unwrapped, norm)
        if not skips and norm.device.type not in UNSKIPPED_ON:
            if not norm.isfinite():
                raise not_finite(norm, step)
            return
        if self._first is None:
            self._first = torch.zeros_like(norm, dtype=torch.int64), torch.zeros_like(norm)
        bad_step, bad_norm = self._first
        new = ~norm.isfinite() & (bad_step == 0)
        self._first = bad_step.masked_fill(new, step), torch.where(new, norm, bad_norm)
        if skips:
            unwrapped.found_inf = (self._first[0] > 0).float()  # AdamW reads it

    def check(self) -> None:
        """Synchronize and raise if there was a bad step.

        Raises:
            UserError: names the first bad step; no update has been made since, but on a device of
                UNSKIPPED_ON.
        """
        if self._first is None or not self._first[0]:
            return
        (step, norm), self._first = self._first, None  # raised once
        raise not_finite(norm, int(step))


def can_skip(optimizer: Optimizer, norm: torch.Tensor) -> bool:
    """Return whether the device can decide to skip an update."""
    if norm.device.type not in DEFERRED_ON - UNSKIPPED_ON:
        return False
    if isinstance(optimizer, AdamW):
        return all(group["fused"] for group in optimizer.param_groups)
    return getattr(optimizer, "takes_found_inf", False)


def not_finite(norm: torch.Tensor, step: int) -> UserError:
    """Return the error for a non-finite gradient norm."""
    kept = "changed since" if norm.device.type in UNSKIPPED_ON else "not changed"
    return UserError(
        f"gradient norm is {norm.item()} at step {step}: weights were {kept}; "
        "lower model.learning_rate, or resume from an earlier checkpoint with --resume auto"
    )


# ---- no update of a step that is an outlier -----------------------------------------------------


WINDOW = 128  # steps


class SpikeGuard:
    """Compare each step's loss and gradient norm with those of the last 128 steps.

    The idea is OLMo-core's SkipStepOptimizer. Skipped steps are part of the 128, so that a lasting
    change of the level is accepted after some steps.

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

    def state(self) -> dict[str, Any]:
        """Return the windows and the number of skipped steps for a checkpoint."""
        return {"skipped": self.skipped, **{name: [*old] for name, old in self._windows.items()}}
