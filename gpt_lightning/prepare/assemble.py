"""Tokens to shards: write a split as a stream, and assemble parts in their order."""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from gpt_lightning.data.formats import capacity, file_header, file_name, write_extras
from gpt_lightning.data.manifest import Shard
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.parts import Block, Part, read_blocks
from gpt_lightning.prepare.settings import MIN_TOKENS, SPLITS, Settings, hash_borders, split_borders

READ_BYTES = 2**22


def begin_dataset(folder: Path, tokenizer: Tokenizer, settings: Settings) -> None:
    """Make the folder of a new dataset, with the files that its format needs besides the shards.

    Raises:
        UserError: The format does not know the tokenizer, or cannot hold its tokens.
    """
    file_header(settings.format, token_dtype(tokenizer.vocab_size).name, 0)
    folder.mkdir()
    write_extras(settings.format, folder, tokenizer)


class SplitWriter:
    """Writer of a split's tokens into shards of settings.shard_tokens.

    Memory: the tokens of one append. Digests are computed while writing. Only the last shard of a
    split is read again, because its header was written for a full one.

    Args:
        folder: Folder of the dataset, without files of that split.
        split: train, val or test.
        dtype: Type of the tokens.
        settings: Settings with format and shard_tokens; nanogpt has one file a split.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], settings: Settings) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype.newbyteorder("<")
        self._format = settings.format
        self._capacity = capacity(settings.format, settings.shard_tokens)
        self._shards: list[Shard] = []
        self._file: BinaryIO | None = None
        self._digest = hashlib.sha256()
        self._count = 0  # tokens in the open file
        self.n_tokens = 0

    def append(self, tokens: np.ndarray) -> None:
        """Append tokens, (n,).

        Raises:
            OSError: The disk is full.
            UserError: The format cannot hold such shards.
        """
        while len(tokens):
            file = self._file or self._open()
            head = tokens[: self._capacity - self._count]
            content = np.ascontiguousarray(head, self._dtype).view(np.uint8).data
            self._digest.update(content)
            file.write(content)
            self._count += len(head)
            self.n_tokens += len(head)
            tokens = tokens[len(head) :]
            if self._count == self._capacity:
                self._close()

    def close(self) -> tuple[Shard, ...]:
        """Complete the last shard; return the split's shards in order."""
        if self._file:
            self._close()
        return tuple(self._shards)

    def _open(self) -> BinaryIO:
        name = file_name(self._format, self._split, len(self._shards))
        header = file_header(self._format, self._dtype.name, self._capacity)
        self._file = file = open(self._folder / name, "w+b")  # noqa: SIM115 - closed by _close
        file.write(header)
        self._digest, self._count = hashlib.sha256(header), 0
        return file

    def _close(self) -> None:
        assert self._file
        name = file_name(self._format, self._split, len(self._shards))
        with self._file as file:
            promised = file_header(self._format, self._dtype.name, self._capacity)
            header = file_header(self._format, self._dtype.name, self._count)
            if header != promised:
                assert len(header) == len(promised), (header, promised)
                file.seek(0)
                file.write(header)
                file.seek(0)
                self._digest = _digest(file)
            file.flush()
            os.fsync(file.fileno())
        self._shards.append(Shard(name, self._count, self._digest.hexdigest()))
        self._file = None


def _digest(file: BinaryIO) -> "hashlib._Hash":
    digest = hashlib.sha256()
    while chunk := file.read(READ_BYTES):
        digest.update(chunk)
    return digest


# ---- parts to shards -----------------------------------------------------------------------------


def assemble(
    parts: Sequence[tuple[Path, Part]], folder: Path, dtype: np.dtype[Any], settings: Settings
) -> tuple[dict[str, tuple[Shard, ...]], str]:
    """Stream parts, in their order, into the shards of each split.

    Memory: a block of a part, 1 Mi tokens or one longer document, a few times.

    Args:
        parts: File and description of each part.
        folder: Folder of the new dataset.
        dtype: Type of the tokens.
        settings: Settings of the splits and the shards.

    Returns:
        Split name -> shards, and the SHA-256 of all documents' SHA-256, which is equal for equal
        texts in equal order, independent of their files.

    Raises:
        UserError: A part is damaged, or a split has fewer than two tokens.
        OSError: The disk is full.
    """
    names = settings.wanted_splits()
    writers = {name: SplitWriter(folder, name, dtype, settings) for name in names}
    documents, texts = dict.fromkeys(writers, 0), hashlib.sha256()
    n_tokens, position = sum(part.tokens for _, part in parts), 0
    for path, part in parts:
        for block in read_blocks(path, part, dtype):
            split_of = _split_of(block, position, n_tokens, settings)
            position += len(block.tokens)
            texts.update(block.digests.data)
            for name, writer in writers.items():
                chosen = split_of == SPLITS.index(name)
                documents[name] += int(chosen.sum())
                writer.append(_of_documents(block, chosen))
    for name, writer in writers.items():
        if writer.n_tokens < MIN_TOKENS:
            raise UserError(
                f"the {name} split has {documents[name]} documents, {writer.n_tokens} tokens, and "
                f"needs {MIN_TOKENS}: give more text or change val_fraction and test_fraction"
            )
    return {name: writer.close() for name, writer in writers.items()}, texts.hexdigest()


def _split_of(block: Block, position: int, n_tokens: int, settings: Settings) -> np.ndarray:
    """Return the number in SPLITS of each document's split, (documents,)."""
    if settings.split_by != "fraction":
        return split_of(block.digests, settings.val_fraction, settings.test_fraction)
    # A document belongs to the split of its first token: it is not cut.
    starts = position + np.cumsum(block.lengths) - block.lengths
    borders = split_borders(n_tokens, settings.val_fraction, settings.test_fraction)
    found = np.zeros(len(starts), np.uint8)
    for name, (first, last) in borders.items():
        found[(starts >= first) & (starts < last)] = SPLITS.index(name)
    return found


def split_of(digests: np.ndarray, val_fraction: float, test_fraction: float) -> np.ndarray:
    """Return the number in SPLITS of each document's split, by the hash of its text.

    Equal documents get the same split: validation text that is also trained on would lower the
    validation loss.

    Args:
        digests: SHA-256 of the texts, uint8, (documents, 32).
        val_fraction: Share held out for validation.
        test_fraction: Share held out for testing.

    Returns:
        uint8, (documents,).
    """
    hashes = np.ascontiguousarray(digests[:, :8]).view("<u8")[:, 0]
    val, test = (np.uint64(border) for border in hash_borders(val_fraction, test_fraction))
    return np.where(hashes < val, 1, np.where(hashes < test, 2, 0)).astype(np.uint8)


def _of_documents(block: Block, chosen: np.ndarray) -> np.ndarray:
    if chosen.all():
        return block.tokens
    found: np.ndarray = block.tokens[np.repeat(chosen, block.lengths)]
    return found
