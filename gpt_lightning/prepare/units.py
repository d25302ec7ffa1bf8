"""Units of work: pieces of the inputs, each tokenized alone, and the files that hold their tokens.

The borders of units depend on the inputs alone, not on the number of workers or on earlier runs, so
that the dataset is the same however often the work was interrupted.

A finished unit has a record, KEY.json, which is written last, and pieces of some 4 Mi tokens:
KEY-0000.tokens, and KEY-0000.documents, a table of the documents. The table decides the splits and
the shards (pipeline.py). The files are deleted when the dataset is complete.
"""

import functools
import hashlib
import itertools
import json
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from gpt_lightning.data.tokenizers import Tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import json_digest, write_atomic
from gpt_lightning.prepare.documents import Documents, column_sizes
from gpt_lightning.prepare.inputs import Input, check_unchanged
from gpt_lightning.prepare.settings import Settings

UNIT_BYTES = 2**24
UNIT_FILES = 4096
PIECE_TOKENS = 2**22
PIECE_DOCUMENTS = 2**16
WORK_VERSION = 4  # version of a unit's files
CLEAN = "clean"
# row of a piece's table: tokens with the end-of-text token, bytes and SHA-256 of the text in UTF-8
ROW = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("sha256", "S32")])


@dataclass(frozen=True)
class Unit:
    """Piece of work: some whole files, or a piece of one file.

    Attributes:
        index: Place in the order of all units.
        files: Files to read.
        start: First byte (jsonl) or row group (parquet) of the only file.
        stop: First byte or row group that is not read; None: the end.
        size: Approximate bytes to read, for the progress display.
    """

    index: int
    files: tuple[Input, ...]
    start: int
    stop: int | None
    size: int

    @functools.cached_property
    def key(self) -> str:
        """Digest of the files' names and the place in them."""
        return json_digest([[entry.name for entry in self.files], self.start])[:16]

    @functools.cached_property
    def stamp(self) -> str:
        """Digest of the files' sizes and stamps."""
        return json_digest([[entry.size, entry.stamp] for entry in self.files])[:16]


def plan_units(
    inputs: Sequence[Input], text_field: str, unit_bytes: int = UNIT_BYTES
) -> list[Unit]:
    """Cut the inputs into units of about unit_bytes, in the order of the inputs.

    Units are byte ranges of JSONL, row groups of Parquet, whole compressed files, and groups of
    texts.

    Raises:
        UserError: A Parquet file is damaged or has no such column.
    """
    units: list[Unit] = []
    for are_texts, group in itertools.groupby(inputs, lambda entry: entry.kind == "text"):
        entries = list(group)
        if are_texts:
            sizes = [entry.size or 0 for entry in entries]
            for first, last, size in _grouped(sizes, unit_bytes):
                units.append(Unit(len(units), tuple(entries[first:last]), 0, None, size))
            continue
        for entry in entries:
            for start, stop, size in _ranges(entry, text_field, unit_bytes):
                units.append(Unit(len(units), (entry,), start, stop, size))
    return units


def _ranges(
    entry: Input, text_field: str, unit_bytes: int
) -> Iterator[tuple[int, int | None, int]]:
    """Yield the first and last + 1 byte or row group of each unit of a file, and its bytes."""
    if entry.kind == "parquet":
        limit = unit_bytes if entry.seekable else sys.maxsize  # each unit would copy the file
        yield from _grouped(column_sizes(entry, text_field), limit)
    elif entry.compression or not entry.seekable or entry.size is None or entry.kind == "arrow":
        yield 0, None, entry.size or 0
    else:
        for start in range(0, entry.size, unit_bytes):
            stop = min(start + unit_bytes, entry.size)
            yield start, stop, stop - start


def _grouped(sizes: list[int], limit: int) -> Iterator[tuple[int, int, int]]:
    """Yield first, last + 1 and the sum of neighbours that reach a limit together."""
    start = held = 0
    for index, size in enumerate(sizes, 1):
        held += size
        if held >= limit or index - start >= UNIT_FILES or index == len(sizes):
            yield start, index, held
            start, held = index, 0


# ---- files of a finished unit --------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Tokens of some consecutive documents of a unit, in two files.

    Attributes:
        path: Path of the files, without their endings.
        documents: Number of documents.
        tokens: Number of tokens.
        checksum: CRC-32 of the two files, one after the other.
    """

    path: Path
    documents: int
    tokens: int
    checksum: int

    def _content(self, suffix: str) -> bytes:
        path = self.path.with_suffix(suffix)
        return path.read_bytes() if path.exists() else b""

    def table(self) -> np.ndarray:
        """Return the table of the documents, ROW (documents,); `read` checks it.

        Raises:
            UserError: The table is damaged or missing.
        """
        content = self._content(".documents")
        is_whole = len(content) == self.documents * ROW.itemsize
        table = np.frombuffer(content if is_whole else b"", ROW)
        if table["tokens"].sum() != self.tokens:
            raise self.damaged()
        return table

    def read(self, table: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Return the tokens, (tokens,), after comparing the checksum.

        Raises:
            UserError: The files are damaged or missing.
        """
        content = self._content(".tokens")
        if zlib.crc32(content, zlib.crc32(table.tobytes())) != self.checksum:
            raise self.damaged()
        return np.frombuffer(content, dtype)

    def damaged(self) -> UserError:
        """Delete the record of the unit, so that it is made again, and return the error."""
        self.path.with_name(f"{self.path.name.partition('-')[0]}.json").unlink(missing_ok=True)
        return UserError(f"{self.path} is damaged: run the same command again, which repairs it")


