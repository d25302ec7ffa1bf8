"""Reading whole shards from front to back in bounded memory."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from gpt_lightning.data.formats import ShardError

PIECE_BYTES = 2**22  # a whole number of tokens of either type


def pieces(path: Path, token_bytes: int) -> Iterator[memoryview]:
    """A shard's bytes: first what stands before the tokens, then the tokens in pieces.

    The pieces share one buffer of 4 MiB: each holds until the next one is asked for. The file is
    read, not mapped, so that a truncation meanwhile is an error and no signal.

    Args:
        path: of the shard.
        token_bytes: of its tokens, which are the end of the file.

    Raises:
        OSError: it cannot be read.
        ShardError: it became shorter.
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
    """A shard's tokens in pieces, (n,) each; each holds until the next one is asked for.

    Raises:
        OSError: it cannot be read.
        ShardError: it became shorter.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    stream = pieces(path, n_tokens * kind.itemsize)
    next(stream)
    for piece in stream:
        yield np.frombuffer(piece, kind)


def out_of_vocab(tokens: np.ndarray, vocab_size: int, position: int) -> str | None:
    """What was expected and found if a token is not below vocab_size.

    Args:
        tokens: (n,).
        vocab_size: of the tokenizer.
        position: of the first of these tokens in its shard.
    """
    if int(tokens.max(initial=0)) < vocab_size:
        return None
    at = int(np.argmax(tokens >= vocab_size))
    return (
        f"expected only tokens below the vocabulary of {vocab_size:,}, "
        f"found token {tokens[at]:,} at position {position + at:,}"
    )


def check_tokens(path: Path, n_tokens: int, dtype: str, vocab_size: int) -> None:
    """Looks at every token of a shard.

    Raises:
        OSError: it cannot be read.
        ShardError: a token is not below vocab_size, or the file became shorter.
    """
    position = 0
    for tokens in token_pieces(path, n_tokens, dtype):
        found = out_of_vocab(tokens, vocab_size, position)
        if found:
            raise ShardError(found)
        position += len(tokens)
