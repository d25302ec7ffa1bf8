"""Batches of windows: endless and resumable for training, a whole split for evaluation."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError

if TYPE_CHECKING:
    from gpt_lightning.data.mixture import WindowSource

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and the tokens that follow, int64 (B, T) each
EVALUATION = 2**64 - 1  # an epoch that training does not reach
IGNORE_INDEX = -100  # target of a padded position: F.cross_entropy skips it by default


def split_windows(windows: np.ndarray) -> Batch:
    """Return inputs and targets of (B, T + 1) windows, (B, T) each; targets are one token later."""
    tokens = torch.from_numpy(windows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class TrainBatches(Dataset[Batch]):
    """Micro-batches of one rank in one epoch, by index.

    Global micro-batch m consists of the windows m B W .. (m + 1) B W - 1 of the order, for B
    sequences per rank and W ranks; rank r takes every W-th of them from r on. The union over ranks
    is therefore the same for every W.
    """

    def __init__(
        self, source: "WindowSource", epoch: int, batch_size: int, rank: int, world: int
    ) -> None:
        self.source, self.epoch = source, epoch
        self.batch_size, self.rank, self.world = batch_size, rank, world

    def __getitem__(self, index: int) -> Batch:
        rows = self.batch_size * self.world
        windows = self.source.read(self.epoch, index * rows, rows, self.rank, self.world)
        return split_windows(windows)


@dataclass(eq=False)
class TrainLoader:
    """Endless epochs of training batches, a sized and stateful iterable for Lightning.

    The position counts batches handed to the loop, not batches that workers have prefetched. It is
    saved in windows of the global order, so that it is valid for another number of ranks. An epoch
    is a multiple of the accumulation: no optimizer step reaches into the next epoch.

    Attributes:
        source: Windows in their global order.
        batch_size: Sequences per micro-batch and rank.
        accumulate: Micro-batches an optimizer step.
        rank: Rank of this process, of `world`.
        world: Number of processes that share the order.
        num_workers: Processes that prefetch; 0 reads in the training process.
        pin_memory: True for page-locked batches, for CUDA.
        epoch: Number of the epoch, 0 for the first.
        position: Batches of the epoch that were handed out.
        wait_s: Seconds waited for batches.
    """

    source: "WindowSource"
    batch_size: int
    accumulate: int = 1
    rank: int = 0
    world: int = 1
    num_workers: int = 0
    pin_memory: bool = False
    epoch: int = field(default=0, init=False)
    position: int = field(default=0, init=False)
    wait_s: float = field(default=0.0, init=False)

    def __len__(self) -> int:
        steps = self.source.n_windows // (self.batch_size * self.world * self.accumulate)
        return steps * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        if self.position >= len(self):
            self.epoch, self.position = self.epoch + 1, 0
        batches = TrainBatches(self.source, self.epoch, self.batch_size, self.rank, self.world)
        loader = DataLoader(
            batches,
            batch_size=None,  # an item is a batch already
            sampler=range(self.position, len(self)),
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            generator=torch.Generator(),  # else it draws from the run's generator at every epoch
        )
        batches_read = iter(loader)
        while self.position < len(self):
            began = time.perf_counter()
            batch = next(batches_read)
            self.wait_s += time.perf_counter() - began
            self.position += 1
            yield batch

    @property
    def window(self) -> int:
        """Windows of the epoch that were handed out, over all ranks."""
        return self.position * self.batch_size * self.world

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "window": self.window}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "window" not in state:
            raise UserError("the checkpoint was trained in another order: set --data.order nanogpt")
        rows = self.batch_size * self.world  # a batch that was read in part is read again
        self.epoch, self.position = state["epoch"], state["window"] // rows

    def identity(self) -> dict[str, Any]:
        """Return what decides the order of the batches; equal ones read equal batches."""
        return {
            "sequences a micro-batch": self.batch_size * self.world,
            "micro-batches a step": self.accumulate,
            **self.source.identity(),
        }


class EvalBatches(Dataset[Batch]):
    """Whole split in batches of one shape: each of its n - 1 predictions exactly once.

    The last window and the last batch are padded with positions whose target is IGNORE_INDEX.
    """

    def __init__(
        self, stream: TokenStream, block_size: int, batch_size: int, rank: int = 0, world: int = 1
    ) -> None:
        self.stream, self.block_size, self.batch_size = stream, block_size, batch_size
        self.rank, self.world = rank, world
        self.n_windows = -(-(len(stream) - 1) // block_size)  # the last one may be short

    def __len__(self) -> int:
        return -(-self.n_windows // (self.batch_size * self.world))

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(index)
        T, rows = self.block_size, self.batch_size * self.world
        x = torch.zeros(self.batch_size, T, dtype=torch.int64)
        y = torch.full((self.batch_size, T), IGNORE_INDEX)
        windows = range(index * rows + self.rank, (index + 1) * rows, self.world)
        for row, start in enumerate(T * np.array(windows)):
            length = min(T, len(self.stream) - 1 - start)
            if length > 0:
                window = self.stream.windows(start[None], length + 1)  # (1, length + 1)
                x[row, :length], y[row, :length] = (part[0] for part in split_windows(window))
        return x, y
