"""Readers: an opened dataset becomes the batches of one rank.

Windows are read in an order that is a pure function of (seed, epoch, index), or drawn as nanoGPT's
program does.

That program has one generator of random numbers on the CPU, seeded once. The weights are drawn
first, then the first training batch, then, at step 0 and at every evaluation after it, batches of
the training split and as many of the validation split; the training batch of the coming step is
always drawn before an evaluation. Kept in this order, the seed 1337 gives its published losses at
step 0 digit by digit. Source: train.py in https://github.com/karpathy/nanoGPT.
"""

import dataclasses
import functools
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.loader import (
    EVALUATION,
    Batch,
    EvalBatches,
    EvalLoader,
    Place,
    TrainBatches,
    TrainLoader,
    split_windows,
)
from gpt_lightning.data.order import OrderName, WindowOrder
from gpt_lightning.data.settings import DataSettings
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.windows import DatasetWindows
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields


@dataclasses.dataclass(eq=False)
class Reader:
    """Loaders of one rank over an opened dataset, with data.order nanogpt of nanoGPT's batches.

    Args:
        dataset: The dataset.
        settings: Data arguments, with block_size and seed set.
        place: Place of this process in the run.
        val_text: Dataset whose train split is the text of data.val_text_file; None: there is none.
    """

    dataset: TokenDataset
    settings: DataSettings
    place: Place
    val_text: TokenDataset | None = None

    def __post_init__(self) -> None:
        settings = self.settings
        assert settings.block_size
        assert settings.seed is not None
        self.block_size = settings.block_size
        self.eval_batch_size = settings.eval_batch_size or settings.batch_size
        self.seed = settings.seed

    @functools.cached_property
    def train_loader(self) -> "TrainLoader | NanoGPTLoader":
        """Endless training batches, whose position a checkpoint holds."""
        if self.settings.order == "nanogpt":
            return self._nanogpt_loader()
        B, place = self.settings.batch_size, self.place
        workers = self.settings.num_workers
        windows = self._windows(self.train_stream, self.settings.order)
        loader = TrainLoader(windows, B, **vars(place), num_workers=workers)
        if len(loader) == 0:
            raise UserError(
                f"a step takes {B} x {place.accumulate} x {place.world} windows "
                "(data.batch_size x accumulation x ranks), but the train split of "
                f"{self.dataset.address} has {windows.n_windows}: lower one of the "
                "factors, or give more text"
            )
        return loader

    def _nanogpt_loader(self) -> "NanoGPTLoader":
        if self.place.world > 1:
            raise UserError("data.order nanogpt runs in one process only: set --data.order random")
        if self.place.overfit:
            raise UserError(
                "trainer.overfit_batches: data.order nanogpt draws every batch anew: "
                "set --data.order shuffled"
            )
        streams = {"train": self.train_stream, "val": self.stream("val")}
        for stream in streams.values():
            stream.is_random = True
        return NanoGPTLoader(streams, self.settings, self.place.accumulate)

    def samples(self, split: str) -> Dataset[Batch]:
        """Return random batches of a split, equal at every evaluation; nanoGPT's are drawn anew."""
        if self.settings.order == "nanogpt":
            assert isinstance(self.train_loader, NanoGPTLoader)
            return NanoGPTEvalBatches(self.train_loader, split)
        source, place = self._windows(self.stream(split), "random"), self.place
        return TrainBatches(source, EVALUATION, self.eval_batch_size, place.rank, place.world)

    @functools.cached_property
    def train_stream(self) -> TokenStream:
        """Tokens of the train split."""
        return self.stream("train")

    def stream(self, split: str) -> TokenStream:
        """Return the tokens of a split.

        Raises:
            UserError: There is no such split, or it is shorter than a window.
        """
        if split == "val" and self.val_text:
            return self.val_text.stream("train", self.block_size)
        return self.dataset.stream(split, self.block_size)

    def eval_loaders(self) -> list[EvalLoader]:
        """Return a loader of the validation split, or of random batches of val and of train."""
        n = self.settings.eval_batches
        if not n:
            return [self.split_loader("val")]
        sizes = {"val": n, "train": self.settings.eval_train_batches or n}
        return [self._loader(self.samples(split), size) for split, size in sizes.items()]

    def split_loader(self, split: str) -> EvalLoader:
        """Return a loader that reads every token of a split once."""
        stream, T, world = self.stream(split), self.block_size, self.place.world
        rows = -(-(len(stream) - 1) // (T * world))  # windows of a rank, without padding
        batches = EvalBatches(stream, T, min(self.eval_batch_size, rows), self.place.rank, world)
        return self._loader(batches, len(batches))

    def _loader(self, batches: Dataset[Batch], n_batches: int) -> EvalLoader:
        workers, pin_memory = self.settings.num_workers, self.place.pin_memory
        return EvalLoader(batches, n_batches, workers, pin_memory)

    def _windows(self, stream: TokenStream, name: OrderName) -> DatasetWindows:
        by_shard = stream.is_remote and name == "shuffled"
        shards = stream.shard_tokens if by_shard else ()
        order = WindowOrder(name, len(stream), self.block_size, self.seed, shards)
        return DatasetWindows(stream, order)


# ---- nanoGPT's batches -----------------------------------------------------------------------


class NanoGPTLoader:
    """Training and evaluation batches from one stream of draws, a sized, stateful iterable.

    The generator continues from the state in which the model's initialization left PyTorch's
    default generator, as a copy: dropout, which in nanoGPT's program on a CPU draws in between,
    does not move it here. The batches are therefore equal on every device (and equal to those of
    nanoGPT on a GPU). The draws have no epochs; the length is that of a pass over the split.

    Args:
        streams: Tokens of the splits `train` and `val`, in the order of an evaluation's draws.
        settings: Data arguments, with block_size set.
        accumulate: Micro-batches an optimizer step.
    """

    def __init__(
        self, streams: dict[str, TokenStream], settings: DataSettings, accumulate: int = 1
    ):
        assert settings.block_size
        self.streams, self.accumulate = streams, accumulate
        self.block_size = settings.block_size
        self.batch_size = settings.batch_size
        self.eval_batches = settings.eval_batches or 0
        self.wait_s = 0.0  # waited for batches
        self._generator: torch.Generator | None = None
        self._next: Tensor | None = None  # starts of the coming training batch
        self._evaluation: dict[str, list[Tensor]] = {}

    def __len__(self) -> int:
        windows = (len(self.streams["train"]) - 1) // self.block_size
        steps = windows // (self.batch_size * self.accumulate)
        return max(1, steps) * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            began = time.perf_counter()
            batch = self.training_batch()
            self.wait_s += time.perf_counter() - began
            yield batch

    def training_batch(self) -> Batch:
        """Return the next training batch, (B, T) each."""
        starts, self._next = self._hold_next(), None
        return self._batch("train", starts)

    def evaluation_batch(self, split: str, index: int) -> Batch:
        """Return batch `index` of an evaluation, (B, T) each; index 0 of `val` begins a new one."""
        if (split, index) == ("val", 0):
            self._hold_next()
            self._evaluation = {
                name: [self._draw(name) for _ in range(self.eval_batches)] for name in self.streams
            }
        return self._batch(split, self._evaluation[split][index])

    def _hold_next(self) -> Tensor:
        if self._next is None:
            self._next = self._draw("train")
        return self._next

    def _draw(self, split: str) -> Tensor:
        if not self._generator:
            self._generator = torch.default_generator.clone_state()
        last = len(self.streams[split]) - self.block_size
        return torch.randint(last, (self.batch_size,), generator=self._generator)

    def _batch(self, split: str, starts: Tensor) -> Batch:
        return split_windows(self.streams[split].windows(starts.numpy(), self.block_size + 1))

    def state_dict(self) -> Fields:
        generator = self._generator and self._generator.get_state()
        return {"generator": generator, "next": self._next}

    def load_state_dict(self, state: Fields) -> None:
        if "generator" not in state:
            raise UserError(
                "the checkpoint was trained with another data.order than nanogpt: set that order"
            )
        self._next = state["next"]
        drawn = state["generator"]
        self._generator = None if drawn is None else torch.Generator().set_state(drawn)

    def identity(self) -> Fields:
        """Return the settings that decide the batches, except the seed."""
        return {
            "micro-batches a step": self.accumulate,
            "dataset": self.streams["train"].digest,
            "data.order": "nanogpt",
            "data.block_size": self.block_size,
            "data.batch_size": self.batch_size,
            "data.eval_batches": self.eval_batches,
        }


@dataclasses.dataclass(eq=False)
class NanoGPTEvalBatches(Dataset[Batch]):
    """Batches of one evaluation of a split, by index."""

    loader: NanoGPTLoader
    split: str

    def __getitem__(self, index: int) -> Batch:
        return self.loader.evaluation_batch(self.split, index)
