"""The head and its cross-entropy in chunks of positions, so that the logits are never held whole.

The plain version is two lines at the end of `GPT.forward`: logits (B, T, V), then F.cross_entropy.
For B = 64, T = 1,024 and V = 50,304 it holds 6.1 GiB of logits in bfloat16, 12.3 GiB in float32 and
as much again in the backward. Here a chunk's logits live until its gradients are known, which is
in the forward already: the loss is a sum over positions, so the gradients of a chunk need nothing
of the others, and what arrives in the backward is one number to scale them by. Nothing is computed
twice: the work is that of the plain version, in the same order.
"""

from typing import Any

import torch
import torch.nn.functional as F

IGNORE_INDEX = -100  # target of a position that does not count, as F.cross_entropy's


def chunked_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, chunk_tokens: int
) -> torch.Tensor:
    """Mean cross-entropy of the targets under softmax(x @ weight.T).

    Equal to `F.cross_entropy(F.linear(x, weight).float().view(-1, V), targets.view(-1))` but for
    rounding. Products run in autocast's dtype where it is on, the softmax in float32, and the
    chunks' gradients of the weight are added in float32. Not differentiable twice.

    Args:
        x: final activations, (B, T, C).
        weight: of the head, (V, C).
        targets: int64 (B, T); -100 where there is none.
        chunk_tokens: positions a chunk; the last chunk may be shorter.

    Returns:
        Nats a target, a float32 scalar; nan if there is no target at all.
    """
    x, targets = x.reshape(-1, x.size(-1)), targets.reshape(-1)  # (N, C), (N)
    dtype = product_dtype(weight)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        total = LossSum.apply(x, weight, targets, chunk_tokens, dtype)  # type: ignore[no-untyped-call]
    else:
        w = weight.to(dtype)
        total = torch.zeros((), device=x.device)
        for rows in chunks(len(x), chunk_tokens):
            log_probs = log_probabilities(x[rows], w)
            total = total + summed_loss(log_probs, targets[rows])
            del log_probs  # before the next chunk has its own
    return total / (targets != IGNORE_INDEX).sum()  # type: ignore[no-any-return]


def pad_columns(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with columns of zeros up to 16 of them, for the reason in `project_to_vocabulary`.

    Args:
        x: (B, T, C).
        weight: (V, C).
    """
    missing = max(0, 16 - x.size(-1))
    return (F.pad(x, (0, missing)), F.pad(weight, (0, missing))) if missing else (x, weight)


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """What F.linear would compute in: autocast's dtype, or the weight's."""
    kind = weight.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind)


def chunks(n: int, chunk_tokens: int) -> list[slice]:
    """0 .. n - 1 in runs of `chunk_tokens`."""
    return [slice(begin, begin + chunk_tokens) for begin in range(0, n, chunk_tokens)]


def log_probabilities(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Of a chunk's n positions: x (n, C), weight (V, C) in the products' dtype; float32 (n, V)."""
    logits = F.linear(x.to(weight.dtype), weight)
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def summed_loss(log_probs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Nats of all targets of a chunk, a scalar."""
    return F.nll_loss(log_probs, targets, ignore_index=IGNORE_INDEX, reduction="sum")


class LossSum(torch.autograd.Function):
    """The sum of all positions' losses, with the gradients found on the way."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        chunk_tokens: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Sums x's (N, C) losses and saves the gradients of the sum."""
        w = weight.to(dtype)
        total = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x)  # (N, C)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)  # (V, C)
        for rows in chunks(len(x), chunk_tokens):
            total += chunk_gradients(x[rows], w, targets[rows], grad_x[rows], grad_weight)
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(
        ctx: Any, grad_total: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        """Scales the gradients."""
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_total, grad_weight * grad_total, None, None, None


def chunk_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    grad_x: torch.Tensor,
    grad_weight: torch.Tensor,
) -> torch.Tensor:
    """The loss of a chunk of n positions; what (n, V) it holds is gone when it returns.

    Args:
        x: (n, C).
        weight: (V, C), in the products' dtype.
        targets: (n).
        grad_x: (n, C), is written.
        grad_weight: (V, C), float32, is added to.
    """
    valid = (targets != IGNORE_INDEX).unsqueeze(1)  # (n, 1)
    probs = log_probabilities(x, weight)  # (n, V), from here on in place
    loss = summed_loss(probs, targets)
    probs.exp_()
    # d loss / d logits = softmax - one-hot
    probs[torch.arange(len(x), device=x.device), targets.clamp(min=0)] -= 1
    grad_logits = probs.to(weight.dtype)
    del probs
    # rows without a target are zeroed where they are C wide, not V
    grad_x.copy_((grad_logits @ weight) * valid)
    grad_weight += grad_logits.t() @ (x.to(weight.dtype) * valid)
    return loss
