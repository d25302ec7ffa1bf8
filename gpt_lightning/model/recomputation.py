"""Checkpointing of activations: a block keeps its input, or its products, and recomputes the rest.

Products and attention take nearly all of a block's time, and their results some two fifths of its
memory. Layer norms, activations, casts and dropout are computed again from them (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models").
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts_by

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
