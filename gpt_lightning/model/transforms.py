"""Transforms of a model: layers of another class with their names, parameters and values.

And blocks that keep less for the backward pass.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts_by


def transform(model: nn.Module, kinds: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Give layers of a model other classes, in place.

    Args:
        model: The model.
        kinds: New class, a subclass, for the layers of exactly a class.
    """
    for name, layer in model.named_modules():
        if kind := kinds.get(type(layer)):
            assert issubclass(kind, type(layer)), f"{name} would lose methods of its class"
            layer.__class__ = kind


# ---- residual stream in bfloat16 -----------------------------------------------------------------
#
# Under autocast the products are in bfloat16 and the stream between them in float32. On a GPU the
# layers between the products take as long as their bytes, which this transform halves. It rounds
# the sum of the embeddings, and every later sum with it; the statistics of the layer norms stay in
# float32, inside PyTorch's kernels.


def install_residual(transformer: nn.Module) -> None:
    """Replace the layers of a Transformer that are on the residual stream, in place."""
    transform(transformer, {nn.LayerNorm: ResidualLayerNorm})
    transformer.cast = ResidualCast()


class ResidualCast(nn.Module):
    """Cast of the stream to bfloat16 under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16() if torch.is_autocast_enabled(x.device.type) else x


class ResidualLayerNorm(nn.LayerNorm):
    """Layer norm whose output has the dtype of its input, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), bias, self.eps)


# ---- checkpointing of activations ----------------------------------------------------------------
#
# A block keeps its input, or its products, and recomputes the rest. Products and attention take
# nearly all of a block's time, and their results some two fifths of its memory. Layer norms,
# activations, casts and dropout are computed again from them (Korthikanti et al. 2022, "Reducing
# Activation Recomputation in Large Transformer Models").

aten = torch.ops.aten
PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}


def recomputed(block: nn.Module, x: Tensor, keep_results: bool, dropout: bool) -> Tensor:
    """Return `block(x)`, whose backward pass computes again what is not kept.

    Args:
        block: Block of the model. The state of the random numbers is restored for it.
        x: Its input, which is kept.
        keep_results: True keeps the results of products and, without dropout, of fused attention.
        dropout: True if the block has dropout.
    """
    contexts = partial(contexts_by, partial(policy, dropout))
    how: dict[str, Any] = {"context_fn": contexts} if keep_results else {}
    y: Tensor = checkpoint(block, x, use_reentrant=False, **how)
    return y


def policy(dropout: bool, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the result of an operation is kept.

    Fused attention with dropout draws random numbers: without it the masks after it would be other
    ones.
    """
    attention = not dropout and "scaled_dot_product" in str(op)
    keep = op in PRODUCTS or attention
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
