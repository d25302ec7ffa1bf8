"""Optimizers of `--model.optimizer`: each file of this folder is one, found by its name.

A file defines `build(model, settings, fused)`, which returns a torch.optim.Optimizer. The `lr` of
each of its parameter groups is the peak, which GPTModule's schedule scales. A file may define
`check(settings)`, which raises a UserError for settings that the optimizer does not support.
"""

import importlib
import pkgutil
from typing import Any

from gpt_lightning.parsing import pick
from gpt_lightning.runs.settings import Settings


def names() -> list[str]:
    """Return the names of the optimizers, sorted."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load(settings: Settings) -> Any:
    """Return the file of the optimizer that the settings name, which supports the settings.

    Raises:
        UserError: names the key and the choices.
    """
    name = pick(str(settings.optimizer), names(), "model.optimizer")  # null comes as None
    file = importlib.import_module(f"{__name__}.{name}")
    getattr(file, "check", lambda settings: None)(settings)
    return file
