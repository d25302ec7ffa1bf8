"""Readers: opened datasets become the batches of one rank.

WindowReader reads windows in an order that is a pure function of (seed, epoch, index);
nanogpt_batches.NanoGPTReader draws them from one generator, in nanoGPT's sequence of draws.
TokenDataModule chooses one of the two.
"""

import abc
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.loader import EVALUATION, Batch, EvalBatches, TrainBatches, TrainLoader
from gpt_lightning.data.mixture import DatasetWindows, Mixture, WindowSource
from gpt_lightning.data.order import OrderName, WindowOrder
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError


class TrainingLoader(Protocol):
    """Sized, stateful iterable of training batches, which counts what it has handed out."""

    wait_s: float  # that the loop has waited for batches

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what identifies the data and its order."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position; raise UserError if the data or its order is another."""
        ...


@dataclass(frozen=True)
class Batching:
    """Sizes of batches, and the rank that reads them.

    Attributes:
        block_size: Tokens T a sequence.
        batch_size: Sequences B a micro-batch and rank.
        eval_batch_size: Sequences a validation batch and rank.
        eval_batches: Random batches of each split at an evaluation; None: the whole split.
        accumulate: Micro-batches an optimizer step.
        rank: Number of this process.
        world: Number of processes that share the order.
        num_workers: Processes that read ahead; 0 reads in the training process.
        pin_memory: Whether batches are page-locked, for CUDA.
        allow_changes: Whether a checkpoint of another order or batch size may be resumed.
    """

    block_size: int
    batch_size: int
    eval_batch_size: int
    eval_batches: int | None
    accumulate: int
    rank: int
    world: int
    num_workers: int
    pin_memory: bool
    allow_changes: bool


class Reader(abc.ABC):
    """Loaders of one rank over opened datasets.

    Args:
        datasets: Address -> dataset; evaluation reads the first.
        batching: Sizes and rank.
    """

    def __init__(self, datasets: Mapping[str, TokenDataset], batching: Batching) -> None:
        self.datasets, self.batching = datasets, batching

    @property
    @abc.abstractmethod
    def train_loader(self) -> TrainingLoader:
        """Endless training batches, whose position a checkpoint holds; one object a reader."""

    @abc.abstractmethod
    def samples(self, split: str) -> Dataset[Batch]:
        """Return random batches of a split for an evaluation, by index."""

    def position(self) -> dict[str, int]:
        """Return the position of training in the data; empty where there are no epochs."""
        return {}

    def shares(self) -> dict[str, float]:
        """Return each dataset's share of the samples so far, by name; empty without a mixture."""
        return {}

    def stream(self, split: str) -> TokenStream:
        """Return the tokens of a split of the dataset that is evaluated.

        Raises:
            UserError: There is no such split, or it is shorter than a window.
        """
        return next(iter(self.datasets.values())).stream(split, self.batching.block_size)

    def eval_loaders(self) -> list[DataLoader[Batch]]:
        """Return a loader of the whole validation split, or eval_batches of val and of train."""
        n = self.batching.eval_batches
        if n is None:
            return [self.split_loader("val")]
        return [self._loader(self.samples(split), range(n)) for split in ("val", "train")]

    def split_loader(self, split: str) -> DataLoader[Batch]:
        """Return a loader that reads every token of a split once."""
        sizes = self.batching
        batches = EvalBatches(
            self.stream(split), sizes.block_size, sizes.eval_batch_size, sizes.rank, sizes.world
        )
        return self._loader(batches, range(len(batches)))

    def _loader(self, batches: Dataset[Batch], indices: range) -> DataLoader[Batch]:
        return DataLoader(
            batches,
            batch_size=None,  # an item is a batch already
            sampler=indices,
            num_workers=self.batching.num_workers,
            pin_memory=self.batching.pin_memory,
            generator=torch.Generator(),  # its own: evaluation must not move the run's dropout
        )


class WindowReader(Reader):
    """Batches of windows in one of the orders of WindowOrder, from one dataset or a mixture.

    Args:
        datasets: Address -> dataset; evaluation reads the first.
        batching: Sizes and rank.
        weights: Address -> weight of a mixture; None: there is one dataset.
        order: Order of the training windows.
        seed: Seed of the order.
        shuffle_windows: Windows that the order `shuffled` permutes together.
    """

    def __init__(
        self,
        datasets: Mapping[str, TokenDataset],
        batching: Batching,
        weights: dict[str, float] | None,
        order: OrderName,
        seed: int,
        shuffle_windows: int,
    ) -> None:
        super().__init__(datasets, batching)
        self.weights, self.order, self.seed = weights, order, seed
        self.shuffle_windows = shuffle_windows

    @functools.cached_property
    def train_loader(self) -> TrainLoader:
        sizes = self.batching
        loader = TrainLoader(
            self._training_source(),
            batch_size=sizes.batch_size,
            accumulate=sizes.accumulate,
            rank=sizes.rank,
            world=sizes.world,
            num_workers=sizes.num_workers,
            pin_memory=sizes.pin_memory,
            allow_changes=sizes.allow_changes,
        )
        if len(loader) == 0:
            raise UserError(
                f"a step takes {sizes.batch_size} x {sizes.accumulate} x {sizes.world} windows "
                "(data.batch_size x accumulation x ranks), but the train split of "
                f"{' + '.join(self.datasets)} has {loader.source.n_windows}: lower data.batch_size"
            )
        return loader

    def _training_source(self) -> WindowSource:
        windows = {}
        for address, dataset in self.datasets.items():
            stream = dataset.stream("train", self.batching.block_size)
            windows[address] = DatasetWindows(stream, self._order(self.order, stream))
        if self.weights is None:
            return next(iter(windows.values()))
        return Mixture(windows, self.weights, self.seed)

    def _order(self, name: OrderName, stream: TokenStream) -> WindowOrder:
        return WindowOrder(
            name,
            len(stream),
            self.batching.block_size,
            self.seed,
            stream.shard_tokens,
            self.shuffle_windows,
        )

    def samples(self, split: str) -> Dataset[Batch]:
        """Return random batches of a split, equal at every evaluation."""
        stream, sizes = self.stream(split), self.batching
        source = DatasetWindows(stream, self._order("random", stream))
        return TrainBatches(source, EVALUATION, sizes.eval_batch_size, sizes.rank, sizes.world)

    def position(self) -> dict[str, int]:
        """Return the epoch, and the windows of it that have been handed out."""
        return {"epoch": self.train_loader.epoch, "window": self.train_loader.window}

    def shares(self) -> dict[str, float]:
        loader, mixture = self.train_loader, self.train_loader.source
        if not isinstance(mixture, Mixture):
            return {}
        samples = loader.epoch * mixture.n_windows + loader.window
        counts = mixture.counts(samples)
        return dict(zip(mixture.names, (counts / max(1, samples)).tolist(), strict=True))
