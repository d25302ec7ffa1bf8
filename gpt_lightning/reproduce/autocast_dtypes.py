"""Dtype of every parameter, output, loss and gradient under autocast, against a published table.

toy: Linear(20, 10) - ReLU - LayerNorm - Linear, without biases. gpt: our GPT with two layers of
width 32. The published table is CUDA's fp16 table of the toy model, so that only this row can
differ from it. It is from a report on profiles and mixed precision whose origin was not found.

cuda-rules: rules of CUDA's autocast, read through the dispatcher with tensors that have a shape and
no data, for the forward only; no GPU is needed. Autocast on a CPU has other rules: layer norm is
not among the operations that it lifts to float32.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from gpt_lightning.model.gpt import GPT, Block, GPTConfig
from gpt_lightning.reproduce.published import read_rows
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option, Values
from gpt_lightning.tables.rows import column, sweep_row
from gpt_lightning.tables.sweep import Bench

AUTOCAST = {"fp16": "float16", "bf16": "bfloat16"}
MODELS = ("toy", "gpt")
# device name for the rules of CUDA's autocast, read from the dispatcher without a GPU
CUDA_RULES = "cuda-rules"
# the toy model on CUDA under fp16 autocast
PUBLISHED = {
    row["field"]: row["published"]
    for row in read_rows("figures.csv", "profile-report")
    if row["measure"] == "dtype"
}
KINDS: list[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str]] = [
    (nn.Embedding, "embedding"),
    (nn.Linear, "linear"),
    ((nn.ReLU, nn.GELU), "activation"),
    (nn.LayerNorm, "layer_norm"),
    (Block, "residual"),
]
Seen = tuple[str, str, str]  # kind, name, dtype


@sweep_row
class DtypeRow:
    """Model under autocast: the dtype of each kind of tensor."""

    device: str = column("device", width=10)
    autocast: str = column("autocast")
    model: str = column("model")
    parameters: str = column("parameters", default="")
    embedding: str = column("embeddings", default="")
    linear: str = column("linear outputs", default="")
    activation: str = column("ReLU or GELU", default="")
    layer_norm: str = column("layer norm", default="")
    residual: str = column("residual stream", default="")
    logits: str = column("logits", width=8, default="")
    loss: str = column("loss", width=8, default="")
    gradients: str = column("gradients", default="")
    published: str = column("against the published", default="")


@dataclass(frozen=True)
class TensorRow:
    """Tensor of a model under autocast."""

    device: str = column("device")
    autocast: str = column("autocast")
    model: str = column("model")
    kind: str = column("kind")
    tensor: str = column("tensor")
    dtype: str = column("dtype")
    published: str = column("published (CUDA)", default="")


def read_devices(args: Any) -> list[Values]:
    """Return the devices of --device; CUDA_RULES is one."""
    names = (args.device or f"auto,{CUDA_RULES}").split(",")
    real = ",".join(name for name in names if name != CUDA_RULES)
    places = options.devices(SimpleNamespace(device=real)) if real else []
    places += [CUDA_RULES] * (CUDA_RULES in names)
    return [{"device": place} for place in places]


BENCH = Bench(
    name="dtypes",
    title="dtypes under autocast",
    row=DtypeRow,
    measure="gpt_lightning.reproduce.autocast_dtypes:measure_dtypes",
    options=(
        Option(
            "device",
            None,
            f"Any of cpu, mps, cuda, {CUDA_RULES} and auto, separated by commas; "
            f"null: auto,{CUDA_RULES}.",
            read_devices,
            str | None,
        ),
        options.words("autocast", "autocast", AUTOCAST),
        options.words("models", "model", MODELS),
    ),
    timeout_s=120.0,
    tables={"tensors": TensorRow},
)


def measure_dtypes(device: str, autocast: str, model: str) -> dict[str, Any]:
    """Run a step and record the dtype of every tensor."""
    published = PUBLISHED if (autocast, model) == ("fp16", "toy") else {}
    seen = Observer(model, AUTOCAST[autocast], device).observe()
    kinds: dict[str, list[str]] = {}
    for kind, _, dtype in seen:
        kinds.setdefault(kind, []).append(dtype)
    row = {kind: " + ".join(dict.fromkeys(dtypes)) for kind, dtypes in kinds.items()}
    same = verdict(row, published)
    on_cuda = device in ("cuda", CUDA_RULES)  # the published table's device
    return {
        **{kind: text for kind, text in row.items() if kind in DtypeRow.__dataclass_fields__},
        "published": same,
        "status": "mismatch" if on_cuda and " was " in same else "ok",
        "tensors": [
            {"kind": kind, "tensor": name, "dtype": dtype, "published": published.get(kind, "")}
            for kind, name, dtype in seen
        ],
    }


def verdict(row: dict[str, str], published: dict[str, str]) -> str:
    """Describe how a row differs from the published one; empty if none was published."""
    if not published:
        return ""
    other = [kind for kind, theirs in published.items() if row.get(kind, theirs) != theirs]
    unasked = [f"{kind} not asked" for kind in published if kind not in row]
    differs = [f"{kind} was {published[kind]}" for kind in other]
    return "; ".join([*(differs or ["the same"]), *unasked])


class Toy(nn.Module):
    """Toy model of the systems course, (B, 20) to (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(20, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))


