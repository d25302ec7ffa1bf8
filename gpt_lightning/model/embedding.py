"""An embedding whose gradient has the same bits each time, in compiled code for a CPU too.

Inductor's threads add the gradients of equal tokens atomically, in whichever order they come: two
runs of one seed part after a few steps, and a run cannot be resumed bit for bit. It is also slow
where few rows are hit by all (42 ms of nanoGPT's baby GPT's step). PyTorch's own kernel does
neither, so compiled code calls that.
"""

from typing import Any

import torch
import torch.nn as nn


class Embedding(nn.Embedding):
    """Rows of a matrix by index: int64 (...) to (..., C)."""

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling() and self.weight.device.type == "cpu":
            return Lookup.apply(idx, self.weight)  # type: ignore[no-any-return, no-untyped-call]
        return super().forward(idx)


@torch.library.custom_op("gpt_lightning::embedding_gradient", mutates_args=())
def embedding_gradient(gradient: torch.Tensor, idx: torch.Tensor, rows: int) -> torch.Tensor:
    """The sum of the gradients (..., C) of each row, (rows, C)."""
    return torch.ops.aten.embedding_dense_backward(gradient, idx, rows, -1, False)  # type: ignore[no-any-return]


@embedding_gradient.register_fake
def _(gradient: torch.Tensor, idx: torch.Tensor, rows: int) -> torch.Tensor:
    return gradient.new_empty(rows, gradient.size(-1))


class Lookup(torch.autograd.Function):
    """`weight[idx]`, with a gradient that the compiler takes as it is."""

    @staticmethod
    def forward(ctx: Any, idx: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(idx)
        ctx.rows = weight.size(0)
        return torch.nn.functional.embedding(idx, weight)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        (idx,) = ctx.saved_tensors
        return None, embedding_gradient(gradient, idx, ctx.rows)
