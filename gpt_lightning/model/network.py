"""Networks of one's own: `model.network` names a class, which is built in place of GPT.

`MyGPT(config, **init_args)` is any nn.Module that returns what `GPT.forward` returns. Its tensors
may have other names, and it may use only some fields of GPTConfig. docs/tutorials/own_network.md
has an example.
"""

import importlib
import json
import shlex
import sys
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from gpt_lightning.errors import UserError, one_line
from gpt_lightning.files import Fields
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.loss import NarrowHead

EXPECTED = "expected a class of yours, such as my_package.MyGPT, or {class_path, init_args}"


@dataclass(frozen=True)
class Network:
    """Import path of a network's class, and its arguments.

    Attributes:
        class_path: Module and name of the class.
        init_args: Arguments of the class after the configuration: numbers, words, lists, dicts.
        kind: The class, if it was given itself.
    """

    class_path: str
    init_args: Fields = field(default_factory=dict)
    kind: type | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, value: Any) -> "Network | None":
        """Return the network that a value of model.network describes; None for none.

        Raises:
            UserError: The value is of another form.
        """
        if value is None or isinstance(value, cls):
            return value
        facts = dict(value) if isinstance(value, dict) else {"class_path": value}
        if isinstance(kind := facts.get("class_path"), type):
            facts |= {"class_path": f"{kind.__module__}.{kind.__qualname__}", "kind": kind}
        try:
            found = cls(**facts)
            json.dumps(found.record())
            path = found.class_path.split(".")
            assert found.kind or (len(path) > 1 and all(map(str.isidentifier, path)))
            assert isinstance(found.init_args, dict)
        except (TypeError, ValueError, AttributeError, AssertionError) as error:
            raise UserError(f"model.network is {value!r}; {EXPECTED}") from error
        return found

    def record(self) -> Fields:
        """Return the value of model.network in a checkpoint and in config.yaml."""
        return {"class_path": self.class_path, "init_args": self.init_args}

    def load(self) -> type[nn.Module]:
        """Import the class, of an installed package or from the current folder.

        Raises:
            UserError: There is no such module or class, or importing it fails.
        """
        if self.kind:
            return self.kind
        module, _, name = self.class_path.rpartition(".")
        folder = str(Path.cwd())
        sys.path.append(folder)
        try:
            importlib.invalidate_caches()
            kind = getattr(importlib.import_module(module), name)
        except (Exception, SystemExit) as error:  # any code may raise any error
            raise UserError(
                f"model.network {self.class_path} cannot be imported ({cause(error)}): name a "
                "class of an installed package, or of a file in the current folder"
            ) from error
        finally:
            sys.path.remove(folder)
        if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
            raise UserError(f"model.network {self.class_path} is no nn.Module; {EXPECTED}")
        return kind

    def build(self, config: GPTConfig) -> nn.Module:
        """Return the network for a configuration, with random weights.

        Raises:
            UserError: The class cannot be imported, or does not take the arguments.
        """
        try:
            model = self.load()(config, **self.init_args)
            signature(model.forward).bind("idx", "targets")
        except TypeError as error:
            raise UserError(
                f"model.network {self.class_path} cannot be built ({cause(error)}); it is called "
                "with a GPTConfig, and with model.network.init_args as keywords, and its forward "
                "with idx and targets"
            ) from error
        if not hasattr(model, "config"):
            model.config = config  # type: ignore[assignment]
        model.register_forward_hook(partial(check_output, self.class_path), with_kwargs=True)
        return model


def cause(error: BaseException) -> str:
    """Return the class and the message of an error in one line."""
    return one_line(f"{type(error).__name__}: {error}")


def check_output(name: str, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Check what a network's forward returns: logits (B, T, V), or the loss with targets.

    Raises:
        UserError: It is something else, such as the tuple of nanoGPT.
    """
    idx = [*args, *kwargs.values()][0]  # int64 (B, T)
    targets = kwargs.get("targets", *args[1:2])
    is_tensor = isinstance(output, Tensor)
    if is_tensor and (output.shape[:-1] == idx.shape if targets is None else output.numel() == 1):
        return
    shape = f" {tuple(output.shape)}" if is_tensor else ""
    raise UserError(
        f"model.network {name} returns a {type(output).__name__.lower()}{shape} "
        f"{'without' if targets is None else 'with'} targets; expected a tensor: logits (B, T, V) "
        "without targets, their mean loss with targets"
    )


def check_tokens(name: str, tokens: Any, config: GPTConfig) -> None:
    """Raise a UserError unless an argument is integers (B, T) of a model's vocabulary."""
    V, found = config.vocab_size or 0, f"is {tokens!r:.60}"
    if isinstance(tokens, Tensor):
        found = f"is {tokens.dtype} {tuple(tokens.shape)}"
        if tokens.dim() == 2 and tokens.numel() and tokens.dtype in (torch.int64, torch.int32):
            if 0 <= tokens.min() <= tokens.max() < V:
                return
            found = f"has tokens from {tokens.min()} to {tokens.max()}"
    raise UserError(f"{name} {found}; expected int64 (B, T) from 0 to {V - 1}, the vocabulary")


def build(network: Network | None, config: GPTConfig) -> Any:
    """Return GPT, or the network of one's own, with random weights."""
    return network.build(config) if network else GPT(config)


def network_option(value: Any) -> list[str]:
    """Return the option of a command for a run with this value of model.network; [] for GPT."""
    network = Network.of(value)
    if network is None:
        return []
    text = json.dumps(network.record()) if network.init_args else network.class_path
    return ["--model.network", text]


def missing_network(source: str, theirs: Any) -> UserError:
    """Return the error for weights of a network that no setting of this user names.

    Args:
        source: Origin of the weights.
        theirs: Network in the record of the weights, or in their config.yaml.
    """
    return UserError(
        f"{source} has the weights of a network of its own, and a file imports nothing: name the "
        f"class with {shlex.join(network_option(theirs))}, in Python with network="
    )


def has_our_head(model: GPT) -> bool:
    """Return whether the output head of a model is GPT's: a product with a matrix alone."""
    head = model.lm_head
    return (type(head) is nn.Linear or isinstance(head, NarrowHead)) and head.bias is None


def has_our_forward(model: nn.Module) -> bool:
    """Return whether a model computes logits and loss as GPT does: transformer, then lm_head."""
    own = type(model).forward, getattr(type(model), "head", None)
    return own == (GPT.forward, GPT.head) and has_our_head(cast(GPT, model))


def count_flops(model: nn.Module, context: int) -> tuple[float, str]:
    """Return the FLOPs of a training token, and how they are known.

    They are those of the network's own method, or else of FlopCounterMode for the forward and
    backward of one sequence, without computing anything.
    """
    if hasattr(model, "flops_per_token"):
        flops = cast(Any, model).flops_per_token(context)
        return float(flops), "flops_per_token of the network"
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    shapes = {n: t.detach().to("meta").requires_grad_(t.requires_grad) for n, t in tensors.items()}
    idx = torch.zeros(1, context, dtype=torch.int64, device="meta")
    try:
        with torch.compiler.set_stance("force_eager"), FlopCounterMode(display=False) as counter:
            torch.func.functional_call(model, shapes, (idx, idx)).backward()
    except UserError:
        raise
    except Exception:  # a network that reads its numbers, or has tensors that are no buffers
        return 6.0 * sum(p.numel() for p in model.parameters()), "6 per parameter, not counted"
    return counter.get_total_flops() / context, "counted by PyTorch's FlopCounterMode"
