"""Orders of windows: pure functions of (seed, epoch, index).

A window is T inputs and the token after them, T + 1 tokens in all; neighbours share the border
token. A split of n tokens holds (n - 1) // T whole windows, which tile it across shard borders.
No function depends on ranks, workers or earlier reads.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

OrderName = Literal["sequential", "random", "shuffled", "repeat"]
TABLE_WINDOWS = 16_384  # largest permutation that is drawn as one table
Key = tuple[int, ...]  # numbers that decide a draw
INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # difference of two successive states of SplitMix64
# last numbers of the keys of draws, beyond those of shards
OFFSET = 2**32 - 2
SHARDS = 2**32 - 3


class _Layout(NamedTuple):
    """Shards in the order in which an epoch reads them; int64 each.

    Attributes:
        shards: Number of each shard.
        begins: Its first token in the split.
        tokens: Its tokens.
        windows: Its whole windows.
        ends: Windows of the epoch up to its last one.
    """

    shards: np.ndarray
    begins: np.ndarray
    tokens: np.ndarray
    windows: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class WindowOrder:
    """Global order of a split's windows.

    `shuffled` visits each window once per epoch, in a permutation of all windows that is computed
    window by window: it needs no memory. From the second epoch on, the borders between windows are
    others: the first window starts at a drawn token below T. Less than T tokens, at the beginning
    or at the end, are then left out, and less than T read twice.

    With `shard_tokens`, for a dataset behind a URL, `shuffled` reads one shard after the other, in
    a drawn order, and permutes the windows of each. No window crosses the border of a shard.

    Args:
        name: sequential: front to back. shuffled: each window once per epoch, a new permutation
            every epoch. random: starts drawn anywhere, with replacement, as in nanoGPT; an epoch
            is as many windows as fit side by side. repeat: the split's first windows in every
            batch.
        n_tokens: Length of the split.
        block_size: Tokens T a window.
        seed: Seed of the draws.
        shard_tokens: Tokens of each shard, in the order of the text; empty: `shuffled` permutes all
            windows together.
    """

    name: OrderName
    n_tokens: int
    block_size: int
    seed: int
    shard_tokens: tuple[int, ...] = ()

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        if self.name == "shuffled" and self.shard_tokens:
            return int(self._layout(0).ends[-1])
        return (self.n_tokens - 1) // self.block_size

    def starts(self, epoch: int, first: int, count: int) -> np.ndarray:
        """Return the starts of the epoch's windows first .. first + count - 1, int64 (count,)."""
        if self.name == "random":
            # Philox is counter-based: draw i of a key needs none of the i - 1 before it. It yields
            # four 64-bit words a counter. The modulo's bias is below n_tokens / 2^64.
            key = np.array([self.seed, epoch], np.uint64)
            bits = np.random.Philox(key=key, counter=first // 4)
            words = bits.random_raw(first % 4 + count)[first % 4 :]
            return (words % np.uint64(self.n_tokens - self.block_size)).astype(np.int64)
        if self.name == "shuffled":
            places = np.arange(first, min(first + count, self.n_windows))
            return (self._by_shard if self.shard_tokens else self._shuffled)(epoch, places)
        begin = 0 if self.name == "repeat" else first
        return np.arange(begin, begin + count) * self.block_size

    # ---- shuffled ------------------------------------------------------------------------------

    def _offset(self, epoch: int) -> int:
        """Return the start of the epoch's first window; 0 in the first epoch."""
        return int(generator(self.seed, epoch, OFFSET).integers(self.block_size)) if epoch else 0

    def _shuffled(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the starts of the windows at places in the epoch's order, int64 like places."""
        T = self.block_size
        key, n = (self.seed, epoch), self.n_windows
        table = n <= TABLE_WINDOWS
        windows = _permutation(key, n)[places] if table else permuted(key, n, places)
        return np.minimum(self._offset(epoch) + windows * T, self.n_tokens - 1 - T)

    def _by_shard(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the starts of the windows at places in an epoch that reads shard after shard."""
        layout = self._layout(epoch)
        turns = np.searchsorted(layout.ends, places, side="right")
        windows = places - (layout.ends - layout.windows)[turns]
        for turn in np.unique(turns):
            key = (self.seed, epoch, int(layout.shards[turn]))
            here = turns == turn
            windows[here] = permuted(key, int(layout.windows[turn]), windows[here])
        starts = self._offset(epoch) + windows * self.block_size
        last_starts = layout.tokens - 1 - self.block_size
        return layout.begins[turns] + np.minimum(starts, last_starts[turns])

    @lru_cache(maxsize=4)  # noqa: B019 orders are small
    def _layout(self, epoch: int) -> _Layout:
        shards = generator(self.seed, epoch, SHARDS).permutation(len(self.shard_tokens))
        tokens = np.array(self.shard_tokens)
        windows = np.maximum(tokens - 1, 0) // self.block_size
        begins = np.cumsum(tokens) - tokens
        ends = np.cumsum(windows[shards])
        return _Layout(shards, begins[shards], tokens[shards], windows[shards], ends)


def permuted(key: Key, n: int, places: np.ndarray) -> np.ndarray:
    """Return where a permutation of 0 .. n - 1 has sent places, int64 like places, without a table.

    A Feistel network permutes the numbers of an even number of bits. A number from n on is sent on
    until it is below n, which permutes those below n.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out = places.astype(np.uint64)
    todo = np.arange(len(out))
    while len(todo):
        left, right = out[todo] >> half, out[todo] & mask
        for round_key in _round_keys(key):
            left, right = right, left ^ (splitmix64(right + round_key) & mask)
        out[todo] = left << half | right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


def splitmix64(words: np.ndarray) -> np.ndarray:
    """Return SplitMix64's finalizer (Steele, Lea and Flood 2014) of words, uint64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


@lru_cache(maxsize=256)
def _round_keys(key: Key) -> np.ndarray:
    return np.random.SeedSequence(key).generate_state(6, np.uint64)


def generator(*key: int) -> np.random.Generator:
    """Return a generator whose draws depend on some numbers alone."""
    return np.random.Generator(np.random.PCG64(key))


@lru_cache(maxsize=8)
def _permutation(key: Key, n: int) -> np.ndarray:
    return generator(*key).permutation(n)
