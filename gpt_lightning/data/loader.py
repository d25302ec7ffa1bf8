"""Batches of windows: endless and resumable for training, a whole split for evaluation."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.windows import DatasetWindows
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields

Batch = tuple[torch.Tensor, torch.Tensor]  # tokens and the tokens that follow, int64 (B, T) each
EVALUATION = 2**64 - 1  # an epoch that training does not reach
NAMES = {"input_ids", "labels", "attention_mask"}
IGNORE_INDEX = -100  # target of a padded position: F.cross_entropy skips it by default


def split_windows(windows: np.ndarray) -> Batch:
    """Return inputs and targets of (B, T + 1) windows, (B, T) each; targets are one token later."""
    return torch.from_numpy(windows[:, :-1].copy()), torch.from_numpy(windows[:, 1:].copy())


def tokens_and_targets(batch: Any) -> Batch:
    """Return inputs and targets, int64 (B, T) each, of a batch of any loader.

    Args:
        batch: Inputs and targets; tokens, (B, T + 1); or, as in Hugging Face's transformers,
            {input_ids, labels} with labels at the place of their tokens, (B, T + 1) each.

    Raises:
        UserError: It is none of these, or has padding before its tokens.
    """
    named = isinstance(batch, Mapping) and {"input_ids", "labels"} <= set(batch) <= NAMES
    parts = batch if isinstance(batch, tuple | list) else (batch,)
    if named:
        parts = (batch["input_ids"], batch["labels"])
    unshifted = named or len(parts) == 1
    tensors = [p for p in parts if isinstance(p, torch.Tensor)]
    fits = 0 < len(tensors) == len(parts) < 3 and tensors[0].shape == tensors[-1].shape
    fits = fits and tensors[0].ndim == 2 and tensors[0].size(1) > unshifted
    fits = fits and all("int" in str(p.dtype) for p in tensors)
    if fits and named and (mask := batch.get("attention_mask")) is not None:
        fits = not (mask[:, 1:] > mask[:, :-1]).any()  # tokens would attend to padding before them
    if not fits:
        forms = [f"{p.dtype} {tuple(p.shape)}" for p in tensors]
        found = ", ".join(batch if isinstance(batch, Mapping) else forms)
        raise UserError(
            f"a batch is {type(batch).__name__} of {found or 'no tokens'}; expected (x, y), "
            "integers (B, T) each, tokens (B, T + 1), or a dict of input_ids, labels and "
            "attention_mask alone, (B, T + 1) each, padded on the right"
        )
    x, y = tensors[0].long(), tensors[-1].long()
    if unshifted:
        x, y = x[:, :-1].contiguous(), y[:, 1:].contiguous()
    return x, y


def limited(batches: int, limit: int | float) -> int:
    """Return the batches of an epoch that are read under a limit: a number, or a share of them."""
    return min(limit, batches) if isinstance(limit, int) else int(limit * batches)


def reading(
    batches: Dataset[Batch], indices: range, num_workers: int, pin_memory: bool
) -> "DataLoader[Batch]":
    """Return a loader of some batches, in the order of their indices."""
    return DataLoader(
        batches,
        batch_size=None,  # an item is a batch already
        sampler=indices,
        num_workers=num_workers,
        pin_memory=pin_memory,
        generator=torch.Generator(),  # else it draws from the run's generator at every epoch
    )


@dataclass(eq=False)
class TrainBatches(Dataset[Batch]):
    """Micro-batches of one rank in one epoch, by index.

    Global micro-batch m consists of the windows m B W .. (m + 1) B W - 1 of the order, for B
    sequences per rank and W ranks; rank r takes every W-th of them from r on. The union over ranks
    is therefore the same for every W.
    """

    source: DatasetWindows
    epoch: int
    batch_size: int
    rank: int
    world: int

    def __getitem__(self, index: int) -> Batch:
        return next(self.in_order(range(index, index + 1), read_tokens=0))

    def in_order(self, indices: range, read_tokens: int) -> Iterator[Batch]:
        """Yield batches of some indices; small ones are read together, up to read_tokens.

        A read of one batch takes 0.2 ms, which a step of 10 ms would wait for.
        """
        B, rows = self.batch_size, self.batch_size * self.world
        tokens = read_tokens if self.source.joins_reads else 0
        together = max(1, tokens // (B * self.source.block_size))
        for index in indices[::together]:
            count = min(together, indices.stop - index) * rows
            windows = self.source.read(self.epoch, index * rows, count, self.rank, self.world)
            x, y = split_windows(windows)
            yield from zip(x.split(B), y.split(B), strict=True)


@dataclass(eq=False, kw_only=True)
class Place:
    """Place of a process in the run, as far as its batches depend on it.

    Attributes:
        accumulate: Micro-batches an optimizer step.
        rank: Number of this process, of `world`.
        world: Number of processes that share the order.
        pin_memory: True for page-locked batches, for CUDA.
        limit: Batches of a training epoch that are read, or their share: its first ones.
        overfit: True if every training epoch reads the batches of the first.
    """

    accumulate: int = 1
    rank: int = 0
    world: int = 1
    pin_memory: bool = False
    limit: int | float = 1.0
    overfit: bool = False


@dataclass(eq=False)
class TrainLoader(Place):
    """Endless epochs of training batches, a sized and stateful iterable for Lightning.

    The position counts batches handed to the loop, not batches that workers have prefetched. It is
    saved in windows of the global order, so that it is valid for another number of ranks. An epoch
    is a multiple of the accumulation: no optimizer step reaches into the next epoch.

    Attributes:
        source: Windows in their global order.
        batch_size: Sequences per micro-batch and rank.
        num_workers: Processes that prefetch; 0 reads in the training process.
        read_tokens: Tokens that the training process reads at a time, if batches are smaller.
        epoch: Number of the epoch, 0 for the first.
        position: Batches of the epoch that were handed out.
        wait_s: Seconds waited for batches.
    """

    source: DatasetWindows
    batch_size: int
    num_workers: int = 0
    read_tokens: int = 16_384
    epoch: int = 0
    position: int = 0
    wait_s: float = 0.0

    def __len__(self) -> int:
        steps = self.source.n_windows // (self.batch_size * self.world * self.accumulate)
        return steps * self.accumulate

    @property
    def epoch_batches(self) -> int:
        """Batches of an epoch that are read."""
        return limited(len(self), self.limit)

    def _next_place(self) -> tuple[int, int]:
        """Return the epoch and the position of the next batch."""
        if self.position < self.epoch_batches:
            return self.epoch, self.position
        return self.epoch + (not self.overfit), 0

    def fetch_step(self) -> None:
        """Wait for the shards of the coming step, so that an outage shows before it begins.

        Raises:
            OutageError: A shard did not come within data.patience.
        """
        epoch, position = self._next_place()
        rows = self.batch_size * self.world
        n = min(self.accumulate, self.epoch_batches - position)
        began = time.perf_counter()
        self.source.fetch(epoch, position * rows, n * rows)
        self.wait_s += time.perf_counter() - began

    def __iter__(self) -> Iterator[Batch]:
        end = self.epoch_batches
        self.epoch, self.position = self._next_place()
        batches = TrainBatches(self.source, self.epoch, self.batch_size, self.rank, self.world)
        indices = range(self.position, end)
        if self.num_workers == 0 and not self.pin_memory:
            batches_read = batches.in_order(indices, self.read_tokens)
        else:
            batches_read = iter(reading(batches, indices, self.num_workers, self.pin_memory))
        while self.position < end:
            began = time.perf_counter()
            batch = next(batches_read)
            self.wait_s += time.perf_counter() - began
            self.position += 1
            yield batch

    def state_dict(self) -> Fields:
        """Return the epoch, and the windows of it that were handed out, over all ranks."""
        return {"epoch": self.epoch, "window": self.position * self.batch_size * self.world}

    def load_state_dict(self, state: Fields) -> None:
        if "window" not in state:
            raise UserError("the checkpoint was trained in another order: set --data.order nanogpt")
        rows = self.batch_size * self.world  # a batch that was read in part is read again
        self.epoch, self.position = state["epoch"], state["window"] // rows

    def identity(self) -> Fields:
        """Return what decides the order of the batches; equal ones read equal batches."""
        identity = {
            "sequences a micro-batch": self.batch_size * self.world,
            "micro-batches a step": self.accumulate,
            **self.source.identity(),
        }
        if self.epoch_batches < len(self) or self.overfit:
            key = f"trainer.{'overfit' if self.overfit else 'limit_train'}_batches"
            identity[key] = self.epoch_batches
        return identity


class EvalLoader:
    """Batches of an evaluation on this rank, a sized iterable for Lightning.

    Not a DataLoader: in those, Lightning replaces the sampler by one that gives each rank its share
    of the batches (use_distributed_sampler, on by default) or its order (overfit_batches). Here the
    batches of a rank are its share already.

    Args:
        batches: Batches by index.
        n_batches: Number of them that is read.
        num_workers: Processes that prefetch; 0 reads in the training process.
        pin_memory: True for page-locked batches, for CUDA.
    """

    def __init__(self, batches: Dataset[Batch], n_batches: int, num_workers: int, pin_memory: bool):
        self.dataset = batches
        self._loader = reading(batches, range(n_batches), num_workers, pin_memory)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Batch]:
        yield from self._loader  # workers start at the first batch


@dataclass(eq=False)
class EvalBatches(Dataset[Batch]):
    """Whole split in batches of one shape: each of its n - 1 predictions exactly once.

    The last window and the last batch are padded with positions whose target is IGNORE_INDEX.
    """

    stream: TokenStream
    block_size: int
    batch_size: int
    rank: int = 0
    world: int = 1

    def __len__(self) -> int:
        predictions, rows = len(self.stream) - 1, self.batch_size * self.world
        return -(-predictions // (self.block_size * rows))  # the last batch may be short

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
