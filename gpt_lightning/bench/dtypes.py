"""Dtype of every parameter, output, loss and gradient under autocast, and errors of layer norm.

toy: Linear(20, 10) - ReLU - LayerNorm - Linear, without biases. gpt: our GPT with two layers of
width 32. `gpt-lightning reproduce profile-report` compares the row of cuda-rules, fp16 and toy with
a published table.

cuda-rules: rules of CUDA's autocast, read through the dispatcher with tensors that have a shape and
no data, for the forward only; no GPU is needed. Autocast on a CPU has other rules: layer norm is
not among the operations that it lifts to float32.

Layer norms: the largest error of 256 layer norms of 768 channels, against float64. The channels are
normal(0, 1), normal(8, 1), or normal(0, 1) with one channel of 1,000. Layer norm stays in float32
for two reasons. First, bfloat16 rounds its input to 8 significant bits and float16 to 11, and a
mean or a large channel uses some of them. Second, in float16 the square of a channel above 256 is
infinite: written out, every output is then 0. PyTorch's kernel takes tensors of 16 bits and
computes in float32 inside, which removes the second reason alone.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Annotated

import torch
from torch import Tensor, nn

from gpt_lightning.files import yaml_beside
from gpt_lightning.hardware.precision import DTYPES
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import Column, Measured, Row, Tables, Text, Values
from gpt_lightning.tables.sweep import Bench

MODELS = ("toy", "gpt")
# device name for the rules of CUDA's autocast, read from the dispatcher without a GPU
CUDA_RULES = "cuda-rules"
KINDS = yaml_beside(__file__)
Error = Annotated[float | None, Column(".2g")]


@dataclass
class DtypeRow(Measured):
    """Dtypes of a step under autocast, by kind of tensor."""

    device: Text
    autocast: Text
    model: Text
    parameters: Text
    embedding: Text
    linear: Text
    activation: Text
    layer_norm: Text
    residual: Text
    logits: Text
    loss: Text
    gradients: Text


@dataclass
class TensorRow(Row):
    """Dtype of one tensor."""

    device: Text
    autocast: Text
    model: Text
    kind: Text
    tensor: Text
    dtype: Text


@dataclass
class NormRow(Row):
    """Errors of a layer norm."""

    dtype: Text
    arithmetic: Text
    normal_error: Error
    mean_8_error: Error
    channel_1000_error: Error


def place(name: str) -> str:
    """Convert the name of a device; CUDA_RULES is one."""
    return name if name == CUDA_RULES else options.device(name)


def layer_norms(rows: Sequence[Row]) -> Tables:
    """Return the largest errors of layer norms by dtype and arithmetic, against float64."""
    x = torch.randn(256, 768, generator=torch.Generator().manual_seed(0))  # B*T C
    spike = x.index_fill(1, torch.tensor(0), 1e3)
    inputs = {"normal_error": x, "mean_8_error": x + 8, "channel_1000_error": spike}
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for arithmetic, norm in (("kernel", kernel_norm), ("written out", written_norm)):
            errors = {
                name: (norm(tensor.to(dtype)) - kernel_norm(tensor.double())).abs().max().item()
                for name, tensor in inputs.items()
            }
            found.append(NormRow(str(dtype).removeprefix("torch."), arithmetic, **errors))
    return {"norms": found}


def kernel_norm(x: Tensor) -> Tensor:
    """Return PyTorch's layer norm of the last dimension."""
    return nn.functional.layer_norm(x, x.shape[-1:])


def written_norm(x: Tensor) -> Tensor:
    """Return the layer norm whose every operation rounds to the input's dtype."""
    centered = x - x.mean(-1, keepdim=True)
    return centered * (centered.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


BENCH = Bench(
    measure="gpt_lightning.bench.dtypes:measure_dtypes",
    tables={"rows": DtypeRow, "tensors": TensorRow, "norms": NormRow},
    options=(
        options.axis(
            "device",
            "device",
            f"auto,{CUDA_RULES}",
            place,
            f"Any of cpu, mps, cuda, auto and {CUDA_RULES}, separated by commas.",
        ),
        options.words("autocast", "autocast", ("fp16", "bf16")),
        options.words("models", "model", MODELS),
    ),
    beside=layer_norms,
    timeout_s=120.0,
)


def measure_dtypes(row: SimpleNamespace) -> Values:
    """Run a step and record the dtype of every tensor."""
    tensors = []
    found: dict[str, dict[str, None]] = {}  # kind of a tensor -> its dtypes in order
    for (kind, name), tensor in observe(
        row.model, DTYPES[row.autocast].operands, row.device
    ).items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors.append({"kind": kind, "tensor": name, "dtype": dtype})
        found.setdefault(kind, {})[dtype] = None
    return {kind: " + ".join(dtypes) for kind, dtypes in found.items()} | {"tensors": tensors}


def toy() -> nn.Module:
    """Return the toy model of the systems course, (B, 20) to (B, 5)."""
    layers = OrderedDict(fc1=nn.Linear(20, 10, bias=False), relu=nn.ReLU())
    layers |= OrderedDict(ln=nn.LayerNorm(10), fc2=nn.Linear(10, 5, bias=False))
    return nn.Sequential(layers)


def observe(name: str, dtype: torch.dtype, device: str) -> dict[tuple[str, str], Tensor]:
    """Run a step of a model under autocast.

    Args:
        name: Name of the model, toy or gpt.
        dtype: Dtype of autocast.
        device: Device, cpu, mps, cuda or CUDA_RULES.

    Returns:
        Parameters, outputs of modules, logits, loss and gradients, in this order, by kind and name.
    """
    model = toy() if name == "toy" else GPT(GPTConfig(2, 2, 32, 16, 64))
    seen: dict[tuple[str, str], Tensor] = {
        ("parameters", path): tensor for path, tensor in model.named_parameters()
    }

    def see(path: str, module: nn.Module, inputs: object, output: Tensor) -> None:
        seen[KINDS.get(type(module).__name__, "other output"), path] = output

    for path, module in model.named_modules():
        if path:
            module.register_forward_hook(partial(see, path))
    rules = device == CUDA_RULES
    where = "cuda" if rules else device
    with cuda_rules(dtype) if rules else torch.autocast(device, dtype):
        model = model.requires_grad_(False).to_empty(device=where) if rules else model.to(where)
        if isinstance(model, GPT):  # it computes its loss itself
            x = y = torch.randint(5, (2, 16), device=where)
            logits, loss = model(x), model(x, y)
        else:
            x = torch.randn(4, 20, device=where)
            y = torch.randint(5, (4,), device=where)
            logits = model(x)
            loss = nn.functional.cross_entropy(logits, y)
    seen |= {("logits", "logits"): logits, ("loss", "loss"): loss}
    if not rules:
        loss.backward()
        gradients = ((path, p.grad) for path, p in model.named_parameters())
        seen |= {("gradients", path): grad for path, grad in gradients if grad is not None}
    return seen


@contextmanager
def cuda_rules(dtype: torch.dtype) -> Iterator[None]:
    """Enable CUDA's autocast for tensors that have CUDA's dispatch keys and no data.

    torch.autocast("cuda") disables itself on a machine without a GPU; the switch below it does
    not, and the casts are in every build of torch. Autograd is not: it needs the device.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # these rows alone need it

    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
