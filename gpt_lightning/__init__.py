"""Train GPT-2 with PyTorch Lightning, reproduce published results, and measure your hardware."""

import importlib
from typing import Any

__version__ = "0.1.0"

# name -> its module, imported at the name's first use, so that `import gpt_lightning` does not
# import torch. __init__.pyi has the types.
_MODULES = {
    "UserError": "errors",
    "GPT": "model.gpt",
    "GPTCLI": "script",
    "GPTConfig": "model.gpt",
    "GPTModule": "training.module",
    "TokenDataModule": "training.datamodule",
    "FitResult": "training.fit",
    "fit": "training.fit",
    "generate": "model.generate",
    "load_model": "runs.sources",
}
__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *_MODULES]
