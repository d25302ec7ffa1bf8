"""Readers: opened datasets become the batches of one rank.

WindowReader reads windows in an order that is a pure function of (seed, epoch, index);
NanoGPTReader draws them from one generator, in nanoGPT's sequence of draws.
TokenDataModule chooses one of the two.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.loader import (
    EVALUATION,
    Batch,
    EvalBatches,
    EvalLoader,
    TrainBatches,
    TrainLoader,
)
from gpt_lightning.data.order import OrderName, WindowOrder
from gpt_lightning.data.settings import DataSettings
from gpt_lightning.data.shards import DatasetWindows, TokenStream
from gpt_lightning.errors import UserError

if TYPE_CHECKING:
    from gpt_lightning.data.mixture import WindowSource
    from gpt_lightning.data.nanogpt_batches import NanoGPTLoader


@dataclass(frozen=True)
class Place:
    """Place of this process in the run, as far as its batches depend on it.

    Attributes:
        accumulate: Micro-batches an optimizer step.
        rank: Number of this process.
        world: Number of processes that share the order.
        pin_memory: True for page-locked batches, for CUDA.
        limit: Batches of a training epoch that are read, or their share.
        overfit: True if every training epoch reads the batches of the first.
        nodes: Number of machines; process r is on the machine r % nodes.
    """

    accumulate: int
    rank: int
    world: int
    pin_memory: bool
    limit: int | float
    overfit: bool
    nodes: int = 1


class Reader(abc.ABC):
    """Loaders of one rank over opened datasets.

    Args:
        datasets: Address -> dataset; evaluation reads the first.
        settings: Data arguments, with block_size and seed set.
        place: Place of this process in the run.
    """

    def __init__(
        self, datasets: Mapping[str, TokenDataset], settings: DataSettings, place: Place
    ) -> None:
        assert settings.block_size is not None
        assert settings.seed is not None
        self.datasets, self.settings, self.place = datasets, settings, place
        self.block_size: int = settings.block_size
        self.batch_size: int = settings.batch_size
        self.eval_batch_size: int = settings.eval_batch_size or settings.batch_size
        self.seed: int = settings.seed

    @property
    @abc.abstractmethod
    def train_loader(self) -> "TrainLoader | NanoGPTLoader":
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

    @functools.cached_property
    def train_streams(self) -> dict[str, TokenStream]:
        """Tokens of the train split of each dataset, by address."""
        T, datasets = self.block_size, self.datasets.items()
        return {address: dataset.stream("train", T) for address, dataset in datasets}

    def stamps(self) -> dict[str, str]:
        """Return the stamp of each dataset's training shards, where there is one."""
        stamps = {key: stream.stamp for key, stream in self._streams_by_key().items()}
        return {key: stamp for key, stamp in stamps.items() if stamp}

    def check_stamps(self, stamps: dict[str, str]) -> None:
        """Raise a UserError if a training shard was replaced since the stamps were taken."""
        for key, stream in self._streams_by_key().items():
            stream.check_stamp(stamps.get(key, ""))

    def _streams_by_key(self) -> dict[str, TokenStream]:
        """Return the training streams by their keys in `stamps`."""
        streams, mixture = self.train_streams.items(), self.settings.mixture
        return {f"{address}/*" if mixture else "*": stream for address, stream in streams}

    def stream(self, split: str) -> TokenStream:
        """Return the tokens of a split of the dataset that is evaluated.

        Raises:
            UserError: There is no such split, or it is shorter than a window.
        """
        return next(iter(self.datasets.values())).stream(split, self.block_size)

    def eval_loaders(self) -> list[EvalLoader]:
        """Return a loader of the validation split, or of random batches of val and of train."""
        n = self.settings.eval_batches
        if n is None:
            return [self.split_loader("val")]
        sizes = {"val": n, "train": self.settings.eval_train_batches or n}
        return [self._loader(self.samples(split), size) for split, size in sizes.items()]

    def split_loader(self, split: str) -> EvalLoader:
        """Return a loader that reads every token of a split once."""
        rank, world = self.place.rank, self.place.world
        batches = EvalBatches(
            self.stream(split), self.block_size, self.eval_batch_size, rank, world
        )
        return self._loader(batches, len(batches))

    def _loader(self, batches: Dataset[Batch], n_batches: int) -> EvalLoader:
        workers, pin_memory = self.settings.num_workers, self.place.pin_memory
        return EvalLoader(batches, n_batches, workers, pin_memory)


