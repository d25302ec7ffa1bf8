"""Tokens to shards: write a split as a stream, and assemble parts in their order."""

import hashlib
import os
from collections.abc import Sequence
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import capacity, file_header, file_name, write_extras
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.parts import Block, Part, read_blocks
from gpt_lightning.prepare.settings import MIN_TOKENS, SPLITS, Settings, exact, split_borders


def finish_dataset(
    folder: Path,
    tokenizer: Tokenizer,
    settings: Settings,
    source: TextOrigin,
    recorded: dict[str, Any],
    splits: dict[str, tuple[Shard, ...]],
) -> Manifest:
    """Write the manifest of a dataset whose shards are complete, and return it."""
    vocab_size, file_format = tokenizer.vocab_size, settings.format
    dtype = token_dtype(vocab_size).name
    manifest = Manifest(tokenizer.spec(), vocab_size, dtype, source, recorded, splits, file_format)
    manifest.save(folder)
    return manifest


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
        settings: Settings with format and shard_tokens; nanogpt has one file per split.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype[Any], settings: Settings) -> None:
        self._folder = folder
        self._split = split
        self._dtype = dtype.newbyteorder("<")
        self._format = settings.format
        self._capacity = capacity(settings.format, settings.shard_tokens)
        self._shards: list[Shard] = []
        self._file: BufferedRandom | None = None
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

    def close(self, content: str) -> tuple[Shard, ...]:
        """Complete the last shard; return the split's shards in order.

        Args:
            content: Content of the split, such as "3 documents", for the error message.

        Raises:
            UserError: The split has fewer than two tokens.
        """
        if self.n_tokens < MIN_TOKENS:
            raise UserError(
                f"the {self._split} split has {content}, {self.n_tokens} tokens, and needs "
                f"{MIN_TOKENS}: give more text or change val_fraction and test_fraction"
            )
        if self._file:
            self._close()
        return tuple(self._shards)

    def _open(self) -> BufferedRandom:
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
                self._digest = hashlib.file_digest(file, "sha256")
            file.flush()
            os.fsync(file.fileno())
        self._shards.append(Shard(name, self._count, self._digest.hexdigest()))
        self._file = None


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
    n_tokens, position = sum(part.tokens for _, part in parts), 0
    borders = split_borders(n_tokens, settings.val_fraction, settings.test_fraction)
    writers = {name: SplitWriter(folder, name, dtype, settings) for name in borders}
    documents, texts = dict.fromkeys(writers, 0), hashlib.sha256()
    for path, part in parts:
        for block in read_blocks(path, part, dtype):
            if settings.split_by == "fraction":
                numbers = _split_at(block, position, borders)
            else:
                numbers = split_of(block.digests, settings.val_fraction, settings.test_fraction)
            position += len(block.tokens)
            texts.update(block.digests.data)
            for name, writer in writers.items():
                chosen = numbers == SPLITS.index(name)
                documents[name] += int(chosen.sum())
                mask = np.repeat(chosen, block.lengths)
                writer.append(block.tokens if chosen.all() else block.tokens[mask])
    splits = {
        name: writer.close(f"{documents[name]} documents") for name, writer in writers.items()
    }
    return splits, texts.hexdigest()


def _split_at(block: Block, position: int, borders: dict[str, tuple[int, int]]) -> np.ndarray:
    """Return the number in SPLITS of the split in which each document begins, (documents,).

    A document is not cut.
    """
    starts = position + np.cumsum(block.lengths) - block.lengths
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
    # hashes below 2**64: below the first border is val, below the second test
    shares = exact(val_fraction), exact(val_fraction) + exact(test_fraction)
    val, test = (np.uint64(int(share * 2**64)) for share in shares)
    return np.where(hashes < val, 1, np.where(hashes < test, 2, 0)).astype(np.uint8)
