"""Parts: the tokens of one unit of work, in one file that is complete or absent.

A part is a sequence of blocks, each with the number of documents and of tokens (uint64), the
documents' lengths in tokens (uint64), the SHA-256 of their texts (32 bytes each) and the tokens.
The description of the part as JSON follows, and the length of this description (uint64).
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt_lightning.errors import UserError

COUNT = np.dtype("<u8")
DIGEST_BYTES = 32
BLOCK_TOKENS = 2**20
BLOCK_DOCUMENTS = 2**16


@dataclass(frozen=True)
class Part:
    """Description of a part.

    Attributes:
        documents: Number of documents.
        tokens: Number of tokens, with an end-of-text token for each document.
        text_bytes: Bytes of the documents in UTF-8.
        skipped: Damaged documents that were omitted (errors skip).
        replaced: Characters that replace damaged bytes (errors replace).
        sha256: Digest of the blocks.
    """

    documents: int
    tokens: int
    text_bytes: int
    skipped: int
    replaced: int
    sha256: str


@dataclass(frozen=True)
class Block:
    """Block of documents.

    Attributes:
        lengths: Tokens of each document, (documents,).
        digests: SHA-256 of the texts, uint8, (documents, 32).
        tokens: Tokens of all documents in order, (sum of lengths,).
    """

    lengths: np.ndarray
    digests: np.ndarray
    tokens: np.ndarray


class PartWriter:
    """Writer of one part, whose file is a part as soon as `complete` has returned.

    Memory: a block of about 1 Mi tokens, or one longer document.

    Args:
        file: File to write.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._documents: list[np.ndarray] = []
        self._digests: list[bytes] = []
        self._held = 0  # tokens of the block that is not written yet
        self._n_documents = self._n_tokens = self._n_bytes = 0

    def add(self, text: bytes, tokens: np.ndarray) -> None:
        """Add a document: its text in UTF-8 and its tokens, (n,)."""
        self._digests.append(hashlib.sha256(text).digest())
        self._n_bytes += len(text)
        self._documents.append(tokens)
        self._held += len(tokens)
        if self._held >= BLOCK_TOKENS or len(self._documents) >= BLOCK_DOCUMENTS:
            self._flush()

    def complete(self, skipped: int, replaced: int) -> Part:
        """Write the last block and the description, and sync the file."""
        self._flush()
        counts = self._n_documents, self._n_tokens, self._n_bytes, skipped, replaced
        part = Part(*counts, sha256=self._digest.hexdigest())
        description = json.dumps(dataclasses.asdict(part)).encode()
        self._file.write(description + len(description).to_bytes(8, "little"))
        self._file.flush()
        os.fsync(self._file.fileno())
        return part

    def _flush(self) -> None:
        if not self._documents:
            return
        lengths = np.array([len(tokens) for tokens in self._documents], COUNT)
        counts = np.array([len(lengths), self._held], COUNT)
        digests = np.frombuffer(b"".join(self._digests), np.uint8)
        arrays: list[np.ndarray] = [counts, lengths, digests, *self._documents]
        for array in arrays:
            ordered = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            content = ordered.view(np.uint8).data
            self._digest.update(content)
            self._file.write(content)
        self._n_documents += len(lengths)
        self._n_tokens += self._held
        self._documents, self._digests, self._held = [], [], 0


def read_part(path: Path) -> Part | None:
    """Return the description of a part; None if there is no complete part of that name."""
    try:
        with open(path, "rb") as file:
            end = file.seek(-8, os.SEEK_END)
            length = int.from_bytes(file.read(8), "little")
            file.seek(max(end - length, 0))
            return Part(**json.loads(file.read(min(length, end))))
    except (OSError, ValueError, TypeError):  # absent or damaged: it is made again
        return None


def read_blocks(path: Path, part: Part, dtype: np.dtype[Any]) -> Iterator[Block]:
    """Yield the blocks of a part in order, and check its digest before the end.

    Raises:
        UserError: The part is damaged.
    """
    digest, documents, tokens = hashlib.sha256(), 0, 0

    def read(count: int, kind: np.dtype[Any]) -> np.ndarray:
        content = file.read(count * kind.itemsize)
        if len(content) < count * kind.itemsize:
            raise _damaged(path)
        digest.update(content)
        return np.frombuffer(content, kind)

    with open(path, "rb") as file:
        while documents < part.documents:
            n_documents, n_tokens = read(2, COUNT).tolist()
            # A flipped bit must not allocate an exabyte.
            if not 0 < n_documents <= part.documents or n_tokens > part.tokens:
                raise _damaged(path)
            lengths = read(n_documents, COUNT).astype(np.int64)
            digests = read(DIGEST_BYTES * n_documents, np.dtype(np.uint8))
            if int(lengths.sum()) != n_tokens:
                raise _damaged(path)
            documents, tokens = documents + n_documents, tokens + n_tokens
            found = read(n_tokens, dtype.newbyteorder("<"))
            yield Block(lengths, digests.reshape(-1, DIGEST_BYTES), found)
    if digest.hexdigest() != part.sha256 or tokens != part.tokens:
        raise _damaged(path)


def _damaged(path: Path) -> UserError:
    path.unlink(missing_ok=True)  # so that the next run makes it again
    return UserError(
        f"{path} is damaged, its bytes differ from its SHA-256; it was removed: run the same "
        "command again, which makes this part again"
    )
