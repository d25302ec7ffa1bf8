"""Optimizers of `--model.optimizer`: each file of this folder is one, found by its name.

A file defines `build(model, settings, fused)`, which returns a torch.optim.Optimizer. Each of its
parameter groups has a key `peak_lr`, the learning rate that GPTModule's schedule scales. A file may
define `check(settings)`, which raises a UserError for settings that the optimizer does not support.
"""

import importlib
import pkgutil
from typing import Any

from torch.optim import Optimizer

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT
from gpt_lightning.parsing import nearest
from gpt_lightning.runs.settings import Settings


def names() -> list[str]:
    """Return the names of the optimizers, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check(settings: Settings) -> None:
    """Check that the optimizer exists and supports the settings.

    Raises:
        UserError: names the key and the choices.
    """
    name = settings.optimizer
    if name not in names():
        hint = nearest(str(name), names())  # null in a file comes as None
        raise UserError(f"model.optimizer is {name!r}; expected {', '.join(names())}{hint}")
    getattr(_file(name), "check", lambda settings: None)(settings)


def build(model: GPT, settings: Settings, fused: bool) -> Optimizer:
    """Return the optimizer of a model.

    Args:
        model: Model whose parameters are optimized.
        settings: Training arguments; `settings.optimizer` names the file.
        fused: True if AdamW runs in one kernel.
    """
    optimizer: Optimizer = _file(settings.optimizer).build(model, settings, fused)
    return optimizer


def _file(name: str) -> Any:
    return importlib.import_module(f"{__name__}.{name}")
