"""Parts: the tokens of one unit of work, in one file that is complete or absent.

A part is a sequence of blocks. A block begins with a table: the number of documents and of tokens
(uint64), the documents' lengths in tokens (uint64), the SHA-256 of their texts (32 bytes each), the
CRC-32 of their tokens (uint32), and the CRC-32 of the table (uint32). The tokens follow. Behind the
blocks are the description of the part as JSON, its CRC-32 (uint32) and its length (uint32).
"""

import dataclasses
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt_lightning.errors import UserError

COUNT = np.dtype("<u8")
SUM = np.dtype("<u4")
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
    """

    documents: int
    tokens: int
    text_bytes: int
    skipped: int
    replaced: int


@dataclass(frozen=True)
class Table:
    """Documents of a block, without their tokens.

    Attributes:
        lengths: Tokens of each document, (documents,).
        digests: SHA-256 of the texts, uint8, (documents, 32).
        sums: CRC-32 of the tokens of each document, (documents,).
        offset: Place of the first document's tokens in the file; the others follow.
    """

    lengths: np.ndarray
    digests: np.ndarray
    sums: np.ndarray
    offset: int


class PartWriter:
    """Writer of one part, whose file is a part as soon as `complete` has returned.

    Memory: a block of about 1 Mi tokens, or one longer document.

    Args:
        file: File to write.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._documents: list[np.ndarray] = []
        self._digests: list[bytes] = []
        self._held = 0  # tokens of the block that is not written yet
        self._n_documents = self._n_tokens = self._n_bytes = 0

    def add(self, text: bytes, tokens: np.ndarray) -> None:
        """Add a document: its text in UTF-8 and its tokens, (n,)."""
        self._digests.append(hashlib.sha256(text).digest())
        self._n_bytes += len(text)
        self._documents.append(np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<")))
        self._held += len(tokens)
        if self._held >= BLOCK_TOKENS or len(self._documents) >= BLOCK_DOCUMENTS:
            self._flush()

    def complete(self, skipped: int, replaced: int) -> Part:
        """Write the last block and the description, and sync the file."""
        self._flush()
        part = Part(self._n_documents, self._n_tokens, self._n_bytes, skipped, replaced)
        description = json.dumps(dataclasses.asdict(part)).encode()
        end = np.array([zlib.crc32(description), len(description)], SUM)
        self._file.write(description + end.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        return part

    def _flush(self) -> None:
        if not self._documents:
            return
        counts = [len(self._documents), self._held]
        lengths = [len(tokens) for tokens in self._documents]
        sums = [zlib.crc32(tokens) for tokens in self._documents]  # type: ignore[arg-type]
        table = np.array([*counts, *lengths], COUNT).tobytes() + b"".join(self._digests)
        table += np.array(sums, SUM).tobytes()
        self._file.write(table + np.array(zlib.crc32(table), SUM).tobytes())
        for tokens in self._documents:
            self._file.write(tokens.data)
        self._n_documents += len(lengths)
        self._n_tokens += self._held
        self._documents, self._digests, self._held = [], [], 0


def read_part(path: Path) -> Part:
    """Return the description of a part.

    Raises:
        UserError: The part is damaged or missing.
    """
    try:
        with open(path, "rb") as file:
            end = file.seek(-2 * SUM.itemsize, os.SEEK_END)
            checksum, length = np.frombuffer(file.read(), SUM).tolist()
            file.seek(max(end - length, 0))
            description = file.read(min(length, end))
            if zlib.crc32(description) == checksum:
                return Part(**json.loads(description))
    except (OSError, ValueError, TypeError):
        pass
    raise damaged_part(path)


def read_tables(path: Path, part: Part, token_bytes: int) -> Iterator[Table]:
    """Yield the tables of a part's blocks in order; the tokens are not read.

    Args:
        path: File of the part.
        part: Its description.
        token_bytes: Bytes of one token.

    Raises:
        UserError: The part is damaged.
    """
    documents = tokens = 0
    with open(path, "rb") as file:
        while documents < part.documents:
            head = file.read(2 * COUNT.itemsize)
            if len(head) < 2 * COUNT.itemsize:
                raise damaged_part(path)
            n_documents, n_tokens = np.frombuffer(head, COUNT).tolist()
            documents, tokens = documents + n_documents, tokens + n_tokens
            # A flipped bit must not allocate an exabyte.
            if not n_documents or documents > part.documents or tokens > part.tokens:
                raise damaged_part(path)
            sizes = [COUNT.itemsize * n_documents, DIGEST_BYTES * n_documents]
            borders = np.cumsum([*sizes, SUM.itemsize * n_documents]).tolist()
            body = file.read(borders[-1] + SUM.itemsize)
            checksum = zlib.crc32(head + body[: borders[-1]])
            if body[borders[-1] :] != np.array(checksum, SUM).tobytes():
                raise damaged_part(path)
            lengths = np.frombuffer(body[: borders[0]], COUNT).astype(np.int64)
            digests = np.frombuffer(body[borders[0] : borders[1]], np.uint8)
            sums = np.frombuffer(body[borders[1] : borders[2]], SUM)
            yield Table(lengths, digests.reshape(-1, DIGEST_BYTES), sums, file.tell())
            file.seek(n_tokens * token_bytes, os.SEEK_CUR)
    if tokens != part.tokens:
        raise damaged_part(path)


class TokenReader:
    """Reader of documents by their places in parts; every document's checksum is compared.

    Args:
        paths: Files of the parts.
        dtype: Type of the tokens.
    """

    def __init__(self, paths: list[Path], dtype: np.dtype[Any]) -> None:
        self._paths = paths
        self._dtype = dtype.newbyteorder("<")

    def read(self, rows: np.ndarray) -> np.ndarray:
        """Return the tokens of documents in their order, (sum of lengths,).

        The documents are read in the order of their places; neighbours in one piece.

        Args:
            rows: Structured array with the fields part, offset, length and sum.

        Raises:
            UserError: A part is damaged or missing.
        """
        size, lengths = self._dtype.itemsize, rows["length"].astype(np.int64)
        starts = np.cumsum(lengths) - lengths
        tokens = np.empty(int(lengths.sum()), self._dtype)
        view = memoryview(tokens.view(np.uint8))  # type: ignore[arg-type]
        order = np.lexsort((rows["offset"], rows["part"]))
        parts, offsets = rows["part"][order], rows["offset"][order].astype(np.int64)
        first, n_bytes = starts[order] * size, lengths[order] * size
        follows = (parts[1:] == parts[:-1]) & (offsets[1:] == offsets[:-1] + n_bytes[:-1])
        follows &= first[1:] == first[:-1] + n_bytes[:-1]
        heads = np.flatnonzero(np.concatenate([[True], ~follows]))
        tails = np.concatenate([heads[1:], [len(order)]]) - 1
        for part in np.unique(parts):
            path = self._paths[part]
            own = slice(*np.searchsorted(parts[heads], [part, part + 1]))
            begins, ends = first[heads[own]], (first + n_bytes)[tails[own]]
            places = zip(begins.tolist(), ends.tolist(), offsets[heads[own]].tolist(), strict=True)
            try:
                with open(path, "rb", buffering=0) as file:
                    for begin, end, offset in places:
                        file.seek(offset)
                        while begin < end and (count := file.readinto(view[begin:end])):
                            begin += count
                        if begin < end:
                            raise damaged_part(path)
            except FileNotFoundError as error:
                raise damaged_part(path) from error
        borders = [0, *((starts + lengths) * size).tolist()]
        for i, checksum in enumerate(rows["sum"].tolist()):
            if zlib.crc32(view[borders[i] : borders[i + 1]]) != checksum:
                raise damaged_part(self._paths[rows["part"][i]])
        return tokens


def damaged_part(path: Path) -> UserError:
    """Delete a damaged part, so that the next run makes it again; return the error."""
    path.unlink(missing_ok=True)
    return UserError(
        f"{path} is damaged, its bytes differ from their checksums; it was removed: run the same "
        "command again, which makes this part again"
    )
