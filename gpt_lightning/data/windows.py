"""Windows of tokens in a global order.

The windows `first .. first + count - 1` of an epoch are a pure function of (seed, epoch, index).
"""

import numpy as np

from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.files import Fields


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
        self.stream = stream
        self.order = order
        self.n_windows = order.n_windows
        self.block_size = order.block_size
        stream.is_random = order.name in ("random", "shuffled")

    def read(self, epoch: int, first: int, count: int, rank: int, world: int) -> np.ndarray:
        """Read every `world`-th of the windows first .. first + count - 1, from the rank-th on.

        Returns:
            int64, (count / world, T + 1).
        """
        starts = self.order.starts(epoch, first, count)[rank::world]
        if self.stream.is_remote:
            self._expect_next(epoch, first)
        return self.stream.windows(starts, self.block_size + 1)

    @property
    def joins_reads(self) -> bool:
        """True if batches may be read together.

        Not where a later one may need a shard that has not been fetched, nor where each batch has
        the same windows.
        """
        return self.order.name != "repeat" and not self.stream.is_remote

    def fetch(self, epoch: int, first: int, count: int) -> None:
        """Wait for the shards of some windows, if they are behind a URL.

        Raises:
            OutageError: A shard did not come within data.patience.
        """
        if self.stream.is_remote:
            self._expect_next(epoch, first)
            starts = self.order.starts(epoch, first, count)
            self.stream.fetch(starts, self.block_size + 1)

    def _expect_next(self, epoch: int, first: int) -> None:
        """Announce the shard that is read after the one of a window."""
        (start,) = self.order.starts(epoch, first, 1)
        tokens = self.stream.shard_tokens[self.stream.shard_at(start)]
        ahead = first + tokens // self.block_size + 1
        epochs, place = divmod(ahead, self.n_windows)
        (start,) = self.order.starts(epoch + epochs, place, 1)
        self.stream.expect(start)

    def identity(self) -> Fields:
        """Return the settings that decide the order, as JSON types."""
        order = self.order
        return {
            "dataset": self.stream.digest,
            "data.order": order.name,
            "data.seed": order.seed,
            "data.block_size": order.block_size,
            "shard by shard": bool(order.shard_tokens),
        }
