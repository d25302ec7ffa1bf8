"""Learning rate, parameter groups and optimizers. Torch only."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch.optim import AdamW, Muon, Optimizer

from gpt_lightning.model.gpt import GPT

FUSED_ADAMW_DEVICES = {"cpu", "cuda", "mps", "xpu"}  # torch.optim.AdamW, argument `fused`

READ_AT_ONCE = {"cpu"}  # where a number that was just computed can be looked at without waiting

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
    """The learning rate of optimizer step `step` (0 is the first), a pure function of it.

    Warm-up is linear and reaches `peak` one step after its last; then half a cosine falls to
    `minimum` at `decay_steps`, where it stays, or the rate is constant. Source: nanoGPT, train.py,
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
    """A seed of 63 bits from whole numbers; other numbers, or another order, give another.

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
    """Parameter groups with and without weight decay.

    Args:
        named_parameters: what to optimize; a tied matrix appears once.
        weight_decay: of the first group.
        decay: matrices: only tensors of two or more dimensions decay (matrix products and
            embeddings), biases and layer norms do not. all: everything decays, as PyTorch's
            optimizers do when given no groups.
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
    """AdamW (Loshchilov and Hutter 2019) in one kernel per dtype and device where `fused`."""
    # None, not False: PyTorch's default loops over chunks of tensors, False over single ones
    return AdamW(groups, lr=lr, betas=betas, fused=True if fused else None)


class MuonAdamW(Optimizer):
    """Muon for the blocks' matrices and AdamW for everything else, as one optimizer.

    Lightning refuses accumulation and clipping with two optimizers; behind one they stay
    Lightning's. State and parameter groups live here and are shared with the two, so state_dict and
    load_state_dict are PyTorch's own.

    Args:
        model: the model; `transformer.h.*` tensors of two dimensions go to Muon.
        lr: AdamW's learning rate.
        muon_lr: Muon's; a matrix moves by muon_lr * sqrt(max(1, rows / columns)) along an
            orthogonal direction.
        momentum: Muon's (Nesterov).
        weight_decay: decoupled, of Muon's matrices and of AdamW's decaying group.
        betas: AdamW's.
        fused: AdamW in one kernel.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/, as torch.optim.Muon
    implements it.
    """

    def __init__(
        self,
        model: GPT,
        lr: float,
        muon_lr: float,
        momentum: float,
        weight_decay: float,
        betas: tuple[float, float],
        fused: bool,
    ) -> None:
        named = list(model.named_parameters())
        matrices = [p for n, p in named if n.startswith("transformer.h.") and p.dim() == 2]
        taken = {id(p) for p in matrices}
        rest = [(n, p) for n, p in named if id(p) not in taken]
        self.muon = Muon(matrices, lr=muon_lr, weight_decay=weight_decay, momentum=momentum)
        self.adamw = make_adamw(decay_groups(rest, weight_decay), lr, betas, fused)
        super().__init__(self.muon.param_groups + self.adamw.param_groups, defaults={})
        self._share()

    def _share(self) -> None:
        n = len(self.muon.param_groups)
        self.muon.param_groups = self.param_groups[:n]
        self.adamw.param_groups = self.param_groups[n:]
        self.muon.state = self.adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()  # PyTorch replaced the lists and the state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.muon.step()
        self.adamw.step()
        return loss


def clip_gradients(
    parameters: Iterable[torch.nn.Parameter], max_norm: float | None
) -> torch.Tensor:
    """Scales all gradients so that their global 2-norm is at most max_norm (None: leaves them).

    Returns:
        The norm before clipping, a scalar on the parameters' device (no synchronization).
    """
    parameters = [p for p in parameters if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if not max_norm:
        return norm
    # PyTorch multiplies by min(1, max_norm / (norm + 1e-6)), also by 1
    if norm.device.type not in READ_AT_ONCE or not norm + 1e-6 <= max_norm:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm
