"""Tensors that autograd saves in a forward pass for the backward pass, by module."""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpt_lightning.bench.core.memory_meter import MIB

Saved = tuple[str, str, str, str, int]  # where, module, shape, dtype, bytes
OUTSIDE = "outside of the blocks"


def by_module(model: nn.Module, inputs: Sequence[Tensor], residual: int) -> list[dict[str, Any]]:
    """Run a forward pass and return a row for each kind of saved tensor, then the sums.

    Parameters and buffers are left out, and memory that several tensors share counts once. Copies
    of parameters that autocast makes and saves do count.

    Args:
        model: Model whose blocks are `transformer.h`; only the first of them is listed.
        inputs: Arguments of the model.
        residual: Bytes of one activation of the residual stream in float32.
    """
    counts: Counter[Saved] = Counter(saved_tensors(model, inputs))
    rows, sums = [], dict.fromkeys(dict.fromkeys(where for where, *_ in counts), 0)
    for (where, module, shape, dtype, n_bytes), tensors in sorted(counts.items(), key=first_block):
        size = {"mib": tensors * n_bytes / MIB, "residuals": tensors * n_bytes / residual}
        kind = {"module": module, "shape": shape, "saved_dtype": dtype, "tensors": tensors}
        rows.append({"where": where, **kind, **size})
        sums[where] += tensors * n_bytes
    for where, n_bytes in sums.items():
        size = {"mib": n_bytes / MIB, "residuals": n_bytes / residual}
        rows.append({"where": where, "module": "in all", "shape": "", "saved_dtype": "", **size})
    return rows


def first_block(item: tuple[Saved, int]) -> bool:
    """Sort key: the first block's tensors before the others."""
    return item[0][0] == OUTSIDE


def saved_tensors(model: nn.Module, inputs: Sequence[Tensor]) -> list[Saved]:
    """Run a forward pass; return what is saved in the first block and outside of the blocks."""
    running = [""]  # names of the modules around the operation
    own = (*model.parameters(), *model.buffers())
    seen = {tensor.untyped_storage().data_ptr() for tensor in own}
    found: list[Saved] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # alive until the backward, so that its address is too
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            name = re.fullmatch(r"transformer\.h\.(\d+)\.?(.*)", running[-1])
            where, module = OUTSIDE, running[-1].rpartition(".")[2] or "loss"
            if name is not None:
                where, module = f"block {name[1]}", name[2] or "residual sum"
            shape = " x ".join(map(str, tensor.shape))
            dtype = str(tensor.dtype).removeprefix("torch.")
            if where in (OUTSIDE, "block 0"):
                found.append((where, module, shape, dtype, storage.nbytes()))
        return tensor.detach()  # a saved output would keep its own node alive, in a cycle

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(*inputs)
        del loss
    finally:
        for hook in hooks:
            hook.remove()
    return found
