"""Reads of whole shards from front to back, in bounded memory."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt_lightning.data.formats import ShardError

if TYPE_CHECKING:
    from gpt_lightning.data.manifest import Manifest, Shard
    from gpt_lightning.data.progress import Progress

PIECE_BYTES = 2**22  # a whole number of tokens of either type


def pieces(path: Path, token_bytes: int) -> Iterator[memoryview]:
    """Yield a shard's bytes: first the header before the tokens, then the tokens in pieces.

    The pieces share one buffer of 4 MiB: each is valid until the next is requested. The file is
    read, not mapped, so that a truncation meanwhile raises an error instead of a signal.

    Args:
        path: Path of the shard.
        token_bytes: Bytes of its tokens, which are the end of the file.

    Raises:
        OSError: The file cannot be read.
        ShardError: The file became shorter.
    """
    buffer = memoryview(bytearray(PIECE_BYTES))
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        yield memoryview(file.read(max(0, size - token_bytes)))
        left = token_bytes
        while left:
            count = file.readinto(buffer[: min(left, PIECE_BYTES)])
            if not count or (count % 4 and count < left):
                raise ShardError(
                    f"{token_bytes - left + count:,} bytes of tokens: it was truncated"
                )
            yield buffer[:count]
            left -= count


def token_pieces(path: Path, n_tokens: int, dtype: str) -> Iterator[np.ndarray]:
    """Yield a shard's tokens in pieces, (n,) each; a piece is valid until the next is requested.

    Raises:
        OSError: The file cannot be read.
        ShardError: The file became shorter.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    stream = pieces(path, n_tokens * kind.itemsize)
    next(stream)
    for piece in stream:
        yield np.frombuffer(piece, kind)


def check_tokens(
    folder: Path, shard: "Shard", manifest: "Manifest", progress: "Progress | None" = None
) -> None:
    """Read a shard once, and check that every token is inside the vocabulary.

    Args:
        folder: Folder of the dataset.
        shard: Shard to read.
        manifest: Manifest of the dataset.
        progress: Display that counts the tokens of a full check, which also compares the digest of
            the file; None: the tokens alone are checked.

    Raises:
        OSError: The file cannot be read.
        ShardError: A token is not below vocab_size, the digest differs, or the file became shorter.
    """
    kind = np.dtype(manifest.dtype).newbyteorder("<")
    stream = pieces(folder / shard.file, shard.tokens * kind.itemsize)
    digest = hashlib.sha256(next(stream))
    position, wrong = 0, ""
    for piece in stream:
        tokens = np.frombuffer(piece, kind)
        if not wrong and int(tokens.max()) >= manifest.vocab_size:
            at = int(np.argmax(tokens >= manifest.vocab_size))
            wrong = (
                f"expected only tokens below the vocabulary of {manifest.vocab_size:,}, "
                f"found token {tokens[at]:,} at position {position + at:,}"
            )
        position += len(tokens)
        if progress:
            digest.update(piece)
            progress.add(len(piece), len(tokens))
    if wrong:
        raise ShardError(wrong)
    if progress and shard.sha256 and digest.hexdigest() != shard.sha256:
        raise ShardError(f"expected SHA-256 {shard.sha256}, found {digest.hexdigest()}")
