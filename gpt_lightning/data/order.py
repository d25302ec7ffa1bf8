"""In which order windows of tokens are read: pure functions of (seed, epoch, index).

A window is T inputs and the token after them, T + 1 tokens in all; neighbours share the border
token. A split of n tokens holds (n - 1) // T whole windows. Nothing here depends on ranks, workers
or what was read before.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

OrderName = Literal["sequential", "random", "shuffled", "repeat"]


@dataclass(frozen=True)
class WindowOrder:
    """The global order of a split's windows.

    Args:
        name: sequential: front to back. shuffled: each window once an epoch, a new permutation
            every epoch. random: starts drawn anywhere, with replacement, as nanoGPT does; an epoch
            is as many windows as fit side by side. repeat: the split's first windows, the same in
            every batch.
        n_tokens: length of the split.
        block_size: T.
        seed: of the draws.
    """

    name: OrderName
    n_tokens: int
    block_size: int
    seed: int

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        return (self.n_tokens - 1) // self.block_size

    def starts(self, epoch: int, first: int, count: int) -> np.ndarray:
        """Where the epoch's windows first .. first + count - 1 start, in tokens; int64 (count,)."""
        if self.name == "random":
            return self._random_starts(epoch, first, count)
        index = np.arange(count) if self.name == "repeat" else np.arange(first, first + count)
        if self.name == "shuffled":
            index = _permutation(self.seed, epoch, self.n_windows)[first : first + count]
        return index * self.block_size

    def _random_starts(self, epoch: int, first: int, count: int) -> np.ndarray:
        # Philox is counter-based: draw i of a key can be had without the i - 1 before it. It gives
        # four 64-bit words a counter. The modulo's bias is below n_tokens / 2^64.
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64), counter=first // 4)
        words = bits.random_raw(first % 4 + count)[first % 4 :]
        return (words % np.uint64(self.n_tokens - self.block_size)).astype(np.int64)


@functools.lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, n: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(n)