class WindowReader(Reader):
    """Batches of windows in one of the orders of WindowOrder, from one dataset or a mixture."""

    @functools.cached_property
    def train_loader(self) -> TrainLoader:
        B, place = self.batch_size, self.place
        fields = dataclasses.asdict(place)
        del fields["nodes"]
        workers = self.settings.num_workers
        loader = TrainLoader(self._training_source(), B, **fields, num_workers=workers)
        if len(loader) == 0:
            raise UserError(
                f"a step takes {B} x {place.accumulate} x {place.world} windows "
                "(data.batch_size x accumulation x ranks), but the train split of "
                f"{' + '.join(self.datasets)} has {loader.source.n_windows}: lower one of the "
                "factors, or give more text"
            )
        return loader

    def _training_source(self) -> "WindowSource":
        order, weights = self.settings.order, self.settings.mixture
        assert order != "nanogpt"
        windows = {
            address: self._windows(stream, order, self.place.nodes)
            for address, stream in self.train_streams.items()
        }
        if not weights:
            return next(iter(windows.values()))
        from gpt_lightning.data.mixture import Mixture  # one dataset needs none

        return Mixture(windows, weights, self.seed, self.place.nodes)

    def _windows(self, stream: TokenStream, name: OrderName, lanes: int = 1) -> DatasetWindows:
        shards = stream.shard_tokens
        order = WindowOrder(name, len(stream), self.block_size, self.seed, shards)
        if name == "shuffled" and stream.horizon(self.block_size):
            lanes = min(lanes, len(shards))
            blocks, note = stream.shuffle_blocks(self.block_size, lanes)
            if note and self.place.rank == 0:
                print(note)
            order = dataclasses.replace(order, blocks=blocks, lanes=lanes)
        stream.nodes = self.place.nodes
        stream.check_order(order)
        return DatasetWindows(stream, order)

    def keep_shuffle(self, theirs: dict[str, Any]) -> None:
        """Go on in the blocks and lanes of a checkpoint.

        Args:
            theirs: Identity of the loader in the checkpoint.

        Raises:
            UserError: The cache of a stream is too small for it.
        """
        self.train_loader.source.keep_shuffle(theirs)

    def samples(self, split: str) -> Dataset[Batch]:
        """Return random batches of a split, equal at every evaluation."""
        source, place = self._windows(self.stream(split), "random"), self.place
        return TrainBatches(source, EVALUATION, self.eval_batch_size, place.rank, place.world)

    def position(self) -> dict[str, int]:
        """Return the epoch, and the windows of it that have been handed out."""
        return {"epoch": self.train_loader.epoch, "window": self.train_loader.window}

    def shares(self) -> dict[str, float]:
        loader = self.train_loader
        return loader.source.shares(loader.epoch, loader.window)


class NanoGPTReader(Reader):
    """Batches that nanoGPT's program would draw, in training and evaluation.

    Raises:
        UserError: There are several processes, or batches are to be repeated.
    """

    def __init__(
        self, datasets: Mapping[str, TokenDataset], settings: DataSettings, place: Place
    ) -> None:
        super().__init__(datasets, settings, place)
        if place.world > 1:
            raise UserError("data.order nanogpt runs in one process only: set --data.order random")
        if place.overfit:
            raise UserError(
                "trainer.overfit_batches: data.order nanogpt draws every batch anew: "
                "set --data.order shuffled"
            )

    @functools.cached_property
    def train_loader(self) -> "NanoGPTLoader":
        from gpt_lightning.data.nanogpt_batches import NanoGPTLoader  # not for other orders

        streams = {"train": next(iter(self.train_streams.values())), "val": self.stream("val")}
        for stream in streams.values():
            stream.is_random = True
        return NanoGPTLoader(streams, self.settings, self.place.accumulate)

    def samples(self, split: str) -> Dataset[Batch]:
        """Return the batches of one evaluation of a split; reading them draws them."""
        from gpt_lightning.data.nanogpt_batches import NanoGPTEvalBatches

        return NanoGPTEvalBatches(self.train_loader, split)
