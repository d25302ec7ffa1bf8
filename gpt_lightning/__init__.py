"""Train GPT-2 with PyTorch Lightning, reproduce published results, and measure your hardware."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt_lightning.errors import UserError as UserError
    from gpt_lightning.model.generate import generate as generate
    from gpt_lightning.model.gpt import GPT as GPT
    from gpt_lightning.model.gpt import GPTConfig as GPTConfig
    from gpt_lightning.runs.checkpoint import load_model as load_model
    from gpt_lightning.training.api import FitResult as FitResult
    from gpt_lightning.training.api import fit as fit
    from gpt_lightning.training.datamodule import TokenDataModule as TokenDataModule
    from gpt_lightning.training.module import GPTModule as GPTModule

__version__ = "0.1.0"

# name -> its module, imported at the name's first use: `import gpt_lightning` does not import torch
_MODULES = {
    "UserError": "errors",
    "GPT": "model.gpt",
    "GPTConfig": "model.gpt",
    "GPTModule": "training.module",
    "TokenDataModule": "training.datamodule",
    "FitResult": "training.api",
    "fit": "training.api",
    "generate": "model.generate",
    "load_model": "runs.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
