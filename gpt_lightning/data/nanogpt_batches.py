"""nanoGPT's batches, draw by draw.

nanoGPT's program has one generator of random numbers on the CPU, seeded once. The weights are drawn
first, then the first training batch, then, at step 0 and at every evaluation after it, batches of
the training split and as many of the validation split; the training batch of the coming step is
always drawn before an evaluation. Kept in this order, the seed 1337 gives its published losses at
step 0 digit by digit. Source: train.py in https://github.com/karpathy/nanoGPT.
"""

import functools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import Dataset

from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.data.loader import Batch, split_windows
from gpt_lightning.data.readers import Place, Reader
from gpt_lightning.data.settings import DataSettings
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError


class NanoGPTDraws:
    """The one stream of draws that training and evaluation share.

    The generator takes over where the model's initialization has left PyTorch's default one, and is
    a copy: dropout, which in nanoGPT's program on a CPU draws in between, does not move it here, so
    that the batches are the same on every device (and those of nanoGPT on a GPU).

    Args:
        streams: the splits `train` and `val`.
        block_size: T.
        batch_size: B.
        eval_batches: batches of each split at an evaluation.
    """

    def __init__(
        self, streams: dict[str, TokenStream], block_size: int, batch_size: int, eval_batches: int
    ) -> None:
        self.streams, self.block_size = streams, block_size
        self.batch_size, self.eval_batches = batch_size, eval_batches
        self._generator: torch.Generator | None = None
        self._next: torch.Tensor | None = None  # starts of the coming training batch
        self._evaluation: dict[str, list[torch.Tensor]] = {}

    def _draw(self, split: str) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.Generator()
            self._generator.set_state(torch.get_rng_state())
        last = len(self.streams[split]) - self.block_size
        return torch.randint(last, (self.batch_size,), generator=self._generator)

    def _hold_next(self) -> torch.Tensor:
        if self._next is None:
            self._next = self._draw("train")
        return self._next

    def training_batch(self) -> Batch:
        """The coming training batch, (B, T) each."""
        starts = self._hold_next()
        self._next = None
        return self._batch("train", starts)

    def evaluation_batch(self, split: str, index: int) -> Batch:
        """Batch `index` of an evaluation, (B, T) each; index 0 of `val` begins a new evaluation."""
        if (split, index) == ("val", 0):
            self._hold_next()
            self._evaluation = {
                name: [self._draw(name) for _ in range(self.eval_batches)]
                for name in ("train", "val")
            }
        return self._batch(split, self._evaluation[split][index])

    def _batch(self, split: str, starts: torch.Tensor) -> Batch:
        return split_windows(self.streams[split].windows(starts.numpy(), self.block_size + 1))

    def identity(self) -> dict[str, Any]:
        """What decides the batches, beside the seed."""
        return {
            "dataset": self.streams["train"].digest,
            "data.order": "nanogpt",
            "data.block_size": self.block_size,
            "data.batch_size": self.batch_size,
            "data.eval_batches": self.eval_batches,
        }

    def state_dict(self) -> dict[str, Any]:
        generator = None if self._generator is None else self._generator.get_state()
        return {"generator": generator, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "generator" not in state:
            raise UserError(
                "the checkpoint was trained with another data.order than nanogpt: use its own"
            )
        self._next = state["next"]
        self._generator = None
        if state["generator"] is not None:
            self._generator = torch.Generator()
            self._generator.set_state(state["generator"])


class NanoGPTLoader:
    """Training batches as nanoGPT draws them; Lightning sees a sized, stateful iterable.

    There are no epochs in these draws; the length is what a pass over the split would take.
    """

    def __init__(self, draws: NanoGPTDraws, accumulate: int = 1) -> None:
        self.draws, self.accumulate = draws, accumulate
        self.wait_s = 0.0  # that the loop has waited for batches

    def __len__(self) -> int:
        windows = (len(self.draws.streams["train"]) - 1) // self.draws.block_size
        steps = windows // (self.draws.batch_size * self.accumulate)
        return max(1, steps) * self.accumulate

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(len(self)):
            began = time.perf_counter()
            batch = self.draws.training_batch()
            self.wait_s += time.perf_counter() - began
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.draws.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.draws.load_state_dict(state)

    def identity(self) -> dict[str, Any]:
        """Return what decides the batches, besides the seed."""
        return {"micro-batches a step": self.accumulate, **self.draws.identity()}

    def stamps(self) -> dict[str, list[int]]:
        """Return file -> size, inode and times of the shards."""
        return self.draws.streams["train"].stamps()

    def check_stamps(self, stamps: dict[str, list[int]]) -> None:
        """Raise a UserError if a shard was replaced since its stamp was taken."""
        self.draws.streams["train"].check_stamps(stamps)


class NanoGPTEvalBatches(Dataset[Batch]):
    """The batches of one evaluation of a split, by index."""

    def __init__(self, draws: NanoGPTDraws, split: str) -> None:
        self.draws, self.split = draws, split

    def __getitem__(self, index: int) -> Batch:
        return self.draws.evaluation_batch(self.split, index)


class NanoGPTReader(Reader):
    """Batches that nanoGPT's program would draw, in training and evaluation.

    Raises:
        UserError: There are several processes.
    """

    def __init__(
        self, datasets: Mapping[str, TokenDataset], settings: DataSettings, place: Place
    ) -> None:
        super().__init__(datasets, settings, place)
        if place.world > 1:
            raise UserError("data.order nanogpt is one process's: use --data.order random")

    @functools.cached_property
    def draws(self) -> NanoGPTDraws:
        """The one stream of draws that training and evaluation share."""
        streams = {split: self.stream(split) for split in ("train", "val")}
        n_eval = self.settings.eval_batches or 0
        return NanoGPTDraws(streams, self.block_size, self.batch_size, n_eval)

    @functools.cached_property
    def train_loader(self) -> NanoGPTLoader:
        return NanoGPTLoader(self.draws, self.place.accumulate)

    def samples(self, split: str) -> Dataset[Batch]:
        """Return the batches of one evaluation of a split; reading them draws them."""
        return NanoGPTEvalBatches(self.draws, split)
