"""Batches of nanoGPT's program, draw by draw.

nanoGPT's program has one generator of random numbers on the CPU, seeded once. The weights are drawn
first, then the first training batch, then, at step 0 and at every evaluation after it, batches of
the training split and as many of the validation split; the training batch of the coming step is
always drawn before an evaluation. Kept in this order, the seed 1337 gives its published losses at
step 0 digit by digit. Source: train.py in https://github.com/karpathy/nanoGPT.
"""

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from gpt_lightning.data.loader import Batch, split_windows
from gpt_lightning.data.settings import DataSettings
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError


class NanoGPTLoader:
    """Training and evaluation batches from one stream of draws, a sized, stateful iterable.

    The generator continues from the state in which the model's initialization left PyTorch's
    default generator, as a copy: dropout, which in nanoGPT's program on a CPU draws in between,
    does not move it here. The batches are therefore equal on every device (and equal to those of
    nanoGPT on a GPU). The draws have no epochs; the length is that of a pass over the split.

    Args:
        streams: Tokens of the splits `train` and `val`.
        settings: Data arguments, with block_size set.
        accumulate: Micro-batches an optimizer step.
    """

    def __init__(
        self, streams: dict[str, TokenStream], settings: DataSettings, accumulate: int = 1
    ) -> None:
        assert settings.block_size is not None
        self.streams, self.accumulate = streams, accumulate
        self.block_size: int = settings.block_size
        self.batch_size: int = settings.batch_size
        self.eval_batches = settings.eval_batches or 0
        self.wait_s = 0.0  # waited for batches
        self._generator: torch.Generator | None = None
        self._next: torch.Tensor | None = None  # starts of the coming training batch
        self._evaluation: dict[str, list[torch.Tensor]] = {}

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
        starts = self._hold_next()
        self._next = None
        return self._batch("train", starts)

    def evaluation_batch(self, split: str, index: int) -> Batch:
        """Return batch `index` of an evaluation, (B, T) each; index 0 of `val` begins a new one."""
        if (split, index) == ("val", 0):
            self._hold_next()
            self._evaluation = {
                name: [self._draw(name) for _ in range(self.eval_batches)]
                for name in ("train", "val")
            }
        return self._batch(split, self._evaluation[split][index])

    def _hold_next(self) -> torch.Tensor:
        if self._next is None:
            self._next = self._draw("train")
        return self._next

    def _draw(self, split: str) -> torch.Tensor:
        if self._generator is None:
            self._generator = torch.default_generator.clone_state()
        last = len(self.streams[split]) - self.block_size
        return torch.randint(last, (self.batch_size,), generator=self._generator)

    def _batch(self, split: str, starts: torch.Tensor) -> Batch:
        return split_windows(self.streams[split].windows(starts.numpy(), self.block_size + 1))

    def state_dict(self) -> dict[str, Any]:
        generator = None if self._generator is None else self._generator.get_state()
        return {"generator": generator, "next": self._next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "generator" not in state:
            raise UserError(
                "the checkpoint was trained with another data.order than nanogpt: set that order"
            )
        self._next = state["next"]
        drawn = state["generator"]
        self._generator = None if drawn is None else torch.Generator().set_state(drawn)

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the batches, except the seed."""
        return {
            "micro-batches a step": self.accumulate,
            "dataset": self.streams["train"].digest,
            "data.order": "nanogpt",
            "data.block_size": self.block_size,
            "data.batch_size": self.batch_size,
            "data.eval_batches": self.eval_batches,
        }


class NanoGPTEvalBatches(Dataset[Batch]):
    """Batches of one evaluation of a split, by index."""

    def __init__(self, loader: NanoGPTLoader, split: str) -> None:
        self.loader, self.split = loader, split

    def __getitem__(self, index: int) -> Batch:
        return self.loader.evaluation_batch(self.split, index)
