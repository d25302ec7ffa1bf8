"""Windows of tokens in a global order: those of one dataset, or of several mixed by weight.

The windows `first .. first + count - 1` of an epoch are a pure function of (seed, epoch, index).
"""

import dataclasses
import functools
import math

import numpy as np

from gpt_lightning.data.order import Key, WindowOrder, generator
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields

BLOCK = 1_000  # samples in which a mixture realizes its weights to 1 in 1,000


class DatasetWindows:
    """One split of one dataset in one order.

    Args:
        stream: Tokens of the split.
        order: Order of its windows.

    Attributes:
        n_windows: Windows of an epoch.
        block_size: Tokens T per sequence; a window has T + 1.
    """

    def __init__(self, stream: TokenStream, order: WindowOrder):
        self.stream, self.order = stream, order
        self.n_windows, self.block_size = order.n_windows, order.block_size
        stream.is_random = order.name in ("random", "shuffled")
        self._looked_ahead = (-1, -1)  # epoch and window up to which shards were announced

    def read(self, epoch: int, first: int, count: int, rank: int, world: int) -> np.ndarray:
        """Read every `world`-th of the windows first .. first + count - 1, from the rank-th on.

        Returns:
            int64, (count / world, T + 1).
        """
        starts = self.order.starts(epoch, first, count)[rank::world]
        self.look_ahead(epoch, first, rank, world)
        return self.stream.windows(starts, self.block_size + 1)

    @property
    def joins_reads(self) -> bool:
        """True if batches may be read together.

        Not where a later one may need a shard that has not been fetched, nor where each batch has
        the same windows.
        """
        return self.order.name != "repeat" and not self.stream.horizon(self.block_size)

    def look_ahead(self, epoch: int, first: int, rank: int, world: int) -> None:
        """Announce the coming windows to a stream that has to fetch their shards."""
        horizon = self.stream.horizon(self.block_size)
        if not horizon or self.order.name == "random":
            return
        last_epoch, last = self._looked_ahead
        if epoch == last_epoch and last - horizon <= first < last - horizon // 2:
            return
        self._looked_ahead = (epoch, first + horizon)
        self.stream.expect(self.order.shards_ahead(epoch, first, horizon, rank, world))

    def identity(self) -> Fields:
        """Return the settings that decide the order, as JSON types."""
        order = self.order
        identity = {
            "dataset": self.stream.digest,
            "data.order": order.name,
            "data.seed": order.seed,
            "data.block_size": order.block_size,
            "data.shuffle_windows": None,  # checkpoints of 2632cfa have the key
            "shuffled blocks": order.blocks,
            "shuffled lanes": order.lanes,
        }
        # version 2632cfa of this program read windows that lanes left to others "in the last block"
        return identity | ({"windows left by lanes": "none"} if order.lanes > 1 else {})

    def keep_shuffle(self, theirs: Fields) -> None:
        """Take over the blocks and lanes of a checkpoint of this dataset.

        Args:
            theirs: Result of `identity` in the checkpoint.

        Raises:
            UserError: The cache is too small for them.
        """
        if theirs.get("dataset") == self.stream.digest and "shuffled blocks" in theirs:
            blocks, lanes = theirs["shuffled blocks"], theirs["shuffled lanes"]
            self.order = dataclasses.replace(self.order, blocks=blocks, lanes=lanes)
            self.stream.check_order(self.order)