@dataclass(frozen=True)
class Record:
    """Description of a finished unit.

    Attributes:
        stamp: Stamp of the unit that was read.
        content: Digest of the lines, cells and texts that were read, independent of names.
        errors: Setting `errors` if something was skipped or replaced; else CLEAN.
        skipped: Damaged documents that were omitted (errors skip).
        replaced: Characters that replace damaged bytes (errors replace).
        pieces: Documents, tokens and checksum of each piece.
    """

    stamp: str
    content: str
    errors: str
    skipped: int
    replaced: int
    pieces: list[list[int]]

    def fits(self, settings: Settings) -> bool:
        """Return whether these settings treat damaged documents as the unit's did."""
        return self.errors in (CLEAN, settings.errors)


@dataclass(frozen=True)
class Job:
    """Facts that all units share.

    Attributes:
        folder: Folder of the units' files.
        settings: Settings of the dataset.
    """

    folder: Path
    settings: Settings

    @classmethod
    def below(cls, root: Path, settings: Settings) -> "Job":
        """Return the job whose files are in a folder of all work."""
        facts = WORK_VERSION, settings.tokenizer_name, settings.text_field
        return cls(root / json_digest(facts)[:12], settings)

    def record_path(self, unit: Unit) -> Path:
        """Return the path of a unit's record."""
        return self.folder / f"{unit.key}.json"

    def record(self, unit: Unit) -> Record | None:
        """Return the record of a finished unit, or None if it is missing or damaged."""
        try:
            return Record(**json.loads(self.record_path(unit).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def piece_path(self, unit: Unit, index: int) -> Path:
        """Return the path of a piece, without its endings."""
        return self.folder / f"{unit.key}-{index:04d}"

    def pieces(self, records: Mapping[Unit, Record]) -> list[Piece]:
        """Return the pieces of all units in order."""
        return [
            Piece(self.piece_path(unit, index), *numbers)
            for unit, record in records.items()
            for index, numbers in enumerate(record.pieces)
        ]


# ---- from a unit to its files --------------------------------------------------------------------


def content_of(settings: Settings, unit: Unit) -> str:
    """Return the digest of a unit's present contents.

    Raises:
        UserError: An input cannot be read.
    """
    reader = Documents(settings.text_field, settings.errors)
    for entry in unit.files:
        for _ in reader.contents(entry, unit.start, unit.stop):
            pass
    return reader.content


def run_unit(job: Job, unit: Unit) -> Record:
    """Tokenize a unit's documents into its files, independently of all other units.

    A unit that was finished with equal contents, before its files were touched, is kept. Each
    document begins with the end-of-text token. Memory: a piece, and the longest document a few
    times.

    Raises:
        UserError: An input cannot be read or is damaged, or the disk is full.
    """
    settings = job.settings
    old = job.record(unit)
    if old and old.fits(settings) and old.content == content_of(settings, unit):
        return old
    job.record_path(unit).unlink(missing_ok=True)
    reader = Documents(settings.text_field, settings.errors)
    pieces: list[list[int]] = []
    for table, tokens in _pieces(reader, unit, settings.build_tokenizer()):
        path = job.piece_path(unit, len(pieces))
        checksum = 0
        for suffix, content in (".documents", table.tobytes()), (".tokens", tokens.tobytes()):
            write_atomic(path.with_suffix(suffix), content)
            checksum = zlib.crc32(content, checksum)
        pieces.append([len(table), len(tokens), checksum])
    errors = settings.errors if reader.skipped or reader.replaced else CLEAN
    record = Record(unit.stamp, reader.content, errors, reader.skipped, reader.replaced, pieces)
    write_atomic(job.record_path(unit), json.dumps(vars(record)).encode())
    return record


def _pieces(
    reader: Documents, unit: Unit, tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield table and tokens of each piece."""
    documents, rows, held = [], [], 0
    for text, tokens in _tokenized(reader, unit, tokenizer):
        documents.append(tokens)
        rows.append((len(tokens), len(text), hashlib.sha256(text).digest()))
        held += len(tokens)
        if held >= PIECE_TOKENS or len(documents) >= PIECE_DOCUMENTS:
            yield np.array(rows, ROW), np.concatenate(documents)
            documents, rows, held = [], [], 0
    if documents:
        yield np.array(rows, ROW), np.concatenate(documents)


def _tokenized(
    reader: Documents, unit: Unit, tokenizer: Tokenizer
) -> Iterator[tuple[bytes, np.ndarray]]:
    """Yield the text of each document in UTF-8, and its tokens behind the end-of-text token."""
    assert tokenizer.eot_token is not None  # pipeline.py checks it
    dtype = token_dtype(tokenizer.vocab_size)
    for entry in unit.files:
        for found, where in reader.read(entry, unit.start, unit.stop):
            try:
                if isinstance(found, str):
                    tokens, text = tokenizer.encode(found), found.encode()
                else:
                    tokens, text = found.astype(dtype), tokenizer.decode_bytes(found)
            # tiktoken limits runs of white space; ids are outside the vocabulary, or in its gaps
            except (UserError, KeyError) as error:
                hint = "" if isinstance(found, str) else " (--tokenizer names theirs)"
                reader.count_damaged(where, f"{error}{hint}")
                continue
            assert tokens.max(initial=0) < tokenizer.vocab_size, tokenizer.name
            yield text, np.insert(tokens, 0, tokenizer.eot_token)
        check_unchanged(entry)