class Observer:
    """Runs a model under autocast and records dtypes.

    Args:
        model: Model, toy or gpt.
        autocast: Dtype, float16 or bfloat16.
        device: Device, cpu, mps, cuda or CUDA_RULES.
    """

    def __init__(self, model: str, autocast: str, device: str) -> None:
        self.dtype = getattr(torch, autocast)
        self.device = device
        self.model: nn.Module = Toy() if model == "toy" else GPT(GPTConfig(2, 2, 32, 16, 64))
        self.seen: list[Seen] = []

    def observe(self) -> list[Seen]:
        """Return parameters, outputs, logits, loss and gradients, in the order of the step."""
        for name, parameter in self.model.named_parameters():
            self.see("parameters", name, parameter)
        if self.device == CUDA_RULES:
            with cuda_rules(self.dtype), torch.no_grad():
                self.model.requires_grad_(False).to_empty(device="cuda")
                self.forward("cuda")
            return self.seen
        self.model.to(self.device)
        with torch.autocast(self.device, self.dtype):
            loss = self.forward(self.device)
        loss.backward()
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            self.see("gradients", name, parameter.grad)
        return self.seen

    def forward(self, device: str) -> torch.Tensor:
        """Compute and record the logits, then the loss."""
        our_gpt = isinstance(self.model, GPT)  # it computes its loss itself
        shape = (2, 16) if our_gpt else (4,)
        y = torch.randint(5, shape, device=device)
        x = y if our_gpt else torch.randn(4, 20, device=device)
        hooks = [
            module.register_forward_hook(partial(self.see_output, name))
            for name, module in self.model.named_modules()
            if name
        ]
        logits = self.model(x)
        self.see("logits", "logits", logits)
        for hook in hooks:
            hook.remove()
        loss = self.model(x, y) if our_gpt else nn.functional.cross_entropy(logits, y)
        self.see("loss", "loss", loss)
        return loss

    def see(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor."""
        self.seen.append((kind, name, str(tensor.dtype).removeprefix("torch.")))

    def see_output(self, name: str, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        """Record a module's output; with its name, a forward hook."""
        kinds = (kind for types, kind in KINDS if isinstance(module, types))
        self.see(next(kinds, "other output"), name, output)


@contextmanager
def cuda_rules(dtype: torch.dtype) -> Iterator[None]:
    """Enable CUDA's autocast for tensors that have CUDA's dispatch keys and no data.

    torch.autocast("cuda") disables itself on a machine without a GPU; the switch below it does
    not, and the casts are in every build of torch. Autograd is not: it needs the device.
    """
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
