"""Tokens on disk: write and read a shard, read windows from a split's shards."""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from gpt_lightning.data.formats import ShardError, file_header, file_name, mapped
from gpt_lightning.data.manifest import CHECK_READ, SPLITS, Manifest, Shard, repair_hint
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, json_digest

OnBytes = Callable[[int], object]  # gets numbers of bytes that were read
PIECE_TOKENS = 2**21
BUFFER_BYTES = 2**20
SCAN_BYTES = 2**30  # largest size at which every token is checked before training
# Shards of a process that are mapped, of which each takes a file descriptor: at most a quarter of
# those that it may have, and 512, because select() fails for a descriptor from 1,024 on.
MAX_MAPS = max(16, min(os.sysconf("SC_OPEN_MAX") // 4, 512))


def write_stream(
    path: Path, chunks: Iterable[np.ndarray], dtype: np.dtype, file_format: str = "npy"
) -> Shard:
    """Write a stream of tokens as one little-endian file, synced to the disk.

    Args:
        path: File to write.
        chunks: Tokens, (n,) each.
        dtype: Type of the tokens, uint16 or uint32.
        file_format: npy, nanogpt or llmc.

    Raises:
        OSError: The disk is full; a part of the file may be left.
    """
    with contextlib.closing(ShardFile(path, dtype, file_format)) as file:
        for tokens in chunks:
            file.write(tokens)
        return file.finish()


class ShardFile:
    """File of tokens that is written piece by piece, little-endian and synced to the disk.

    Args:
        path: File to write.
        dtype: Type of the tokens, uint16 or uint32.
        file_format: npy, nanogpt or llmc.

    Attributes:
        n_tokens: Number of tokens so far.
    """

    def __init__(self, path: Path, dtype: np.dtype, file_format: str):
        self.path = path
        self.kind = dtype.newbyteorder("<")
        self.file_format = file_format
        self.n_tokens = 0
        self._file = open(path, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115 - close closes it
        self._file.seek(len(file_header(file_format, self.kind.name, 0)))

    def write(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,)."""
        self._file.write(np.ascontiguousarray(tokens, self.kind).view(np.uint8).data)
        self.n_tokens += len(tokens)

    def finish(self) -> Shard:
        """Write the header, sync and close the file, and return its description."""
        self._file.seek(0)
        self._file.write(file_header(self.file_format, self.kind.name, self.n_tokens))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return Shard(self.path.name, self.n_tokens, file_sha256(self.path))

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()


class ShardWriter:
    """Consecutive shards of each split, whose tokens come piece by piece.

    Args:
        folder: Folder of the files.
        dtype: Type of the tokens, uint16 or uint32.
        file_format: npy, nanogpt or llmc.
        shard_tokens: Maximum number of tokens per file.
    """

    def __init__(self, folder: Path, dtype: np.dtype, file_format: str, shard_tokens: int):
        self.folder = folder
        self.dtype = dtype
        self.file_format = file_format
        self.shard_tokens = shard_tokens
        self._shards: dict[str, list[Shard]] = {split: [] for split in SPLITS}
        self._files: dict[str, ShardFile] = {}  # those that are not full

    def write(self, split: str, tokens: np.ndarray) -> None:
        """Append tokens, (n,), to a split."""
        while len(tokens):
            if split not in self._files:
                name = file_name(self.file_format, split, len(self._shards[split]))
                self._files[split] = ShardFile(self.folder / name, self.dtype, self.file_format)
            file = self._files[split]
            space = self.shard_tokens - file.n_tokens
            file.write(tokens[:space])
            tokens = tokens[space:]
            if file.n_tokens == self.shard_tokens:
                self._shards[split].append(file.finish())
                del self._files[split]

    def finish(self) -> dict[str, tuple[Shard, ...]]:
        """Complete the last files, and return the shards of each split that has some."""
        for split, file in self._files.items():
            self._shards[split].append(file.finish())
        return {split: tuple(shards) for split, shards in self._shards.items() if shards}

    def close(self) -> None:
        """Close the files that are open, as they are."""
        for file in self._files.values():
            file.close()


# ---- one shard ---------------------------------------------------------------------------------


@contextlib.contextmanager
def shard_errors(folder: Path, shard: Shard) -> Iterator[None]:
    """Turn an OSError or a ShardError of a shard into a UserError with a fix."""
    path = folder / shard.file
    try:
        with explained("read", path, CHECK_READ):
            yield
    except ShardError as fault:
        raise UserError(f"{path}: {fault}; {repair_hint(folder)}") from fault


def open_shard(
    folder: Path, shard: Shard, manifest: Manifest, is_random: bool = False
) -> np.ndarray:
    """Map the tokens of a shard read-only, (shard.tokens,); see `mapped`.

    Raises:
        UserError: The file is missing, cannot be read, has another format, or differs in type,
            count or size.
    """
    with shard_errors(folder, shard):
        try:
            path, dtype = folder / shard.file, manifest.dtype
            tokens = mapped(path, dtype, manifest.format, is_random)
            if len(tokens) != shard.tokens:
                raise ShardError(f"an array of shape {tokens.shape} of {dtype}")
        except ShardError as fault:
            wanted = f"expected {shard.tokens:,} tokens of {dtype}"
            raise ShardError(f"{wanted}, found: {fault}") from fault
    return tokens


def token_pieces(folder: Path, shard: Shard, dtype: str) -> Iterator[np.ndarray]:
    """Yield a shard's tokens in pieces, (n,) each.

    The file is read, not mapped, so that a truncation meanwhile raises an error, not a signal.

    Raises:
        OSError: The file cannot be read.
        ShardError: The file became shorter.
    """
    kind, left = np.dtype(dtype).newbyteorder("<"), shard.tokens
    with open(folder / shard.file, "rb") as file:
        file.seek(-left * kind.itemsize, os.SEEK_END)  # tokens are the end of a file
        while left:
            tokens = np.fromfile(file, kind, min(left, PIECE_TOKENS))
            if not len(tokens):
                raise ShardError(f"expected {left:,} more tokens: it was truncated")
            yield tokens
            left -= len(tokens)


def check_shard(
    folder: Path, shard: Shard, manifest: Manifest, on_bytes: OnBytes | None = None
) -> None:
    """Read a shard, and check that every token is inside the vocabulary.

    Args:
        folder: Folder of the dataset.
        shard: Shard to read.
        manifest: Manifest of the dataset.
        on_bytes: Function to call with numbers of bytes that were read; with it, the digest of the
            file is compared, too.

    Raises:
        UserError: As open_shard, or a token is not below vocab_size, the digest differs, or the
            file became shorter.
    """
    open_shard(folder, shard, manifest)
    position = 0
    with shard_errors(folder, shard):
        for tokens in token_pieces(folder, shard, manifest.dtype):
            if tokens.max() >= manifest.vocab_size:
                at = np.argmax(tokens >= manifest.vocab_size)
                raise ShardError(
                    f"expected only tokens below the vocabulary of {manifest.vocab_size:,}, "
                    f"found token {tokens[at]:,} at position {position + at:,}"
                )
            position += len(tokens)
            if on_bytes:
                on_bytes(tokens.nbytes)
        if on_bytes and shard.sha256 not in ("", found := file_sha256(folder / shard.file)):
            raise ShardError(f"expected SHA-256 {shard.sha256}, found {found}")


def stamp(path: Path) -> list[int]:
    """Return facts of a file that change when it is replaced, even at equal size and mtime."""
    found = path.stat()
    return [found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns]


# ---- a split -----------------------------------------------------------------------------------


class TokenStream:
    """Shards of one split as one sequence of tokens.

    A shard is mapped at its first read, in the process that reads it: a pickled stream (in a loader
    worker under spawn) carries file names, not the mapped tokens.

    Args:
        folder: Folder of the dataset.
        manifest: Manifest of the folder.
        split: train, val or test.

    Attributes:
        is_remote: True if shards are fetched before they are read.
    """

    is_remote = False

    def __init__(self, folder: Path, manifest: Manifest, split: str):
        self._folder = folder
        self._where = str(folder)
        self._repair = repair_hint(folder)
        self._manifest = manifest
        self._shards = manifest.splits[split]
        self.digest = json_digest(vars(manifest), sort_keys=True, default=vars)  # of all splits
        self._ends = np.cumsum(self.shard_tokens, dtype=np.int64)  # tokens up to each shard's end
        self._unchecked: set[int] = set()  # shards whose digest is compared when they are opened
        self.is_random = False  # True: windows are read here and there

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def shard_tokens(self) -> tuple[int, ...]:
        """Tokens of each shard, in the order of the text."""
        return tuple(shard.tokens for shard in self._shards)

    def shard_at(self, start: int) -> int:
        """Return the number of the shard that has a token."""
        return int(np.searchsorted(self._ends, start, side="right"))

    def fetch(self, starts: np.ndarray, length: int) -> None:
        """Wait for the shards of windows, if they are behind a URL."""

    def expect(self, start: int) -> None:
        """Fetch the shard that has a token, in a thread, if it is behind a URL."""

    @functools.cached_property
    def stamp(self) -> str:
        """Digest of the shards' names, sizes, inodes and times as they were opened."""
        return json_digest({s.file: stamp(self._folder / s.file) for s in self._shards})

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
        if len(self) * np.dtype(self._manifest.dtype).itemsize <= SCAN_BYTES:
            for index in sorted(self._unchecked):
                self._check(index)

    def _check(self, index: int) -> None:
        shard = self._shards[index]
        with shard_errors(self._folder, shard):
            if (found := file_sha256(self._folder / shard.file)) != shard.sha256:
                raise ShardError(
                    "it was replaced since the checkpoint was saved: expected SHA-256 "
                    f"{shard.sha256}, found {found}"
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
        if out.max(initial=0) >= self._manifest.vocab_size:
            raise UserError(
                f"{self._where} holds token {out.max()}, expected only tokens below its "
                f"vocabulary of {self._manifest.vocab_size:,}; {self._repair}"
            )
        return out

    def _tokens(self, index: int) -> np.ndarray:
        try:
            tokens, path, size = self._map(index)
        except UserError as error:
            if getattr(error.__cause__, "errno", 0) not in (errno.EMFILE, errno.ENFILE):
                raise
            # what else this process has opened leaves fewer than it seemed
            TokenStream._map.cache_clear()
            tokens, path, size = self._map(index)
        # Reading a mapped page beyond a truncated file's end kills the process (SIGBUS).
        if os.stat(path).st_size != size:
            raise UserError(f"{path} changed while it was read; {repair_hint(self._folder)}")
        return tokens

    @functools.lru_cache(MAX_MAPS)  # noqa: B019 the least recently read ones are closed
    def _map(self, index: int) -> tuple[np.ndarray, Path, int]:
        """Return tokens, path and size of a shard, whose digest is compared if need be."""
        if index in self._unchecked:
            self._check(index)
        shard = self._shards[index]
        path = self._folder / shard.file
        tokens = open_shard(self._folder, shard, self._manifest, self.is_random)
        return tokens, path, path.stat().st_size
