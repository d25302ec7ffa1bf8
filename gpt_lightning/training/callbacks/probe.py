"""RunProbe: the objects of a run before its first step, and its first batches."""

import itertools
from collections.abc import Callable

import lightning as L

from gpt_lightning.data.loader import Batch
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.module import GPTModule


class ProbedError(Exception):
    """End of a run that was started for its objects alone."""


class RunProbe(L.Callback):
    """Call a function before the first step, and keep the first two micro-batches.

    Args:
        look: Function that is called with the module when model, optimizer and data exist.
        stop: True to raise ProbedError then; the batches are read before.

    Attributes:
        batches: First two micro-batches of this process, on the CPU.
    """

    def __init__(self, look: Callable[[GPTModule], None], stop: bool = False) -> None:
        self.look, self.stop = look, stop
        self.batches: list[Batch] = []

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        self.look(pl_module)
        if self.stop:
            data = token_data(trainer)
            assert data is not None
            self.batches = list(itertools.islice(data.reader.train_loader, 2))
            raise ProbedError

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if len(self.batches) < 2:
            x, y = batch
            self.batches.append((x.cpu(), y.cpu()))
