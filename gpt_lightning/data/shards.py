"""Tokens on disk: write a shard, read windows from a split's shards, in an order."""

import dataclasses
import errno
import functools
import hashlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import advise_random, file_header
from gpt_lightning.data.manifest import (
    CHECK_READ,
    SCAN_BYTES,
    Manifest,
    Shard,
    open_shard,
    repair_hint,
)
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256


def write_shard(path: Path, tokens: np.ndarray) -> Shard:
    """Write tokens, (n,) of uint16 or uint32, as write_stream does."""
    assert tokens.ndim == 1, tokens.shape
    assert tokens.dtype in (np.uint16, np.uint32), tokens.dtype
    return write_stream(path, [tokens], tokens.dtype)


def write_stream(
    path: Path, chunks: Iterable[np.ndarray], dtype: np.dtype[Any], file_format: str = "npy"
) -> Shard:
    """Write a stream of tokens as a little-endian file, synced to the disk.

    Args:
        path: File to write.
        chunks: Tokens, (n,) each.
        dtype: Type of the tokens, uint16 or uint32.
        file_format: npy, nanogpt or llmc.

    Raises:
        OSError: The disk is full; a part of the file may be left.
    """
    kind, n_tokens = dtype.newbyteorder("<"), 0
    with open(path, "wb") as file:
        file.seek(len(file_header(file_format, kind.name, 0)))
        for tokens in chunks:
            file.write(np.ascontiguousarray(tokens, kind).view(np.uint8).data)
            n_tokens += len(tokens)
        file.seek(0)
        file.write(file_header(file_format, kind.name, n_tokens))
        file.flush()
        os.fsync(file.fileno())
    return Shard(path.name, n_tokens, file_sha256(path))


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
        self._folder, self._where, self._repair = folder, str(folder), repair_hint(folder)
        self._dtype, self._format = manifest.dtype, manifest.format
        self._vocab_size = manifest.vocab_size
        self._shards = manifest.splits[split]
        content = json.dumps(vars(manifest), sort_keys=True, default=vars)
        self.digest = hashlib.sha256(content.encode()).hexdigest()  # the whole dataset's
        counts = np.array([shard.tokens for shard in self._shards], dtype=np.int64)
        self._ends = np.cumsum(counts)  # shard i holds the tokens _ends[i] - counts[i] .. _ends[i]
        self._maps_key = object()
        self._unchecked: set[int] = set()  # shards whose digest is compared when they are opened
        self.is_random = False  # True: windows are read here and there
        self.nodes = 1  # machines that read the split together

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def shard_tokens(self) -> tuple[int, ...]:
        """Tokens of each shard, in the order of the text."""
        return tuple(shard.tokens for shard in self._shards)

    def horizon(self, block_size: int) -> int:
        """Return the prefetch horizon in windows; 0 if the stream is local."""
        return 0

    def expect(self, shards: list[int]) -> None:
        """Announce shards that will be read, in their order, so that they can be prefetched."""

    def shuffle_blocks(self, block_size: int, lanes: int) -> tuple[int, str]:
        """Return the number of blocks in which windows are shuffled, and a remark on them.

        Args:
            block_size: Tokens T a window.
            lanes: Number of lanes.
        """
        return 1, ""

    def check_order(self, order: WindowOrder) -> None:
        """Raise a UserError if a cache of shards is too small for an order."""

    @functools.cached_property
    def stamp(self) -> str:
        """Digest of the shards' names, sizes, inodes and times as they were opened."""
        stamps = {shard.file: stamp(self._folder / shard.file) for shard in self._shards}
        return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()

    def check_stamp(self, before: str) -> None:
        """Compare the shards with the manifest's digests if their stamp has changed.

        The shards of a dataset that was copied have another stamp. Up to 1 GiB they are read here,
        more when they are first opened.

        Args:
            before: Stamp in a checkpoint; "" if it has none.

        Raises:
            UserError: A shard has been replaced.
        """
        if before == self.stamp:
            return
        if before and not all(shard.sha256 for shard in self._shards):
            raise UserError(
                f"shards of {self._where} have changed since the checkpoint was saved, and without "
                "digests their tokens cannot be compared: resume with --data.allow_changes true"
            )
        self._unchecked = {index for index, shard in enumerate(self._shards) if shard.sha256}
        if len(self) * np.dtype(self._dtype).itemsize <= SCAN_BYTES:
            for index in sorted(self._unchecked):
                self._check(index)

    def _check(self, index: int) -> None:
        shard = self._shards[index]
        path = self._folder / shard.file
        with explained("read", path, CHECK_READ):
            found = file_sha256(path)
        if found != shard.sha256:
            raise UserError(
                f"{path} has been replaced since the checkpoint was saved: expected SHA-256 "
                f"{shard.sha256}, found {found}; {repair_hint(self._folder)}"
            )
        self._unchecked.discard(index)

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
        mapped, tokens = -1, out  # the shard of the window before, which is often the next one's
        for row, start, shard in zip(out, starts.tolist(), shards.tolist(), strict=True):
            filled = 0
            while filled < length:
                if shard != mapped:
                    mapped, tokens = shard, self._tokens(shard)
                    begin = int(self._ends[shard]) - len(tokens)
                offset = start + filled - begin
                part = tokens[offset : offset + length - filled]
                row[filled : filled + len(part)] = part
                filled, shard = filled + len(part), shard + 1
        # A flipped bit changes neither type nor size, and would reach the embedding.
        if out.max(initial=0) >= self._vocab_size:
            raise UserError(
                f"{self._where} holds token {out.max()}, expected only tokens below its "
                f"vocabulary of {self._vocab_size:,}; {self._repair}"
            )
        return out

    def _tokens(self, index: int) -> np.ndarray:
        key = self._maps_key, index
        if key not in _MAPS:
            if index in self._unchecked:
                self._check(index)
            _MAPS[key] = self._map(self._shards[index])
            while len(_MAPS) > max_maps():
                _MAPS.popitem(last=False)
        _MAPS.move_to_end(key)
        tokens, path, size = _MAPS[key]
        # Reading a mapped page beyond a truncated file's end kills the process (SIGBUS).
        if os.stat(path).st_size != size:
            raise UserError(f"{path} changed while it was read; {repair_hint(self._folder)}")
        return tokens

    def _map(self, shard: Shard) -> tuple[np.ndarray, Path, int]:
        path = self._folder / shard.file
        try:
            tokens = open_shard(self._folder, shard, self._dtype, self._format)
        except UserError as error:
            if getattr(error.__cause__, "errno", 0) not in (errno.EMFILE, errno.ENFILE):
                raise
            _MAPS.clear()  # what else this process has opened leaves fewer than it seemed
            tokens = open_shard(self._folder, shard, self._dtype, self._format)
        if self.is_random:
            advise_random(tokens)
        return tokens, path, path.stat().st_size


# Mapped shards of all streams of this process, the least recently read first. Each holds a file
# descriptor, of which a process may have 1,024, often less than a corpus has shards.
_MAPS: OrderedDict[tuple[object, int], tuple[np.ndarray, Path, int]] = OrderedDict()


def max_maps() -> int:
    """Return the bound of _MAPS: a quarter of the file descriptors that the process may have."""
    try:
        import resource  # absent on Windows
    except ImportError:
        return 256
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 4096 if soft < 0 else max(16, min(soft, 2**14) // 4)


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

    def shares(self, epoch: int, window: int) -> dict[str, float]:
        """Return an empty dict: shares are a mixture's."""
        return {}

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

    def identity(self) -> dict[str, Any]:
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

    def keep_shuffle(self, theirs: dict[str, Any]) -> None:
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


def stamp(path: Path) -> list[int]:
    """Return facts of a file that change when it is replaced, even at equal size and mtime."""
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]
