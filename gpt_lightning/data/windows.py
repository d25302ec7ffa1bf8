"""Windows of tokens in a global order.

The windows `first .. first + count - 1` of an epoch are a pure function of (seed, epoch, index).
"""

import dataclasses

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
        return {
            "dataset": self.stream.digest,
            "data.order": order.name,
            "data.seed": order.seed,
            "data.block_size": order.block_size,
            "shuffled blocks": order.blocks,
            "shuffled lanes": order.lanes,
        }

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
