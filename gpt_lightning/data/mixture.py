"""What training reads windows from: one dataset, or several mixed by weight.

A source answers with the windows `first .. first + count - 1` of an epoch's global order. The
answer depends on nothing but (seed, epoch, index).
"""

import functools
import math
from typing import Any, Protocol

import numpy as np

from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError

BLOCK = 1_000  # samples after which a mixture has its weights to 1 in 1,000


class WindowSource(Protocol):
    """Windows of T + 1 tokens in a global order."""

    @property
    def n_windows(self) -> int:
        """Windows of an epoch."""
        ...

    @property
    def block_size(self) -> int:
        """T."""
        ...

    def read(self, epoch: int, first: int, count: int, rank: int, world: int) -> np.ndarray:
        """Every `world`-th of the windows first .. first + count - 1, from the rank-th on.

        Returns:
            int64, (count / world, T + 1).
        """
        ...

    def identity(self) -> dict[str, Any]:
        """What decides the order; fit for JSON. Two equal ones read the same windows."""
        ...

    def stamps(self) -> dict[str, list[int]]:
        """By which a shard that was replaced is known: file -> size and times."""
        ...

    def check_stamps(self, stamps: dict[str, list[int]]) -> None:
        """Refuses shards that were replaced since their stamps were taken."""
        ...


class DatasetWindows:
    """One split of one dataset in one order.

    Args:
        stream: the split's tokens.
        order: of its windows.
    """

    def __init__(self, stream: TokenStream, order: WindowOrder) -> None:
        self.stream, self.order = stream, order
        self._looked_ahead = (-1, -1)  # epoch and window up to which shards are on their way

    @property
    def n_windows(self) -> int:
        return self.order.n_windows

    @property
    def block_size(self) -> int:
        return self.order.block_size

    def read(self, epoch: int, first: int, count: int, rank: int, world: int) -> np.ndarray:
        starts = self.order.starts(epoch, first, count)[rank::world]
        self.look_ahead(epoch, first)
        return self.stream.windows(starts, self.block_size + 1)

    def look_ahead(self, epoch: int, first: int) -> None:
        """Names the shards of the windows to come to a stream that has to fetch them."""
        horizon = self.stream.horizon(self.block_size)
        if not horizon or self.order.name == "random":
            return
        last_epoch, last = self._looked_ahead
        if epoch == last_epoch and last - horizon <= first < last - horizon // 2:
            return
        self._looked_ahead = (epoch, first + horizon)
        count = min(horizon, self.n_windows - first)
        self.stream.expect(self.order.starts(epoch, first, count), self.block_size + 1)

    def identity(self) -> dict[str, Any]:
        order = self.order
        return {
            "dataset": self.stream.digest,
            "data.order": order.name,
            "data.seed": order.seed,
            "data.block_size": order.block_size,
            "data.shuffle_windows": order.shuffle_windows,
        }

    def stamps(self) -> dict[str, list[int]]:
        return self.stream.stamps()

    def check_stamps(self, stamps: dict[str, list[int]]) -> None:
        self.stream.check_stamps(stamps)


