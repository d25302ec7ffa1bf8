"""Orders of windows: pure functions of (seed, epoch, index).

A window is T inputs and the token after them, T + 1 tokens in all; neighbours share the border
token. A split of n tokens holds (n - 1) // T whole windows, which tile it across shard borders.
No function depends on ranks, workers or earlier reads.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np

OrderName = Literal["sequential", "random", "shuffled", "repeat"]
SHUFFLE_WINDOWS = 16_384


@dataclass(frozen=True)
class WindowOrder:
    """Global order of a split's windows.

    `shuffled` visits each window once per epoch. Up to shuffle_windows of them are permuted as a
    whole. More are read shard after shard, in a new order of the shards every epoch, and permuted
    within groups of shuffle_windows along that order: a group touches few shards, so that a corpus
    larger than the disk can be streamed.

    Args:
        name: sequential: front to back. shuffled: each window once per epoch, a new permutation
            every epoch. random: starts drawn anywhere, with replacement, as in nanoGPT; an epoch
            is as many windows as fit side by side. repeat: the split's first windows in every
            batch.
        n_tokens: Length of the split.
        block_size: Tokens T a window.
        seed: Seed of the draws.
        shard_tokens: Tokens of each shard, in the order of the text; empty: one shard.
        shuffle_windows: Size of a group.
    """

    name: OrderName
    n_tokens: int
    block_size: int
    seed: int
    shard_tokens: tuple[int, ...] = ()
    shuffle_windows: int = SHUFFLE_WINDOWS

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        return (self.n_tokens - 1) // self.block_size

    def starts(self, epoch: int, first: int, count: int) -> np.ndarray:
        """Return the starts of the epoch's windows first .. first + count - 1, int64 (count,)."""
        if self.name == "random":
            return self._random_starts(epoch, first, count)
        if self.name == "shuffled":
            return self._shuffled(epoch, first, count) * self.block_size
        index = np.arange(count) if self.name == "repeat" else np.arange(first, first + count)
        return index * self.block_size

    def _random_starts(self, epoch: int, first: int, count: int) -> np.ndarray:
        # Philox is counter-based: draw i of a key needs none of the i - 1 before it. It yields
        # four 64-bit words a counter. The modulo's bias is below n_tokens / 2^64.
        bits = np.random.Philox(key=np.array([self.seed, epoch], np.uint64), counter=first // 4)
        words = bits.random_raw(first % 4 + count)[first % 4 :]
        return (words % np.uint64(self.n_tokens - self.block_size)).astype(np.int64)

    def _shuffled(self, epoch: int, first: int, count: int) -> np.ndarray:
        """Return numbers of windows, int64 (count,)."""
        if self.n_windows <= self.shuffle_windows:
            whole = _permutation((self.seed, epoch), self.n_windows)
            part: np.ndarray = whole[first : first + count]
            return part
        size, last = self.shuffle_windows, min(first + count, self.n_windows)
        places = []  # along the epoch's order of shards
        for group in range(first // size, -(-last // size)):
            begin, end = group * size, min((group + 1) * size, self.n_windows)
            inside = _permutation((self.seed, epoch, group), end - begin)
            places.append(begin + inside[max(first - begin, 0) : last - begin])
        return self._windows_at(epoch, np.concatenate(places))

    def _windows_at(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the numbers of the windows at places along the epoch's order of shards."""
        firsts = self._first_windows()  # shard s has the windows firsts[s] .. firsts[s + 1] - 1
        order = _permutation((self.seed, epoch, -1 % 2**32), len(firsts) - 1)
        counts = np.diff(firsts)[order]
        ends = np.cumsum(counts)
        nth = np.searchsorted(ends, places, side="right")
        found: np.ndarray = firsts[order[nth]] + places - (ends - counts)[nth]
        return found

    def _first_windows(self) -> np.ndarray:
        """Return the first window that starts in each shard, and n_windows; int64 (shards + 1,)."""
        begins = np.cumsum([0, *(self.shard_tokens or (self.n_tokens,))])
        firsts: np.ndarray = np.minimum(-(-begins // self.block_size), self.n_windows)
        return firsts


@functools.lru_cache(maxsize=8)
def _permutation(key: tuple[int, ...], n: int) -> np.ndarray:
    shuffled: np.ndarray = np.random.Generator(np.random.PCG64(list(key))).permutation(n)
    return shuffled
