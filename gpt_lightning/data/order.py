"""Orders of windows: pure functions of (seed, epoch, index).

A window is T inputs and the token after them, T + 1 tokens in all; neighbours share the border
token. A split of n tokens holds (n - 1) // T whole windows, which tile it across shard borders.
No function depends on ranks, workers or earlier reads.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

OrderName = Literal["sequential", "random", "shuffled", "repeat"]
TABLE_WINDOWS = 16_384  # up to here a permutation is drawn as in earlier versions
RUN = 4_096  # places that are permuted together
DRAWS = 1_024  # starts that are drawn at a time
# last numbers of the keys of draws, beyond those of groups and cells
SHARDS, OFFSET, CELLS = (-n % 2**32 for n in (1, 2, 3))


class _Lanes(NamedTuple):
    """Windows of each lane in an epoch; int64 (lanes,), and cell_ends (blocks x lanes,).

    Attributes:
        begins: Begin of the lane's cells along the epoch's order of shards.
        firsts: Places of the lanes before it.
        own: Windows that the lane reads from the beginning of its own cells.
        left: Windows that it and the lanes before it leave to others.
        taken: Windows of those left that the lanes before it read.
        cell_ends: Places up to the end of each cell, lane by lane.
    """

    begins: np.ndarray
    firsts: np.ndarray
    own: np.ndarray
    left: np.ndarray
    taken: np.ndarray
    cell_ends: np.ndarray


class _Layout(NamedTuple):
    """Shards in the order in which an epoch reads them, sorted by their cells; int64 each.

    Attributes:
        shards: Number of each shard.
        cells: Cell of each shard.
        cell_ends: Windows up to the end of each cell.
        ends: Windows up to the end of each shard.
        last_windows: Number after each shard's last window.
    """

    shards: np.ndarray
    cells: np.ndarray
    cell_ends: np.ndarray
    ends: np.ndarray
    last_windows: np.ndarray


@functools.lru_cache(maxsize=4)
def _random_block(seed: int, epoch: int, block: int, starts: int) -> np.ndarray:
    """Return the draws block * DRAWS and following of an epoch, each below starts, (DRAWS,)."""
    # Philox is counter-based: draw i of a key needs none of the i - 1 before it. It yields four
    # 64-bit words a counter. The modulo's bias is below starts / 2^64.
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64), counter=block * DRAWS // 4)
    return (bits.random_raw(DRAWS) % np.uint64(starts)).astype(np.int64)


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
    p is of the lane p % lanes, and each lane has shards of its own in every block: a node that
    reads one lane fetches its shards alone. A lane with more windows than places leaves its last
    ones to others. What is left lies side by side in one or two shards of a lane; each lane reads a
    stretch of it in its last block, from three shards at most if shards are equal.

    With shuffle_windows, `shuffled` is the order of earlier versions: up to shuffle_windows windows
    are permuted as a whole; more are read shard after shard, in a new order of the shards every
    epoch, and permuted within groups of shuffle_windows along that order. Borders stay.

    Args:
        name: sequential: front to back. shuffled: each window once per epoch, a new permutation
            every epoch. random: starts drawn anywhere, with replacement, as in nanoGPT; an epoch
            is as many windows as fit side by side. repeat: the split's first windows in every
            batch.
        n_tokens: Length of the split.
        block_size: Tokens T a window.
        seed: Seed of the draws.
        shard_tokens: Tokens of each shard, in the order of the text; empty: one shard.
        shuffle_windows: Size of a group; None: no groups.
        blocks: Number of blocks.
        lanes: Number of lanes.
    """

    name: OrderName
    n_tokens: int
    block_size: int
    seed: int
    shard_tokens: tuple[int, ...] = ()
    shuffle_windows: int | None = None
    blocks: int = 1
    lanes: int = 1

    @property
    def n_windows(self) -> int:
        """Windows in an epoch."""
        return (self.n_tokens - 1) // self.block_size

    def starts(self, epoch: int, first: int, count: int) -> np.ndarray:
        """Return the starts of the epoch's windows first .. first + count - 1, int64 (count,)."""
        if self.name == "random":
            return self._random_starts(epoch, first, count)
        if self.name == "shuffled" and self.shuffle_windows is not None:
            return self._grouped_windows(epoch, first, count) * self.block_size
        if self.name == "shuffled":
            return self._shuffled(epoch, np.arange(first, min(first + count, self.n_windows)))
        index = np.arange(count) if self.name == "repeat" else np.arange(first, first + count)
        return index * self.block_size

    def _random_starts(self, epoch: int, first: int, count: int) -> np.ndarray:
        blocks = range(first // DRAWS, -(-(first + count) // DRAWS))
        starts = self.n_tokens - self.block_size
        drawn = [_random_block(self.seed, epoch, block, starts) for block in blocks]
        begin = first % DRAWS
        return (drawn[0] if len(drawn) == 1 else np.concatenate(drawn))[begin : begin + count]

    # ---- shuffled ------------------------------------------------------------------------------

    def _offset(self, epoch: int) -> int:
        """Return the start of the epoch's first window; 0 in the first epoch."""
        return int(_generator(self.seed, epoch, OFFSET).integers(self.block_size)) if epoch else 0

    def _shuffled(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return the starts of the windows at places in the epoch's order, int64 like places."""
        T = self.block_size
        if self.blocks * self.lanes > 1:
            windows, shards = self._windows_at(epoch, self._in_cells(epoch, places))
            begins, ends = self._begins[shards], self._begins[shards + 1]
            starts = np.minimum(self._offset(epoch) + windows * T, ends - T - 1)
            starts = np.maximum(starts, begins)  # a shard may be shorter than a window
        else:
            key, n = (self.seed, epoch), self.n_windows
            table = n <= TABLE_WINDOWS
            windows = _permutation(key, n)[places] if table else _neighbours(key, n, places)
            starts = self._offset(epoch) + windows * T
        return np.minimum(starts, self.n_tokens - 1 - T)

    def _in_cells(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """Return places along the epoch's order of shards; a cell is a block of one lane."""
        lanes, lane = self._lanes(epoch), places % self.lanes
        ends, at = lanes.cell_ends, lanes.firsts[lane] + places // self.lanes
        cells = np.searchsorted(ends, at, side="right")
        for cell in np.unique(cells).tolist():
            chosen, begin = cells == cell, int(ends[cell - 1]) if cell else 0
            key, size = (self.seed, epoch, cell), int(ends[cell]) - begin
            at[chosen] = begin + permuted(key, size, at[chosen] - begin)
        nth = at - lanes.firsts[lane]
        along, is_own = lanes.begins[lane] + nth, nth < lanes.own[lane]
        along[~is_own] = self._left(epoch, (lanes.taken - lanes.own)[lane[~is_own]] + nth[~is_own])
        return along

    def _left(self, epoch: int, windows: np.ndarray) -> np.ndarray:
        """Return windows that lanes leave to others as places along the order of shards."""
        lanes = self._lanes(epoch)
        lane = np.searchsorted(lanes.left, windows, side="right")
        ends = self._layout(epoch).cell_ends[self.blocks - 1 :: self.blocks]
        along: np.ndarray = (ends - lanes.left)[lane] + windows
        return along

    def _lanes(self, epoch: int) -> _Lanes:
        cell_ends = self._layout(epoch).cell_ends.reshape(self.lanes, self.blocks)
        begins = np.concatenate([[0], cell_ends[:-1, -1]])
        sizes = cell_ends[:, -1] - begins
        places = (self.n_windows - 1 - np.arange(self.lanes)) // self.lanes + 1
        # A lane with too many leaves all that the smallest lacks, a shard, rather than a part of
        # it: a lane that lacks a shard then reads one or two, not a part of one of every lane.
        own = np.where(sizes > places, sizes.min(), sizes)
        ends = np.minimum(cell_ends - begins[:, None], own[:, None])
        ends[:, -1] = places
        firsts, taken = (np.cumsum(n) - n for n in (places, places - own))
        ends = (firsts[:, None] + ends).ravel()
        return _Lanes(begins, firsts, own, np.cumsum(sizes - own), taken, ends)

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
        if self.name == "shuffled" and self.shuffle_windows is None:
            lanes = sorted({(rank + world * turn) % self.lanes for turn in range(self.lanes)})
            found = [
                *self._blocks_ahead(epoch, first, lanes),
                *self._blocks_ahead(epoch + 1, 0, lanes),
            ]
            return np.concatenate(found).tolist()
        here = min(count, self.n_windows - first)
        parts = [(epoch, first, here), (epoch + 1, 0, min(count - here, self.n_windows))]
        starts = np.concatenate([self.starts(*part) for part in parts if part[2]])
        shards = np.searchsorted(self._begins, starts, side="right") - 1
        _, places = np.unique(shards, return_index=True)
        return shards[np.sort(places)].tolist()

    def _blocks_ahead(self, epoch: int, first: int, lanes: list[int]) -> Iterator[np.ndarray]:
        """Yield the shards of the cells of some lanes, from the block of window `first` on."""
        layout, blocks = self._layout(epoch), self.blocks
        at = self._lanes(epoch).firsts[lanes[0]] + first // self.lanes
        cell = np.searchsorted(self._lanes(epoch).cell_ends, at, side="right")
        for block in range(min(int(cell) - lanes[0] * blocks, blocks - 1), blocks):
            for lane in lanes:
                yield layout.shards[layout.cells == lane * blocks + block]
        for lane in lanes:
            yield self.borrowed(epoch, lane)

    def borrowed(self, epoch: int, lane: int) -> np.ndarray:
        """Return the shards of which a lane reads what others leave, in its last block, int64."""
        lanes = self._lanes(epoch)
        ends = np.append(lanes.taken, lanes.left[-1])
        places = self._left(epoch, np.arange(ends[lane], ends[lane + 1]))
        return np.unique(self._windows_at(epoch, places)[1])

    def _windows_at(self, epoch: int, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return windows and their shards at places along the epoch's order of shards."""
        layout = self._layout(epoch)
        nth = np.searchsorted(layout.ends, places, side="right")
        return layout.last_windows[nth] + places - layout.ends[nth], layout.shards[nth]

    def _layout(self, epoch: int) -> "_Layout":
        if epoch not in self._layouts:
            if len(self._layouts) > 1:
                self._layouts.clear()
            T, begins = self.block_size, self._begins
            if self.shuffle_windows:  # a window is of the shard that has its first token
                firsts = np.minimum(-(-begins // T), self.n_windows)
                shards = _permutation((self.seed, epoch, SHARDS), len(firsts) - 1)
                cells = np.zeros_like(shards)
            else:  # of the one that has its middle
                middle = self._offset(epoch) + T // 2
                firsts = np.clip(-((middle - begins) // T), 0, self.n_windows)
                firsts[-1] = self.n_windows
                shards, cells = self._dealt(epoch, len(firsts) - 1)
            ends = np.cumsum(np.diff(firsts)[shards])
            last_shards = np.searchsorted(cells, np.arange(self.blocks * self.lanes), side="right")
            cell_ends = np.concatenate([[0], ends])[last_shards]
            self._layouts[epoch] = _Layout(shards, cells, cell_ends, ends, firsts[shards + 1])
        return self._layouts[epoch]

    @functools.cached_property
    def _begins(self) -> np.ndarray:
        """Number of the first token of each shard, and n_tokens; int64 (shards + 1,)."""
        return np.cumsum([0, *(self.shard_tokens or (self.n_tokens,))])

    @functools.cached_property
    def _layouts(self) -> dict[int, "_Layout"]:
        return {}

    def _dealt(self, epoch: int, n_shards: int) -> tuple[np.ndarray, np.ndarray]:
        """Return shards sorted by their cells, and the cells; lane 0's cells come first."""
        draws = _generator(self.seed, epoch, CELLS)
        # of each run of `blocks` shards every block gets one
        runs = draws.random((-(-n_shards // self.blocks), self.blocks)).argsort(axis=1)
        block = runs.ravel()[:n_shards]
        order = np.argsort(block, kind="stable")
        # of each run of `lanes` shards along the blocks every lane gets one
        runs = draws.random((-(-n_shards // self.lanes), self.lanes)).argsort(axis=1)
        cells = runs.ravel()[:n_shards] * self.blocks + block[order]
        # lanes leave the last windows of their cells, which may not always be the corpus' last
        by_cell = np.lexsort((draws.random(n_shards) * (self.lanes > 1), cells))
        return order[by_cell], cells[by_cell]

    # ---- shuffled, with shuffle_windows ----------------------------------------------------------

    def _grouped_windows(self, epoch: int, first: int, count: int) -> np.ndarray:
        """Return numbers of windows, int64 (count,)."""
        assert self.shuffle_windows is not None
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
        return self._windows_at(epoch, np.concatenate(places))[0]


def permuted(key: tuple[int, ...], n: int, places: np.ndarray) -> np.ndarray:
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
            left, right = right, left ^ (_hashed(right + round_key) & mask)
        out[todo] = left << half | right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


def _neighbours(key: tuple[int, ...], n: int, places: np.ndarray) -> np.ndarray:
    """Return `permuted` of consecutive places, for a tenth of its time where few are asked for."""
    runs = range(places[0] // RUN, places[-1] // RUN + 1) if len(places) else range(1)
    found: np.ndarray = np.concatenate([_permuted_run(key, n, run) for run in runs])
    return found[places - runs[0] * RUN]


@functools.lru_cache(maxsize=64)
def _permuted_run(key: tuple[int, ...], n: int, run: int) -> np.ndarray:
    return permuted(key, n, np.arange(run * RUN, min((run + 1) * RUN, n)))


def _hashed(words: np.ndarray) -> np.ndarray:
    """Return SplitMix64's mix of words, uint64."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ words >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return words ^ words >> np.uint64(31)


@functools.lru_cache(maxsize=256)
def _round_keys(key: tuple[int, ...]) -> np.ndarray:
    return np.random.SeedSequence(list(key)).generate_state(6, np.uint64)


def _generator(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(list(key)))


@functools.lru_cache(maxsize=8)
def _permutation(key: tuple[int, ...], n: int) -> np.ndarray:
    shuffled: np.ndarray = _generator(*key).permutation(n)
    return shuffled
