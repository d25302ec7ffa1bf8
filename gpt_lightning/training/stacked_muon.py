"""Muon's step with one batch for all matrices of a shape, for GPUs, shards and float32.

A GPT-2 has four shapes of matrices. torch.optim.Muon launches some 30 kernels for each of the 48
matrices of GPT-2 124M, which takes longer than the kernels do. Here each shape is one batch, and
the device can skip a step without a wait. Weights equal torch.optim.Muon's up to the order of
bfloat16's sums. Under fsdp2 the ranks exchange their rows for whole matrices, and each rank
orthogonalizes its share of the matrices.
"""

import math
from typing import Any, cast

import torch
from torch import Tensor
from torch.optim import Muon


def stacked_step(muon: Muon, skip: Tensor | None, dtype: torch.dtype = torch.bfloat16) -> None:
    """Do the step of an optimizer, on its parameters and in its state.

    Args:
        muon: The optimizer.
        skip: Scalar bool on the device; True leaves weights and momenta as they are. None: False.
        dtype: dtype of the Newton-Schulz iterations.
    """
    for group in muon.param_groups:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for weight in group["params"]:
            if weight.grad is not None:
                shapes.setdefault(weight.shape, []).append(weight)
        for weights in shapes.values():
            momenta = [momentum_of(muon, weight) for weight in weights]
            update_equal(weights, momenta, group, skip, dtype)


def momentum_of(muon: Muon, weight: Tensor) -> Tensor:
    """Return the momentum of a weight; zeros at the first step."""
    state = muon.state[weight]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(weight)
    momentum: Tensor = state["momentum_buffer"]
    return momentum


def update_equal(
    weights: list[Tensor],
    momenta: list[Tensor],
    group: dict[str, Any],
    skip: Tensor | None,
    dtype: torch.dtype,
) -> None:
    """Update n weights of one shape, (rows, columns) each, and their momenta; or rows of them."""
    rows, columns = weights[0].shape
    beta, lr = group["momentum"], group["lr"]
    gradient = torch.stack([local(cast(Tensor, weight.grad)) for weight in weights])
    momenta = [local(momentum) for momentum in momenta]
    old = torch.stack(momenta)  # (n, rows, columns), as gradient
    new = old.lerp(gradient, 1 - beta)
    whole = exchanged(gradient.lerp(new, beta), weights, 1, 0)
    update = orthogonalize(whole, group["ns_coefficients"], group["ns_steps"], dtype)
    update = exchanged(update, weights, 0, 1)
    weights = [local(weight) for weight in weights]
    update = update * (-lr * math.sqrt(max(1, rows / columns)))
    decay = torch.full((), 1 - lr * group["weight_decay"], device=new.device)
    if skip is not None:
        new = torch.where(skip, old, new)
        update = update.masked_fill(skip, 0.0)
        decay = decay.masked_fill(skip, 1.0)
    torch._foreach_copy_(momenta, list(new.unbind()))
    torch._foreach_mul_(weights, decay)
    torch._foreach_add_(weights, list(update.unbind()))


def local(tensor: Tensor) -> Tensor:
    """Return this rank's rows of a shard, without a copy; other tensors as they are."""
    rows: Tensor = getattr(tensor, "_local_tensor", tensor)
    return rows


def exchanged(x: Tensor, weights: list[Tensor], source: int, target: int) -> Tensor:
    """Exchange shards of n stacked matrices, (n, rows, columns), among the ranks.

    Args:
        x: This rank's shard, of dimension `source`.
        weights: The n weights; without shards, x is returned.
        source: Dimension that is in shards: 0 for whole matrices, 1 for rows of each.
        target: Dimension that is in shards afterwards.
    """
    like: Any = weights[0]
    if local(like) is like:
        return x
    from torch.distributed.tensor import DTensor, Shard

    rows, columns = like.shape
    shape, stride = torch.Size((len(weights), rows, columns)), (rows * columns, columns, 1)
    shards = DTensor.from_local(
        x.contiguous(), like.device_mesh, [Shard(source)], shape=shape, stride=stride
    )
    exchanged: Tensor = shards.redistribute(placements=[Shard(target)]).to_local()
    return exchanged


def orthogonalize(
    x: Tensor,
    coefficients: tuple[float, float, float],
    steps: int,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Return matrices with the singular vectors of x and singular values near 1.

    Args:
        x: n matrices, (n, rows, columns).
        coefficients: a, b and c of the polynomial a X + b (X X^T) X + c (X X^T)^2 X.
        steps: Newton-Schulz iterations.
        dtype: dtype of the iterations.

    Returns:
        (n, rows, columns), in the dtype of x.
    """
    a, b, c = coefficients
    tall = x.size(1) > x.size(2)
    y = (x.mT if tall else x).to(dtype)
    y = y / y.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # no singular value is above 1
    for _ in range(steps):
        gram = y @ y.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        y = torch.baddbmm(y, polynomial, y, beta=a)
    return (y.mT if tall else y).to(x.dtype)