class Mixture:
    """Several datasets by weight.

    Of every thousand samples each dataset gives its share, rounded, at places drawn from (seed,
    block): after any number of samples the realized proportions are off by less than one block. A
    dataset that is used up begins its next epoch. An epoch of the mixture is as many windows as all
    datasets have together.

    Args:
        corpora: name -> dataset, all with the same block size.
        weights: name -> weight, above 0; their sum is normalized.
        seed: of the places.

    Raises:
        UserError: a weight that is not above 0, or too small to be seen in a thousand samples.
    """

    def __init__(
        self, corpora: dict[str, DatasetWindows], weights: dict[str, float], seed: int
    ) -> None:
        self.corpora = corpora
        self.names = list(corpora)
        self.seed = seed
        self.quotas = quotas([weights[name] for name in self.names], self.names)

    @property
    def n_windows(self) -> int:
        return sum(corpus.n_windows for corpus in self.corpora.values())

    @property
    def block_size(self) -> int:
        return next(iter(self.corpora.values())).block_size

    def counts(self, samples: int) -> np.ndarray:
        """How many of the first `samples` samples come from each dataset, int64 (datasets,)."""
        blocks, rest = divmod(samples, BLOCK)
        inside = np.bincount(self._block(blocks)[:rest], minlength=len(self.quotas))
        return np.asarray(blocks * self.quotas + inside)

    def _block(self, block: int) -> np.ndarray:
        """Which dataset each sample of a block comes from, (BLOCK,)."""
        return _shuffled_block((self.seed, block), tuple(self.quotas.tolist()))

    def read(self, epoch: int, first: int, count: int, rank: int, world: int) -> np.ndarray:
        sample = epoch * self.n_windows + first  # since the beginning of the run
        blocks = range(sample // BLOCK, -(-(sample + count) // BLOCK))
        which = np.concatenate([self._block(block) for block in blocks])
        which = which[sample % BLOCK : sample % BLOCK + count]
        out = np.empty((count, self.block_size + 1), dtype=np.int64)
        before = self.counts(sample)
        mine = np.arange(count) % world == rank
        for index, corpus in enumerate(self.corpora.values()):
            rows = np.flatnonzero(which == index)
            out[rows[mine[rows]]] = _read_on(corpus, int(before[index]), mine[rows])
        own: np.ndarray = out[mine]
        return own

    def identity(self) -> dict[str, Any]:
        parts = {name: corpus.identity() for name, corpus in self.corpora.items()}
        return {"data.mixture": parts, "quotas": self.quotas.tolist(), "data.seed": self.seed}

    def stamps(self) -> dict[str, list[int]]:
        return {
            f"{name}/{file}": stamp
            for name, corpus in self.corpora.items()
            for file, stamp in corpus.stamps().items()
        }

    def check_stamps(self, stamps: dict[str, list[int]]) -> None:
        for name, corpus in self.corpora.items():
            own = {k.removeprefix(f"{name}/"): v for k, v in stamps.items() if k.startswith(name)}
            corpus.check_stamps(own)


def _read_on(corpus: DatasetWindows, first: int, wanted: np.ndarray) -> np.ndarray:
    """Windows first, first + 1, ... of a dataset's endless epochs, those that are wanted."""
    parts, done = [np.empty((0, corpus.block_size + 1), dtype=np.int64)], 0
    while done < len(wanted):
        epoch, begin = divmod(first + done, corpus.n_windows)
        count = min(len(wanted) - done, corpus.n_windows - begin)
        starts = corpus.order.starts(epoch, begin, count)[wanted[done : done + count]]
        corpus.look_ahead(epoch, begin)
        parts.append(corpus.stream.windows(starts, corpus.block_size + 1))
        done += count
    return np.concatenate(parts)


def quotas(weights: list[float], names: list[str]) -> np.ndarray:
    """Samples of each dataset in a block of a thousand, by the largest remainders.

    Returns:
        int64, (datasets,), of sum BLOCK.

    Raises:
        UserError: as Mixture.
    """
    for name, weight in zip(names, weights, strict=True):
        if not (0 < weight < math.inf):
            raise UserError(f"data.mixture.{name} is {weight}; a weight must be above 0")
    exact = np.array(weights) / sum(weights) * BLOCK
    found = np.floor(exact).astype(np.int64)
    rest = np.argsort(found - exact, kind="stable")[: BLOCK - int(found.sum())]
    found[rest] += 1
    for name, quota in zip(names, found.tolist(), strict=True):
        if quota == 0:
            raise UserError(
                f"data.mixture.{name} is less than 1 in {BLOCK} of all weights: leave it out"
            )
    return found


@functools.lru_cache(maxsize=8)
def _shuffled_block(key: tuple[int, ...], counts: tuple[int, ...]) -> np.ndarray:
    which = np.repeat(np.arange(len(counts)), counts)
    shuffled: np.ndarray = np.random.Generator(np.random.PCG64(list(key))).permutation(which)
    return shuffled
