"""What `bench dtypes` does in a row's own process: a model, a step under autocast, and hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from gpt_lightning.bench.core.worker import SkippedError
from gpt_lightning.model.gpt import GPT, Block, GPTConfig
from gpt_lightning.reproduce.autocast_dtypes import CUDA_RULES

KINDS: list[tuple[type[nn.Module] | tuple[type[nn.Module], ...], str]] = [
    (nn.Embedding, "embedding"),
    (nn.Linear, "linear"),
    ((nn.ReLU, nn.GELU), "activation"),
    (nn.LayerNorm, "layer_norm"),
    (Block, "residual"),
]
Seen = tuple[str, str, str]  # kind, name, dtype


class Toy(nn.Module):
    """The systems course's toy model, (B, 20) to (B, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(20, 10, bias=False)
        self.relu = nn.ReLU()
        self.ln = nn.LayerNorm(10)
        self.fc2 = nn.Linear(10, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.ln(self.relu(self.fc1(x))))  # type: ignore[no-any-return]


class Observer:
    """Runs a model under autocast.

    Args:
        model: toy or gpt.
        autocast: float16 or bfloat16.
        device: cpu, mps, cuda, or CUDA_RULES.
    """

    def __init__(self, model: str, autocast: str, device: str) -> None:
        self.dtype = getattr(torch, autocast)
        self.device = device
        self.model: nn.Module = Toy() if model == "toy" else GPT(GPTConfig(2, 2, 32, 16, 64))
        self.x = torch.randn(4, 20) if model == "toy" else torch.randint(64, (2, 16))
        self.y = torch.randint(5, (4,)) if model == "toy" else torch.randint(64, (2, 16))
        self.seen: list[Seen] = []

    def observe(self) -> list[Seen]:
        """Parameters, outputs of modules, logits, loss and gradients, in the order of the step."""
        for name, parameter in self.model.named_parameters():
            self.see("parameters", name, parameter)
        if self.device == CUDA_RULES:
            with cuda_rules(self.dtype) as fake, torch.no_grad():
                put(self.model, fake)
                self.forward(fake(self.x), fake(self.y))
            return self.seen
        self.model.to(self.device)
        with torch.autocast(self.device, self.dtype):
            loss = self.forward(self.x.to(self.device), self.y.to(self.device))
        loss.backward()
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            self.see("gradients", name, parameter.grad)
        return self.seen

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Logits, then the loss, both noted."""
        hooks = [
            module.register_forward_hook(self.hook(name, kind_of(module)))
            for name, module in self.model.named_modules()
            if name
        ]
        logits = self.model(x)
        self.see("logits", "logits", logits)
        for hook in hooks:
            hook.remove()
        our_gpt = isinstance(self.model, GPT)  # which computes its loss itself
        loss = self.model(x, y) if our_gpt else nn.functional.cross_entropy(logits, y)
        self.see("loss", "loss", loss)
        return loss

    def see(self, kind: str, name: str, tensor: torch.Tensor) -> None:
        """Notes a tensor."""
        self.seen.append((kind, name, str(tensor.dtype).removeprefix("torch.")))

    def hook(self, name: str, kind: str) -> Callable[..., None]:
        """A forward hook that notes a module's output."""

        def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            self.see(kind, name, output)

        return note


def kind_of(module: nn.Module) -> str:
    """What a module's output is called."""
    return next((kind for types, kind in KINDS if isinstance(module, types)), "other output")


# ---- CUDA's rules without CUDA -------------------------------------------------------------------


class Factories(TorchFunctionMode):
    """Makes the tensors that a model makes by itself on cuda: masks and positions."""

    def __init__(self, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fake = fake

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.arange, torch.ones):
            return func(*args, **(kwargs or {}))
        return self.fake(func(*args, **{**(kwargs or {}), "device": "cpu"}))


@contextmanager
def cuda_rules(dtype: torch.dtype) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """CUDA's autocast for tensors that have CUDA's dispatch keys and no data.

    torch.autocast("cuda") turns itself off where there is no GPU; the switch below it does not, and
    the casts are in every build of torch. Autograd is not: it asks for the device.

    Yields:
        What makes such a tensor of an ordinary one.

    Raises:
        SkippedError: this torch has them elsewhere; they are no public part of it.
    """
    try:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    except ImportError as error:
        raise SkippedError(f"torch {torch.__version__}: {error}") from error
    mode = FakeTensorMode()
    device = torch.device("cuda:0")

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, device)

    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", dtype)
    torch.set_autocast_enabled("cuda", True)
    try:
        with mode, Factories(fake):
            yield fake
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def put(model: nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces a model's parameters."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(fake(parameter), requires_grad=False))
