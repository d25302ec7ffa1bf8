"""Settings of the process for a run: precision of float32 products, the CPU's freed memory."""

import time
from typing import Any

import torch
from lightning import Callback, Trainer

from gpt_lightning.hardware.device import keep_freed_memory, limit_kept_memory

MEMORY_READ_S = 0.1  # shortest time between two readings of the process's memory


class MatmulPrecision(Callback):
    """Set PyTorch's precision of float32 products, model.matmul_precision, for the run."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(pl_module.settings.matmul_precision)

    def teardown(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        torch.set_float32_matmul_precision(self._before)


class TrimMemory(Callback):
    """Keep memory that a training step on the CPU frees for the next one, up to a limit."""

    def __init__(self) -> None:
        self._read_s = 0.0  # time of the last reading

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._on_cpu = trainer.strategy.root_device.type == "cpu"
        if stage == "fit" and self._on_cpu:
            keep_freed_memory()

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        now = time.monotonic()
        if self._on_cpu and now - self._read_s >= MEMORY_READ_S:
            self._read_s = now
            limit_kept_memory()

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.on_train_batch_end(trainer, pl_module)
