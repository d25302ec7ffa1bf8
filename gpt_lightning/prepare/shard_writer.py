"""Writing the shards of one split as a stream, and the files around a dataset's shards."""

import hashlib
import os
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import capacity, file_header, file_name, write_extras
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.settings import MIN_TOKENS, Settings


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
        check_size(self._split, self.n_tokens, content)
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


def check_size(split: str, n_tokens: int, content: str) -> None:
    """Raise a UserError if a split has fewer than two tokens.

    Args:
        split: Name of the split.
        n_tokens: Its tokens.
        content: Content of the split, such as "3 documents".
    """
    if n_tokens < MIN_TOKENS:
        raise UserError(
            f"the {split} split has {content}, {n_tokens} tokens, and needs "
            f"{MIN_TOKENS}: give more text or change val_fraction and test_fraction"
        )
