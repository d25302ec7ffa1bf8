"""Checkpointing of activations: a block keeps its input, or its products, and recomputes the rest.

Products and attention take nearly all of a block's time, and their results some two fifths of its
memory. Layer norms, activations, casts and dropout are computed again from them (Korthikanti et
al. 2022, "Reducing Activation Recomputation in Large Transformer Models").
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

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
    if not keep_results:
        y: Tensor = checkpoint(block, x, use_reentrant=False)
    elif dropout:
        y = checkpoint(block, x, use_reentrant=False, context_fn=keep_products)
    else:
        y = checkpoint(block, x, use_reentrant=False, context_fn=keep_products_and_attention)
    return y


def keep_products() -> tuple[Any, Any]:
    """Return the contexts of `torch.utils.checkpoint.checkpoint` for a block with dropout.

    Fused attention draws random numbers there: without it the masks after it would be other ones.
    """
    return create_selective_checkpoint_contexts(list(PRODUCTS))


def keep_products_and_attention() -> tuple[Any, Any]:
    """Return the contexts for a block without dropout."""
    return create_selective_checkpoint_contexts(is_kept)


def is_kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return the policy for an operation of a block without dropout."""
    if op in PRODUCTS or "scaled_dot_product" in str(op):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
