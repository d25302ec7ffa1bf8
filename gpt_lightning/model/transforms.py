"""Transforms of a model: layers get another class, and keep their names, parameters and values."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Transform = Callable[[str, nn.Module], type[nn.Module] | None]


def transform(model: nn.Module, *transforms: Transform) -> None:
    """Give layers of a model other classes, in place.

    Args:
        model: The model.
        transforms: Functions from a layer's name and the layer to its new class, a subclass of its
            own; None leaves it. A later function sees what an earlier one has changed.
    """
    for choose in transforms:
        for name, layer in model.named_modules():
            if kind := choose(name, layer):
                assert issubclass(kind, type(layer)), f"{name} would lose methods of its class"
                layer.__class__ = kind


def by_class(kinds: dict[type[nn.Module], type[nn.Module]]) -> Transform:
    """Return the transform of all layers of exactly these classes."""
    return lambda name, layer: kinds.get(type(layer))


def by_name(names: set[str], kind: type[nn.Module]) -> Transform:
    """Return the transform of the layers with these names."""
    return lambda name, layer: kind if name in names else None


# ---- residual stream in bfloat16 -----------------------------------------------------------------
#
# Under autocast the products are in bfloat16 and the stream between them in float32. On a GPU the
# layers between the products take as long as their bytes, which this transform halves. It rounds
# the sum of the embeddings, and every later sum with it; the statistics of the layer norms stay in
# float32, inside PyTorch's kernels.


def install_residual(transformer: nn.Module) -> None:
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
