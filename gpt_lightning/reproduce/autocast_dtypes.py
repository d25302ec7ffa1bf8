"""Dtype of every parameter, output, loss and gradient under autocast, against a published table.

toy: Linear(20, 10) - ReLU - LayerNorm - Linear, without biases. gpt: our GPT with two layers of
width 32. The published table is CUDA's fp16 table of the toy model, so that only this row can
differ from it. It is from a report on profiles and mixed precision whose origin was not found.

cuda-rules: rules of CUDA's autocast, read through the dispatcher with tensors that have a shape and
no data, for the forward only; no GPU is needed. Autocast on a CPU has other rules: layer norm is
not among the operations that it lifts to float32.
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from gpt_lightning.model.gpt import GPT, Block, GPTConfig
from gpt_lightning.reproduce.published import read_rows
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option
from gpt_lightning.tables.rows import Values, column, row_type
from gpt_lightning.tables.sweep import Bench

AUTOCAST = {"fp16": "float16", "bf16": "bfloat16"}
MODELS = ("toy", "gpt")
# device name for the rules of CUDA's autocast, read from the dispatcher without a GPU
CUDA_RULES = "cuda-rules"
DEVICES = f"Any of cpu, mps, cuda, {CUDA_RULES}, auto, with commas; null: auto,{CUDA_RULES}."
# the toy model on CUDA under fp16 autocast
PUBLISHED = {
    row["field"]: row["published"]
    for row in read_rows("figures.csv", "profile-report")
    if row["measure"] == "dtype"
}
KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "embedding": (nn.Embedding,),
    "linear": (nn.Linear,),
    "activation": (nn.ReLU, nn.GELU),
    "layer_norm": (nn.LayerNorm,),
    "residual": (Block,),
}
DtypeRow = row_type(
    "device autocast model parameters embedding linear activation layer_norm residual logits loss "
    "gradients published status -note",
    loss=column("loss", width=8),
    published=column("against the published"),
)


def read_devices(args: Any) -> list[Values]:
    """Return the devices of --device; CUDA_RULES is one."""
    names = (args.device or f"auto,{CUDA_RULES}").split(",")
    real = ",".join(name for name in names if name != CUDA_RULES)
    places = options.devices(SimpleNamespace(device=real)) if real else []
    return [{"device": place} for place in [*places, *[CUDA_RULES] * (CUDA_RULES in names)]]


BENCH = Bench(
    name="dtypes",
    title="dtypes under autocast",
    row=DtypeRow,
    measure="gpt_lightning.reproduce.autocast_dtypes:measure_dtypes",
    options=(
        Option("device", None, DEVICES, read_devices, str | None),
        options.words("autocast", "autocast", AUTOCAST),
        options.words("models", "model", MODELS),
    ),
    timeout_s=120.0,
    tables={"tensors": row_type("device autocast model kind tensor dtype published")},
)


def measure_dtypes(device: str, autocast: str, model: str) -> dict[str, Any]:
    """Run a step and record the dtype of every tensor."""
    published = PUBLISHED if (autocast, model) == ("fp16", "toy") else {}
    seen = observe(model, AUTOCAST[autocast], device)
    row: dict[str, str] = {}
    for kind, _, dtype in seen:
        row[kind] = " + ".join(dict.fromkeys([*row.get(kind, dtype).split(" + "), dtype]))
    other = [f"{k} was {theirs}" for k, theirs in published.items() if row.get(k, theirs) != theirs]
    unasked = [f"{kind} not asked" for kind in published if kind not in row]
    same = [*(other or ["the same"]), *unasked] if published else []
    on_cuda = device in ("cuda", CUDA_RULES)  # the published table's device
    return row | {
        "published": "; ".join(same),
        "status": "mismatch" if on_cuda and other else "ok",
        "tensors": [
            {"kind": kind, "tensor": name, "dtype": dtype, "published": published.get(kind, "")}
            for kind, name, dtype in seen
        ],
    }


def toy() -> nn.Module:
    """Return the toy model of the systems course, (B, 20) to (B, 5)."""
    layers = {
        "fc1": nn.Linear(20, 10, bias=False),
        "relu": nn.ReLU(),
        "ln": nn.LayerNorm(10),
        "fc2": nn.Linear(10, 5, bias=False),
    }
    return nn.Sequential(OrderedDict(layers))


def observe(name: str, autocast: str, device: str) -> list[tuple[str, str, str]]:
    """Run a step of a model under autocast.

    Args:
        name: Name of the model, toy or gpt.
        autocast: Dtype, float16 or bfloat16.
        device: Device, cpu, mps, cuda or CUDA_RULES.

    Returns:
        Kind, name and dtype of parameters, outputs, logits, loss and gradients, in this order.
    """
    model = toy() if name == "toy" else GPT(GPTConfig(2, 2, 32, 16, 64))
    dtype = getattr(torch, autocast)
    seen: list[tuple[str, str, Any]] = [
        ("parameters", *named) for named in model.named_parameters()
    ]
    if device == CUDA_RULES:
        with cuda_rules(dtype), torch.no_grad():
            model.requires_grad_(False).to_empty(device="cuda")
            seen += outputs(model, "cuda")
    else:
        model.to(device)
        with torch.autocast(device, dtype):
            seen += outputs(model, device)
        seen[-1][2].backward()
        seen += [("gradients", name, p.grad) for name, p in model.named_parameters()]
    return [(kind, name, str(tensor.dtype).removeprefix("torch.")) for kind, name, tensor in seen]


def outputs(model: nn.Module, device: str) -> list[tuple[str, str, Tensor]]:
    """Return the outputs of all modules, the logits and the loss, which comes last."""
    our_gpt = isinstance(model, GPT)  # it computes its loss itself
    y = torch.randint(5, (2, 16) if our_gpt else (4,), device=device)
    x = y if our_gpt else torch.randn(4, 20, device=device)
    seen: list[tuple[str, str, Tensor]] = []

    def see(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        kind = (kind for kind, types in KINDS.items() if isinstance(module, types))
        seen.append((next(kind, "other output"), name, output))

    named = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(partial(see, name)) for name, module in named]
    logits = model(x)
    for hook in hooks:
        hook.remove()
    loss = model(x, y) if our_gpt else nn.functional.cross_entropy(logits, y)
    return [*seen, ("logits", "logits", logits), ("loss", "loss", loss)]


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
