"""Output head and cross-entropy, in chunks of positions so that the logits are never held whole.

The plain version is the last lines of `GPT.forward`: logits (B, T, V), then F.cross_entropy. For
B = 64, T = 1,024 and V = 50,304 it holds 6.1 GiB of logits in bfloat16, 12.3 GiB in float32 and as
much again in the backward. The loss is a sum over positions, so the forward can compute each
chunk's gradients at once and free its logits; the backward only scales the gradients by one number.
Nothing is computed twice: the work is that of the plain version, in the same order.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORE_INDEX = -100  # target of a position that does not count; the default of F.cross_entropy
MIN_COLUMNS = 16


class NarrowHead(nn.Linear):
    """Output head without bias for a model that is fewer than 16 channels wide.

    The gradient of its input sums V = 50,257 terms. For matrices of fewer than 16 columns some BLAS
    (MKL on AMD) add them in one running float32 sum, at a relative error of 3.6e-6; from 16 columns
    on they sum blocks, at 3.8e-7. The lecture's model is 6 wide and trained at a learning rate of
    0.09: unpadded, its losses drift by 3.5e-4 from the published ones in 50 steps, padded by
    2.3e-5. Columns of zeros change nothing else.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(*pad_columns(x, self.weight))


def pad_columns(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return both with columns of zeros up to 16, for the reason in `NarrowHead`.

    Args:
        x: Activations, (..., C).
        weight: Matrix of the head, (V, C).
    """
    missing = max(0, MIN_COLUMNS - x.size(-1))
    if not missing:
        return x, weight
    return F.pad(x, (0, missing)), F.pad(weight, (0, missing))


def chunked_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Return the mean cross-entropy of the targets under softmax(x @ weight.T).

    Equal to `F.cross_entropy(F.linear(x, weight).float().view(-1, V), targets.view(-1))` but for
    rounding. Products run in autocast's dtype where it is on, the softmax in float32, and the
    chunks' gradients of the weight are added in float32; all in float64 for float64 weights. Not
    differentiable twice.

    Args:
        x: Final activations, (B, T, C).
        weight: Matrix of the head, (V, C).
        targets: int64 (B, T); -100 where there is none.
        chunk_tokens: Positions per chunk; the last chunk may be shorter.

    Returns:
        Nats per target, a float32 scalar; nan if there is no target at all.
    """
    x, weight = pad_columns(x, weight)
    x, targets = x.reshape(-1, x.size(-1)), targets.reshape(-1)  # (N, C), (N,)
    trains = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total = LossSum.apply(x, weight, targets, chunk_tokens, trains)  # type: ignore[no-untyped-call]
    return total / (targets != IGNORE_INDEX).sum()


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats of targets, int64 (B, T), under logits (B, T, V)."""
    # The sum needs float32: a bfloat16 sum of exponentials over V has two digits.
    logits = logits.to(sum_dtype(logits.dtype))
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


def autocast_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which F.linear would compute: autocast's, or the weight's."""
    kind = weight.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return weight.dtype
    return torch.get_autocast_dtype(kind)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over many terms: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def chunks(n: int, chunk_tokens: int) -> list[slice]:
    """Return 0 .. n - 1 in runs of `chunk_tokens`."""
    return [slice(begin, begin + chunk_tokens) for begin in range(0, n, chunk_tokens)]


def log_probabilities(x: Tensor, weight: Tensor) -> Tensor:
    """Return (n, V) in float32 or more, for x (n, C) and a weight (V, C) in the products' dtype."""
    logits = F.linear(x.to(weight.dtype), weight)  # (n, V)
    return torch.log_softmax(logits, dim=-1, dtype=sum_dtype(logits.dtype))


class LossSum(torch.autograd.Function):
    """Sum of the losses of all positions; its forward computes the gradients of a training, too."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int, trains: bool
    ) -> Tensor:
        """Return the sum for x (N, C), weight (V, C) and targets (N,); save its gradients."""
        w = weight.to(autocast_dtype(weight))
        total = torch.zeros((), device=x.device, dtype=sum_dtype(w.dtype))
        like_x, like_weight = (x, weight) if trains else (x[:0], weight[:0])
        grad_x = torch.empty_like(like_x)  # (N, C)
        grad_weight = torch.zeros_like(like_weight, dtype=sum_dtype(weight.dtype))  # (V, C)
        for rows in chunks(len(x), chunk_tokens):
            total += chunk_loss(x[rows], w, targets[rows], grad_x[rows], grad_weight)
        ctx.save_for_backward(grad_x, grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        """Return the saved gradients times grad_total, a scalar."""
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_total, grad_weight * grad_total, None, None, None


def chunk_loss(
    x: Tensor, weight: Tensor, targets: Tensor, grad_x: Tensor, grad_weight: Tensor
) -> Tensor:
    """Return the summed loss of a chunk of n positions; every (n, V) matrix is freed on return.

    Args:
        x: Activations, (n, C).
        weight: Matrix of the head, (V, C), in the dtype of the products.
        targets: int64 (n,).
        grad_x: Gradient of x, (n, C); is overwritten. Empty in an evaluation: no gradients.
        grad_weight: Gradient of the weight, (V, C), float32; is added to.
    """
    probs = log_probabilities(x, weight)  # (n, V), from here on in place
    loss = F.nll_loss(probs, targets, ignore_index=IGNORE_INDEX, reduction="sum")
    if not len(grad_x):
        return loss
    probs.exp_()
    # d loss / d logits = softmax - one-hot
    probs[torch.arange(len(x), device=x.device), targets.clamp(min=0)] -= 1
    grad_logits = probs.to(weight.dtype)  # (n, V)
    del probs
    valid = (targets != IGNORE_INDEX).unsqueeze(1)  # (n, 1)
    # Rows without a target are zeroed where they are C wide, not V.
    grad_x.copy_((grad_logits @ weight) * valid)  # (n, C)
    grad_weight += grad_logits.t() @ (x.to(weight.dtype) * valid)  # (V, C)
    return loss
