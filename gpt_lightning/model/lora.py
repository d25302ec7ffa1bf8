"""LoRA: trained matrices of low rank beside frozen ones.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models",
https://arxiv.org/abs/2106.09685, as peft initializes it.
"""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT

A, B = "lora_a", "lora_b"


class LoRALinear(nn.Linear):
    """Linear layer x W^T + b + scale (x A^T) B^T, with A of (rank, in) and B of (out, rank)."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)  # (..., out)
        return y + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)


def install(model: nn.Module, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Add matrices of low rank to linear layers, and freeze all other parameters.

    The layers are those of a GPT's blocks, or any of a network of one's own. They are nn.Linear
    itself: a subclass may compute something else, and PyTorch's transformer layers read the weights
    of theirs without calling them.

    A is drawn as PyTorch draws the weight of a linear layer, and B is zero, so that the model
    computes at first what it did.

    Args:
        model: The model, whose parameters keep their names.
        rank: Rank of the product B A.
        alpha: `scale` times the rank.
        targets: Patterns of the layers' names: c_attn, attn.c_proj, c_fc, mlp.c_proj or *.

    Raises:
        UserError: A pattern matches no layer, or one of another class; or there is no pattern.
    """
    blocks = model.transformer.h if isinstance(model, GPT) else model
    own = {m for m in blocks.modules() if isinstance(m, nn.TransformerEncoderLayer)}
    read = {m for layer in own for m in layer.modules()}
    linear = {n: m for n, m in blocks.named_modules() if isinstance(m, nn.Linear)}
    fit = {n for n, m in linear.items() if type(m) is nn.Linear and m not in read}
    chosen = set()
    for target in targets or ("",):
        found = {name for name in linear if fnmatchcase(f".{name}", f"*.{target}")}
        unfit = [] if target == "*" else sorted(found - fit)
        if unfit or not found:
            names = ", ".join(sorted({name.partition(".")[2] or name for name in fit}))
            given = f"{unfit[0]}, not called as nn.Linear" if unfit else "no layer of a block"
            raise UserError(f"model.lora_targets {target!r} is {given}: choose of {names}")
        chosen |= found & fit
    model.requires_grad_(False)
    for name in sorted(chosen):
        linear[name].__class__ = LoRALinear
        layer = cast(LoRALinear, linear[name])
        layer.scale = alpha / rank
        layer.lora_a = nn.Parameter(layer.weight.new_empty(rank, layer.in_features))
        layer.lora_b = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))
        nn.init.kaiming_uniform_(layer.lora_a, a=math.sqrt(5))


def merged(weights: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Return a state dict without adapters: each W becomes W + scale B A.

    Args:
        weights: State dict of a model with adapters, or without.
        scale: alpha / rank.
    """
    found = {k: v for k, v in weights.items() if not k.endswith((f".{A}", f".{B}"))}
    for name in weights:
        if name.endswith(f".{A}"):
            layer = name.removesuffix(A)
            update = weights[f"{layer}{B}"] @ weights[name]  # (out, in)
            found[f"{layer}weight"] = found[f"{layer}weight"] + scale * update
    return found


def plain(layer: LoRALinear) -> nn.Linear:
    """Return a linear layer without its adapter."""
    with torch.no_grad():
        weight = layer.weight + layer.scale * (layer.lora_b @ layer.lora_a)  # (out, in)
    found = nn.Linear(1, 1, bias=False)
    found.weight, found.bias = nn.Parameter(weight), layer.bias
    return found
