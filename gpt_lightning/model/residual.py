"""Residual stream in bfloat16: half the bytes that layer norms and additions read and write.

Under autocast the products are in bfloat16 and the stream between them in float32. On a GPU the
layers between the products take as long as their bytes. `residual: bfloat16` rounds the sum of the
embeddings, and every later sum with it; the statistics of the layer norms stay in float32, inside
PyTorch's kernels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_lightning.model.transforms import by_class, transform


def install(transformer: nn.Module) -> None:
    """Replace the layers of a Transformer that are on the residual stream, in place."""
    transform(transformer, by_class({nn.LayerNorm: ResidualLayerNorm}))
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