@dataclasses.dataclass(eq=False)
class Mixture:
    """Several datasets by weight.

    Of every thousand samples each dataset provides its share, rounded, at places drawn from (seed,
    block): after any number of samples the realized proportions are off by less than one block. A
    dataset that is used up begins its next epoch. An epoch of the mixture has as many windows as
    all datasets together.

    With several lanes, a place holds as many neighbouring samples of one dataset. So sample p, like
    window p of a dataset, is of the lane p % lanes, and a node reads one lane of each dataset.

    Args:
        corpora: Name -> dataset, all with the same block size.
        weights: Name -> weight, above 0; their sum is normalized.
        seed: Seed of the places.
        lanes: Number of lanes.

    Raises:
        UserError: A weight is not above 0, or is less than one in a thousand.
    """

    corpora: dict[str, DatasetWindows]
    weights: dict[str, float]
    seed: int
    lanes: int = 1

    def __post_init__(self) -> None:
        self.block_size = next(iter(self.corpora.values())).block_size
        self.quotas = quotas({name: self.weights[name] for name in self.corpora})

    @property
    def n_windows(self) -> int:
        """Windows of an epoch, a multiple of the lanes."""
        return self._whole(sum(corpus.n_windows for corpus in self.corpora.values()))

    @property
    def joins_reads(self) -> bool:
        """True if batches may be read together; see DatasetWindows."""
        return all(corpus.joins_reads for corpus in self.corpora.values())

    def _whole(self, n_windows: int) -> int:
        return n_windows // self.lanes * self.lanes or n_windows

    def shares(self, epoch: int, window: int) -> dict[str, float]:
        """Return each dataset's share of the samples up to a window of an epoch, by name."""
        samples = epoch * self.n_windows + window
        counts = self.counts(samples)
        return dict(zip(self.corpora, (counts / max(1, samples)).tolist(), strict=True))

    def counts(self, samples: int) -> np.ndarray:
        """Return the number of the first `samples` samples from each dataset, int64 (datasets,)."""
        blocks, rest = divmod(samples, BLOCK * self.lanes)
        inside = np.bincount(self._block(blocks)[:rest], minlength=len(self.quotas))
        return blocks * self.lanes * self.quotas + inside

    def _block(self, block: int) -> np.ndarray:
        """Return the dataset number of each sample of a block, (BLOCK x lanes,)."""
        places = _shuffled_block((self.seed, block), tuple(self.quotas.tolist()))
        return places.repeat(self.lanes)

    def read(self, epoch: int, first: int, count: int, rank: int, world: int) -> np.ndarray:
        sample = epoch * self.n_windows + first  # number of samples since the beginning of the run
        size = BLOCK * self.lanes
        blocks = range(sample // size, -(-(sample + count) // size))
        which = np.concatenate([self._block(block) for block in blocks])
        which = which[sample % size :][:count]
        out = np.empty((count, self.block_size + 1), dtype=np.int64)
        before = self.counts(sample)
        mine = np.arange(count) % world == rank
        for index, corpus in enumerate(self.corpora.values()):
            rows, seen = np.flatnonzero(which == index), int(before[index])
            while len(rows):  # an epoch of the dataset may end within them
                epoch, begin = divmod(seen, self._whole(corpus.n_windows))
                part = rows[: self._whole(corpus.n_windows) - begin]
                starts = corpus.order.starts(epoch, begin, len(part))[mine[part]]
                corpus.look_ahead(epoch, begin, rank, world)
                out[part[mine[part]]] = corpus.stream.windows(starts, self.block_size + 1)
                rows, seen = rows[len(part) :], seen + len(part)
        return out[mine]

    def identity(self) -> Fields:
        parts = {name: corpus.identity() for name, corpus in self.corpora.items()}
        own = {"data.mixture": parts, "quotas": self.quotas.tolist(), "data.seed": self.seed}
        return own | ({"mixture lanes": self.lanes} if self.lanes > 1 else {})

    def keep_shuffle(self, theirs: Fields) -> None:
        if "data.mixture" in theirs:
            self.lanes = theirs.get("mixture lanes", 1)
        for name, corpus in self.corpora.items():
            corpus.keep_shuffle(theirs.get("data.mixture", {}).get(name, {}))


WindowSource = DatasetWindows | Mixture  # the two have the same methods


def quotas(weights: dict[str, float]) -> np.ndarray:
    """Return the samples of each dataset in a block of a thousand, by the largest remainders.

    Returns:
        int64, (datasets,), of sum BLOCK.

    Raises:
        UserError: A weight is not above 0, or is less than one in a thousand.
    """
    for name, weight in weights.items():
        if not (0 < weight < math.inf):
            raise UserError(f"data.mixture.{name} is {weight}; a weight must be above 0")
    exact = np.array([*weights.values()]) / sum(weights.values()) * BLOCK
    found = np.floor(exact).astype(np.int64)
    rest = np.argsort(found - exact, kind="stable")[: BLOCK - found.sum()]
    found[rest] += 1
    for name, quota in zip(weights, found.tolist(), strict=True):
        if quota == 0:
            raise UserError(
                f"data.mixture.{name} is less than 1 in {BLOCK} of all weights: leave it out"
            )
    return found


@functools.lru_cache(maxsize=8)
def _shuffled_block(key: Key, counts: tuple[int, ...]) -> np.ndarray:
    which = np.repeat(np.arange(len(counts)), counts)
    return generator(*key).permutation(which)
