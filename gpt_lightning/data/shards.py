"""Tokens on disk: write a shard, read windows from a split's shards, in an order."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import Manifest, Shard, open_shard, repair_hint
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256, write_durable


def write_shard(path: Path, tokens: np.ndarray) -> Shard:
    """Write tokens, (n,) of uint16 or uint32, as a little-endian .npy file, synced to the disk.

    Raises:
        OSError: The disk is full; a part of the file may be left.
    """
    assert tokens.ndim == 1, tokens.shape
    assert tokens.dtype in (np.uint16, np.uint32), tokens.dtype
    tokens = np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<"))
    # Not np.save: it hides the reason of a failed write, and the digest would need a second pass.
    content = file_header("npy", tokens.dtype.name, len(tokens)) + tokens.tobytes()
    write_durable(path, content)
    return Shard(path.name, len(tokens), hashlib.sha256(content).hexdigest())


# ---- reading tokens ----------------------------------------------------------------------------


class TokenStream:
    """Shards of one split as one sequence of tokens.

    A shard is mapped at its first read, in the process that reads it: a pickled stream (in a loader
    worker under spawn) carries file names, not the mapped tokens.

    Args:
        folder: Folder of the dataset.
        manifest: Manifest of the folder.
        split: train, val or test.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        self._folder = folder
        self._dtype, self._format = manifest.dtype, manifest.format
        self._vocab_size = manifest.vocab_size
        self._shards = manifest.splits[split]
        content = json.dumps(dataclasses.asdict(manifest), sort_keys=True)
        self.digest = hashlib.sha256(content.encode()).hexdigest()  # of the whole dataset
        counts = np.array([shard.tokens for shard in self._shards], dtype=np.int64)
        self._ends = np.cumsum(counts)  # shard i holds the tokens _ends[i] - counts[i] .. _ends[i]
        self._maps: dict[int, tuple[np.ndarray, int]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    @property
    def shard_tokens(self) -> tuple[int, ...]:
        """Tokens of each shard, in the order of the text."""
        return tuple(shard.tokens for shard in self._shards)

    def horizon(self, block_size: int) -> int:
        """Return the prefetch horizon in windows; 0 if the stream is local."""
        return 0

    def expect(self, starts: np.ndarray, length: int) -> None:
        """Announce windows that will be read, in their order, so that shards can be prefetched."""

    def stamps(self) -> dict[str, list[int]]:
        """Return size, inode and times of each shard's file, which change when it is replaced."""
        return {shard.file: stamp(self._folder / shard.file) for shard in self._shards}

    def check_stamps(self, stamps: dict[str, list[int]]) -> None:
        """Compare shards whose stamp has changed with the manifest's digests.

        A dataset that was copied has other stamps; its shards are read once.

        Raises:
            UserError: A shard has been replaced.
        """
        for shard in self._shards:
            path = self._folder / shard.file
            if stamps.get(shard.file) == stamp(path):
                continue
            if not shard.sha256 and shard.file in stamps:
                raise UserError(
                    f"{path} has changed since the checkpoint was saved, and without a digest "
                    "its tokens cannot be compared: resume with --data.allow_changes true"
                )
            if shard.sha256 and (found := file_sha256(path)) != shard.sha256:
                raise UserError(
                    f"{path} has been replaced since the checkpoint was saved: expected SHA-256 "
                    f"{shard.sha256}, found {found}; {repair_hint(self._folder)}"
                )

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Read windows of tokens, which may cross from one shard into the next.

        Args:
            starts: Position of each window's first token in the split, integers, (n,).
            length: Tokens a window.

        Returns:
            int64, (n, length).

        Raises:
            IndexError: A window reaches beyond the split.
            UserError: A shard changed since it was opened, or holds a token outside the vocabulary.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(
                f"windows of {length} tokens from {starts.min()} to {starts.max()} "
                f"reach beyond the {len(self)} tokens of the split"
            )
        out = np.empty((len(starts), length), dtype=np.int64)
        shards = np.searchsorted(self._ends, starts, side="right")
        for row, start, shard in zip(out, starts.tolist(), shards.tolist(), strict=True):
            self._fill(row, start, shard)
        # A flipped bit changes neither type nor size, and would reach the embedding.
        if out.max(initial=0) >= self._vocab_size:
            raise UserError(
                f"{self._folder} holds token {out.max()}, expected only tokens below its "
                f"vocabulary of {self._vocab_size:,}; {repair_hint(self._folder)}"
            )
        return out

    def _fill(self, row: np.ndarray, start: int, shard: int) -> None:
        filled = 0
        while filled < len(row):
            tokens = self._tokens(shard)
            offset = start + filled - (int(self._ends[shard]) - len(tokens))
            part = tokens[offset : offset + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1

    def _tokens(self, index: int) -> np.ndarray:
        path = self._folder / self._shards[index].file
        if index not in self._maps:
            tokens = open_shard(self._folder, self._shards[index], self._dtype, self._format)
            self._maps[index] = tokens, path.stat().st_size
        tokens, size = self._maps[index]
        # Reading a mapped page beyond a truncated file's end kills the process (SIGBUS).
        if os.stat(path).st_size != size:
            raise UserError(f"{path} changed while it was read; {repair_hint(self._folder)}")
        return tokens


class DatasetWindows:
    """One split of one dataset in one order.

    Args:
        stream: Tokens of the split.
        order: Order of its windows.

    Attributes:
        n_windows: Windows of an epoch.
        block_size: Tokens T per sequence; a window has T + 1.
    """

    def __init__(self, stream: TokenStream, order: WindowOrder) -> None:
        self.stream, self.order = stream, order
        self.n_windows, self.block_size = order.n_windows, order.block_size
        self._looked_ahead = (-1, -1)  # epoch and window up to which shards were announced

    def read(self, epoch: int, first: int, count: int, rank: int, world: int) -> np.ndarray:
        """Read every `world`-th of the windows first .. first + count - 1, from the rank-th on.

        Returns:
            int64, (count / world, T + 1).
        """
        starts = self.order.starts(epoch, first, count)[rank::world]
        self.look_ahead(epoch, first)
        return self.stream.windows(starts, self.block_size + 1)

    def shares(self, epoch: int, window: int) -> dict[str, float]:
        """Return an empty dict: shares are a mixture's."""
        return {}

    def look_ahead(self, epoch: int, first: int) -> None:
        """Announce the coming windows to a stream that has to fetch their shards."""
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
        """Return the settings that decide the order, as JSON types."""
        order = self.order
        return {
            "dataset": self.stream.digest,
            "data.order": order.name,
            "data.seed": order.seed,
            "data.block_size": order.block_size,
            "data.shuffle_windows": order.shuffle_windows,
        }


def stamp(path: Path) -> list[int]:
    """Return facts of a file that change when it is replaced, even at equal size and mtime."""
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
