"""Muon for the blocks' matrices and AdamW for the other parameters.

Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/. A GPT-2 has four shapes of
matrices. Launching torch.optim.Muon's 30 kernels for each of GPT-2 124M's 48 matrices takes longer
than running them. Here each shape is one batch, and the device can skip a step without a wait. The
arithmetic is torch.optim.Muon's, in its order: on a CPU that multiplies bfloat16 the weights have
equal bytes. Other CPUs emulate bfloat16 in 10 to 20 times the time, and iterate in float32.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Muon, Optimizer

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.precision import cpu_bf16_units
from gpt_lightning.model.gpt import GPT
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.optim import local, make_adamw


def check(settings: Settings) -> None:
    """Raise a UserError for settings of AdamW that Muon does not have."""
    for key, default in (("decay", "matrices"), ("learning_rate_factors", None)):
        if (value := getattr(settings, key)) != default:
            raise UserError(f"model.{key} is {value}, which muon does not support: leave it out")


class MuonAdamW(Optimizer):
    """Muon for the blocks' matrices and AdamW for everything else, as one optimizer.

    Lightning supports accumulation and clipping with one optimizer only. State and parameter groups
    live here and are shared with the two, so state_dict and load_state_dict are PyTorch's own. A
    matrix moves by muon_learning_rate * sqrt(max(1, rows / columns)) along an orthogonal direction.

    Args:
        model: Model; tensors of two dimensions in `transformer.h.*` go to Muon.
        settings: Learning rates, betas, momentum and weight decay.
        fused: True if AdamW runs in one kernel.

    Attributes:
        takes_found_inf: True if `found_inf`, a scalar on the device, skips the next update.
    """

    found_inf: Tensor | None = None

    def __init__(self, model: GPT, settings: Settings, fused: bool):
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        matrices = [p for n, p in named if n.startswith("transformer.h.") and p.dim() == 2]
        taken = {id(p) for p in matrices}
        rest = [(n, p) for n, p in named if id(p) not in taken]
        if not rest:  # model.freeze, or LoRA
            raise UserError(
                "model.optimizer muon has no parameter for its AdamW, since all but matrices of "
                "the blocks are frozen: set it to adamw"
            )
        self.muon = Muon(
            [{"params": matrices}],  # there may be none
            lr=settings.muon_learning_rate,
            weight_decay=settings.weight_decay,
            momentum=settings.muon_momentum,
        )
        self.adamw = make_adamw(rest, settings, fused)
        self.takes_found_inf = fused
        super().__init__(self.muon.param_groups + self.adamw.param_groups, defaults={})
        self._share()

    def _share(self) -> None:
        n = len(self.muon.param_groups)
        self.muon.param_groups = self.param_groups[:n]
        self.adamw.param_groups = self.param_groups[n:]
        self.muon.state = self.adamw.state = self.state

    def load_state_dict(self, state_dict: Fields) -> None:
        super().load_state_dict(state_dict)
        self._share()  # PyTorch replaced the lists and the state

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        skip = None if self.found_inf is None else self.found_inf > 0
        self.adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
        stacked_step(self.muon, skip)
        self.adamw.step()
        return loss


build = MuonAdamW


def stacked_step(muon: Muon, skip: Tensor | None) -> None:
    """Do the step of an optimizer, on its parameters and in its state.

    Args:
        muon: The optimizer.
        skip: Scalar bool on the device; True leaves weights and momenta as they are. None: False.
    """
    for group in muon.param_groups:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                shapes.setdefault(weight.shape, []).append(weight)
        for weights in shapes.values():
            for weight in weights:
                if weight not in muon.state:
                    muon.state[weight] = {"momentum_buffer": torch.zeros_like(weight)}
            momenta = [muon.state[weight]["momentum_buffer"] for weight in weights]
            update_equal(weights, momenta, group, skip)


def update_equal(
    weights: list[Tensor], momenta: list[Tensor], group: Fields, skip: Tensor | None
) -> None:
    """Update n weights of one shape, (rows, columns) each, and their momenta; or rows of them."""
    rows, columns = weights[0].shape
    beta, lr = group["momentum"], group["lr"]
    gradient = torch.stack([local(cast(Tensor, weight.grad)) for weight in weights])
    momenta = [local(momentum) for momentum in momenta]
    old = torch.stack(momenta)  # (n, rows, columns), as gradient
    new = old.lerp(gradient, 1 - beta)
    whole = exchanged(gradient.lerp(new, beta), weights, 1)
    whole = orthogonalize(whole, group["ns_coefficients"], group["ns_steps"])
    update = exchanged(whole, weights, 0)
    decay = torch.full((), 1 - lr * group["weight_decay"], device=new.device)
    if skip is not None:
        new = torch.where(skip, old, new)
        update = update.masked_fill(skip, 0.0)
        decay = decay.masked_fill(skip, 1.0)
    for weight, momentum, moved, average in zip(weights, momenta, update, new, strict=True):
        momentum.copy_(average)
        local(weight).mul_(decay).add_(moved, alpha=-lr * math.sqrt(max(1, rows / columns)))


def exchanged(x: Tensor, weights: list[Tensor], source: int) -> Tensor:
    """Exchange shards of n stacked matrices, (n, rows, columns), among the ranks of fsdp2.

    Each rank then orthogonalizes its share of the whole matrices.

    Args:
        x: This rank's shard, of dimension `source`.
        weights: The n weights; without shards, x is returned.
        source: Dimension that is in shards: 0 for whole matrices, 1 for rows of each. Afterwards it
            is the other one.
    """
    like: Any = weights[0]
    if local(like) is like:
        return x
    from torch.distributed.tensor import DTensor, Shard

    rows, columns = like.shape
    shape = torch.Size((len(weights), rows, columns))
    stride = (rows * columns, columns, 1)
    shards = DTensor.from_local(
        x.contiguous(), like.device_mesh, [Shard(source)], shape=shape, stride=stride
    )
    return shards.redistribute(placements=[Shard(1 - source)]).to_local()


@functools.cache
def iteration_dtype(device_type: str) -> torch.dtype:
    """Return bfloat16, or float32 for a CPU that does not multiply bfloat16."""
    emulated = device_type == "cpu" and not cpu_bf16_units()
    return torch.float32 if emulated else torch.bfloat16


def orthogonalize(x: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """Return matrices with the singular vectors of x and singular values near 1.

    Args:
        x: n matrices, (n, rows, columns).
        coefficients: a, b and c of the polynomial a X + b (X X^T) X + c (X X^T)^2 X.
        steps: Newton-Schulz iterations, in `iteration_dtype`.

    Returns:
        (n, rows, columns), in the dtype of x.
    """
    a, b, c = coefficients
    tall = x.size(1) > x.size(2)
    y = (x.mT if tall else x).to(iteration_dtype(x.device.type))
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(steps):
        gram = y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return (y.mT if tall else y).to(x.dtype)
