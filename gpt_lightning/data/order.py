"""Orders of windows: pure functions of (seed, epoch, index).

A window is T inputs and the token after them, T + 1 tokens in all; neighbours share the border
token. A split of n tokens holds (n - 1) // T whole windows, which tile it across shard borders.
No function depends on ranks, workers or earlier reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple

import numpy as np

OrderName = Literal["sequential", "random", "shuffled", "repeat"]
TABLE_WINDOWS = 16_384  # largest permutation that is drawn as one table
Key = tuple[int, ...]  # numbers that decide a draw
INCREMENT = np.uint64(0x9E3779B97F4A7C15)  # difference of two successive states of SplitMix64
OFFSET, BLOCKS = 2**32 - 2, 2**32 - 3  # last numbers of the keys of draws, beyond those of cells


class _Layout(NamedTuple):
    """Shards in the order in which an epoch reads them, block after block; int64 each.

    Attributes:
        shards: Number of each shard.
        block_ends: Windows up to the end of each block.
        ends: Windows up to the end of each shard.
        last_windows: Number after each shard's last window.
    """

    shards: np.ndarray
    block_ends: np.ndarray
    ends: np.ndarray
    last_windows: np.ndarray


@dataclass(frozen=True)
class WindowOrder:
    """Global order of a split's windows.

    `shuffled` visits each window once per epoch, in a permutation of all windows that is computed
    window by window: it needs no memory. From the second epoch on, the borders between windows are
    others: the first window starts at a drawn token below T. Less than T tokens, at the beginning
    or at the end, are then left out, and less than T read twice.

    A stream cannot hold all shards. Its shards are dealt into blocks, each with one shard of every
    stretch of the corpus; the windows of a block are permuted together. Windows that would cross
    the border of a shard are moved into the shard that has their middle. With several lanes, window
    p is of the lane p % lanes, and each lane permutes a stretch of every block's shards of its own:
    a node that reads one lane fetches these alone. Two lanes share the shard at their border.

    Args:
        name: sequential: front to back. shuffled: each window once per epoch, a new permutation
            every epoch. random: starts drawn anywhere, with replacement, as in nanoGPT; an epoch
            is as many windows as fit side by side. repeat: the split's first windows in every
            batch.
        n_tokens: Length of the split.
        block_size: Tokens T a window.
        seed: Seed of the draws.
        shard_tokens: Tokens of each shard, in the order of the text; empty: one shard.
        blocks: Number of blocks.
        lanes: Number of lanes.
    """

    name: OrderName
    n_tokens: int
    block_size: int
    seed: int
    shard_tokens: tuple[int, ...] = ()
    blocks: int = 1
    lanes: int = 1

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
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
            return self._shuffled(epoch, np.arange(first, min(first + count, self.n_windows)))
        begin = 0 if self.name == "repeat" else first
        return np.arange(begin, begin + count) * self.block_size

    # ---- shuffled ------------------------------------------------------------------------------

    def _offset(self, epoch: int) -> int:
        """Return the start of the epoch's first window; 0 in the first epoch."""
        return int(generator(self.seed, epoch, OFFSET).integers(self.block_size)) if epoch else 0

    def _shuffled(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the starts of the windows at places in the epoch's order, int64 like places."""
        T = self.block_size
        if self.blocks * self.lanes > 1:
            layout, along = self._layout(epoch), self._in_blocks(epoch, places)
            nth = np.searchsorted(layout.ends, along, side="right")
            windows = layout.last_windows[nth] + along - layout.ends[nth]
            shards = layout.shards[nth]
            begins, ends = self._begins[shards], self._begins[shards + 1]
            starts = np.minimum(self._offset(epoch) + windows * T, ends - T - 1)
            starts = np.maximum(starts, begins)  # a shard may be shorter than a window
        else:
            key, n = (self.seed, epoch), self.n_windows
            table = n <= TABLE_WINDOWS
            windows = _permutation(key, n)[places] if table else permuted(key, n, places)
            starts = self._offset(epoch) + windows * T
        return np.minimum(starts, self.n_tokens - 1 - T)

    def _in_blocks(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return places along the epoch's order of shards; a cell is a lane's part of a block."""
        blocks = np.searchsorted(self._layout(epoch).block_ends, places, side="right")
        cells, along = blocks * self.lanes + places % self.lanes, np.empty_like(places)
        for cell in np.unique(cells).tolist():
            chosen = cells == cell
            begin, end, before = self._stretch(epoch, *divmod(cell, self.lanes))
            nth = places[chosen] // self.lanes - before
            along[chosen] = begin + permuted((self.seed, epoch, cell), end - begin, nth)
        return along

    def _stretch(self, epoch: int, block: int, lane: int) -> tuple[int, int, int]:
        """Return begin and end of a lane's windows along a block's shards, and those before it.

        The last number counts the lane's windows in earlier blocks. A lane has as many windows of
        a block as places p of it with p % lanes == lane.
        """
        ends = self._layout(epoch).block_ends
        first, last = int(ends[block - 1]) if block else 0, int(ends[block])
        before, after = (-((np.arange(self.lanes) - n) // self.lanes) for n in (first, last))
        begin = first + int((after - before)[:lane].sum())
        return begin, begin + int(after[lane] - before[lane]), int(before[lane])

    def shards_ahead(self, epoch: int, first: int, count: int, rank: int, world: int) -> list[int]:
        """Return the shards that a rank reads next, in the order in which it needs them.

        Args:
            epoch: Number of the epoch.
            first: Window of the epoch from which on the rank reads.
            count: Windows, over all ranks, that are looked at; a shuffle in blocks looks at the
                rest of the epoch, block by block, and at the first block of the next one.
            rank: Number of the rank.
            world: Number of ranks.
        """
        if self.name == "shuffled":
            lanes = sorted({(rank + world * turn) % self.lanes for turn in range(self.lanes)})
            return [*self._ahead(epoch, first, lanes), *self._ahead(epoch + 1, 0, lanes)]
        here = min(count, self.n_windows - first)
        parts = [(epoch, first, here), (epoch + 1, 0, min(count - here, self.n_windows))]
        starts = np.concatenate([self.starts(*part) for part in parts])
        shards = np.searchsorted(self._begins, starts, side="right") - 1
        return list(dict.fromkeys(shards.tolist()))

    def _ahead(self, epoch: int, first: int, lanes: list[int]) -> Iterator[int]:
        """Yield the shards of some lanes, block by block, from the block of window `first` on."""
        layout = self._layout(epoch)
        now = int(np.searchsorted(layout.block_ends, first, side="right"))
        for block in range(min(now, self.blocks - 1), self.blocks):
            for lane in lanes:
                begin, end, _ = self._stretch(epoch, block, lane)
                last = np.searchsorted(layout.ends, end, side="left")
                here = slice(np.searchsorted(layout.ends, begin, side="right"), last + 1)
                yield from layout.shards[here].tolist()

    @lru_cache(maxsize=4)  # noqa: B019 orders are small
    def _layout(self, epoch: int) -> _Layout:
        # a window is of the shard that has its middle
        middle = self._offset(epoch) + self.block_size // 2
        firsts = np.clip(-((middle - self._begins) // self.block_size), 0, self.n_windows)
        firsts[-1] = self.n_windows
        draws, n_shards = generator(self.seed, epoch, BLOCKS), len(firsts) - 1
        # every block gets one shard of each run of `blocks` shards
        runs = draws.random((-(-n_shards // self.blocks), self.blocks)).argsort(axis=1)
        block = runs.ravel()[:n_shards]
        # each lane reads shards of every stretch of the corpus
        shards = np.lexsort((draws.random(n_shards) * (self.lanes > 1), block))
        ends = np.cumsum(np.diff(firsts)[shards])
        last_shards = np.searchsorted(block[shards], np.arange(self.blocks), side="right")
        block_ends = np.concatenate([[0], ends])[last_shards]
        return _Layout(shards, block_ends, ends, firsts[shards + 1])

    @cached_property
    def _begins(self) -> np.ndarray:
        """Number of the first token of each shard, and n_tokens; int64 (shards + 1,)."""
        return np.cumsum([0, *(self.shard_tokens or (self.n_tokens,))])


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
