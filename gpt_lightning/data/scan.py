"""Reads of whole shards from front to back, in bounded memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt_lightning.data.formats import ShardError

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


def out_of_vocab(tokens: np.ndarray, vocab_size: int, position: int) -> str | None:
    """Return an error text (expected and found) if a token is outside the vocabulary, else None.

    Args:
        tokens: Tokens, (n,).
        vocab_size: Number of token ids of the tokenizer.
        position: Position of the first of these tokens in its shard.
    """
    if int(tokens.max(initial=0)) < vocab_size:
        return None
    at = int(np.argmax(tokens >= vocab_size))
    return (
        f"expected only tokens below the vocabulary of {vocab_size:,}, "
        f"found token {tokens[at]:,} at position {position + at:,}"
    )


def check_tokens(path: Path, n_tokens: int, dtype: str, vocab_size: int) -> None:
    """Check that every token of a shard is inside the vocabulary.

    Raises:
        OSError: The file cannot be read.
        ShardError: A token is not below vocab_size, or the file became shorter.
    """
    position = 0
    for tokens in token_pieces(path, n_tokens, dtype):
        found = out_of_vocab(tokens, vocab_size, position)
        if found:
            raise ShardError(found)
        position += len(tokens)
