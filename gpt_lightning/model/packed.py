"""A GPT's twin that reads its weights faster, for decoding. Torch only.

A decoded token reads every weight once and does one multiply-add with it: the time is the time of
reading. On a CPU, oneDNN reads a matrix that it has laid out itself up to twice as fast as the
row-major one, and in bfloat16 there is half as much to read.
"""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

from gpt_lightning.model.gpt import GPT


class PackedLinear(nn.Module):
    """A linear layer of which the weights are kept in another dtype, another layout, or both.

    Args:
        linear: The layer; its parameters are shared and stay as they are.
        dtype: Of the product; what comes out has the dtype of what went in.
        pack: Lay the weights out for oneDNN.
    """

    def __init__(self, linear: nn.Linear, dtype: torch.dtype, pack: bool) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.dtype, self.pack = dtype, pack
        weight = linear.weight.detach().to(dtype)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1) if pack else weight
        self._bias = None if linear.bias is None else linear.bias.detach().to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.to(self.dtype)
        if self.pack:
            y = torch.ops.mkldnn._linear_pointwise(h, self._packed, self._bias, "none", [], "")
        else:
            y = F.linear(h, self._packed, self._bias)
        return y.to(x.dtype)  # type: ignore[no-any-return]


def can_pack(weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch and this CPU have oneDNN's products of a dtype."""
    ops = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not (hasattr(ops, "_linear_pointwise") and hasattr(ops, "_reorder_linear_weight")):
        return False
    return dtype == torch.float32 or (
        dtype == torch.bfloat16 and bool(ops._is_mkldnn_bf16_supported())
    )


def prepack_for_decoding(model: GPT, dtype: torch.dtype | None = None, pack: bool = True) -> GPT:
    """The same model in evaluation, eager, and with linear layers that are read faster.

    Parameters are shared, and the model, its mode and its compiled code are left alone. A twin does
    not follow later changes of the weights.

    Args:
        model: The model; a twin in the same dtype is its own twin.
        dtype: Of the linear layers' products; None: the weights' own. The rest keeps its dtype.
        pack: False keeps the plain layout, where there is no second copy of the weights to pay for.
    """
    weight = model.lm_head.weight
    dtype = dtype or weight.dtype
    if isinstance(model.lm_head, PackedLinear) and model.lm_head.dtype == dtype:
        return model
    shared = {id(parameter): parameter for parameter in model.parameters()}
    twin = copy.deepcopy(model, shared).eval()  # a copy of a compiled module is not compiled
    pack = pack and can_pack(weight, dtype)
    if pack or dtype != weight.dtype:
        for parent in list(twin.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(parent, name, PackedLinear(child, dtype, pack))
    return twin
