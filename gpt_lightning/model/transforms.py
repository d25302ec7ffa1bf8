"""Transforms of a model: layers get another class, and keep their names, parameters and values."""

from collections.abc import Callable
from typing import Any

from torch import nn

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
            kind: Any = choose(name, layer)
            if kind is not None:
                layer.__class__ = kind


def by_class(kinds: dict[type[nn.Module], type[nn.Module]]) -> Transform:
    """Return the transform of all layers of exactly these classes."""
    return lambda name, layer: kinds.get(type(layer))


def by_name(names: set[str], kind: type[nn.Module]) -> Transform:
    """Return the transform of the layers with these names."""
    return lambda name, layer: kind if name in names else None
