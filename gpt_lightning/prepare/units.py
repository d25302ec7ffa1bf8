"""Units of work: a pure function of the inputs. Each becomes a part.

Neither the number of workers nor earlier runs decide the borders of units, so that the parts, and
the dataset, are the same however often the work was interrupted.
"""

import contextlib
import functools
import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gpt_lightning.data.tokenizers import Tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, sync_folder, temporary_path
from gpt_lightning.prepare.columns import column_sizes
from gpt_lightning.prepare.documents import Document, Documents
from gpt_lightning.prepare.input_file import Input
from gpt_lightning.prepare.inputs import check_unchanged, explained_input, open_input
from gpt_lightning.prepare.parts import PartWriter, read_part
from gpt_lightning.prepare.settings import Settings

UNIT_BYTES = 2**24
UNIT_FILES = 4096
PARTS_VERSION = 2  # of the parts' format and of the digests in their names
SUFFIX = ".part"
CLEAN = "clean"
UNFINISHED = "unfinished"


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
        return _digest([[entry.name for entry in self.files], self.start], 16)

    @functools.cached_property
    def stamp(self) -> str:
        """Digest of the files' sizes and stamps."""
        return _digest([[entry.size, entry.stamp] for entry in self.files], 16)


def _digest(facts: Any, length: int) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:length]


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
    for files in _together(inputs, unit_bytes):
        for start, stop, size in _ranges(files, text_field, unit_bytes):
            units.append(Unit(len(units), files, start, stop, size))
    return units


def _together(inputs: Sequence[Input], unit_bytes: int) -> Iterator[tuple[Input, ...]]:
    """Yield groups of neighbouring texts up to unit_bytes, and all other files alone.

    A group also ends after a text whose name has a certain checksum if it is half full: the groups
    behind a new file soon have the borders that they had without it.
    """
    texts: list[Input] = []
    held = 0
    for entry in inputs:
        if entry.kind == "text":
            texts.append(entry)
            held += entry.size or 0
        full = held >= unit_bytes or len(texts) >= UNIT_FILES
        half = 2 * held >= unit_bytes or 2 * len(texts) >= UNIT_FILES
        half = half and zlib.crc32(entry.name.encode()) % 16 == 0
        if texts and (entry.kind != "text" or full or half):
            yield tuple(texts)
            texts, held = [], 0
        if entry.kind != "text":
            yield (entry,)
    if texts:
        yield tuple(texts)


def _ranges(
    files: Sequence[Input], text_field: str, unit_bytes: int
) -> Iterator[tuple[int, int | None, int]]:
    """Yield the first and last + 1 byte or row group of each piece, and its bytes."""
    entry = files[0]  # the only one, unless all are texts
    if entry.kind == "parquet":
        with explained_input(entry), open_input(entry) as file:
            sizes = column_sizes(file, entry, text_field)
        yield from _groups(sizes, unit_bytes)
    elif entry.kind == "text" or entry.compression or not entry.seekable or entry.size is None:
        yield 0, None, sum(file.size or 0 for file in files)
    else:
        for start in range(0, entry.size, unit_bytes):
            stop = min(start + unit_bytes, entry.size)
            yield start, stop, stop - start


def _groups(sizes: list[int], unit_bytes: int) -> Iterator[tuple[int, int, int]]:
    start = held = 0
    for group, size in enumerate(sizes, 1):
        held += size
        if held >= unit_bytes or group == len(sizes):
            yield start, group, held
            start, held = group, 0


# ---- the folder of parts -------------------------------------------------------------------------


class PartName(NamedTuple):
    """Name of a part: everything that decides whether a later run can use it.

    Attributes:
        key: Digest of the files' names and the place in them.
        stamp: Digest of the files' sizes and stamps.
        content: Digest of what was read, independent of names and times.
        damage: Setting `errors` if something was skipped or replaced; else clean.
    """

    key: str
    stamp: str
    content: str
    damage: str

    @classmethod
    def of_file(cls, name: str) -> "PartName | None":
        """Return the name of a file, or None if the file is no part."""
        fields = name.removesuffix(SUFFIX).split("-")
        return cls(*fields) if name.endswith(SUFFIX) and len(fields) == 4 else None

    @property
    def file(self) -> str:
        """File name."""
        return "-".join(self) + SUFFIX


Work = tuple[Unit, tuple[PartName, ...]]  # a unit, and parts that may hold its tokens


@dataclass(frozen=True)
class Job:
    """Facts that all units of a dataset share.

    Attributes:
        parts: Folder of the parts.
        settings: Settings of the dataset.
        inputs: Fingerprint of the inputs.
    """

    parts: Path
    settings: Settings
    inputs: str

    def part(self, name: PartName) -> Path:
        """Return the path of a part."""
        return self.parts / name.file

    def present(self) -> list[PartName]:
        """Return the names of all parts in the folder, sorted."""
        with contextlib.suppress(FileNotFoundError):
            return sorted(filter(None, map(PartName.of_file, os.listdir(self.parts))))
        return []


def parts_folder(root: Path, settings: Settings) -> Path:
    """Return the folder of the parts that these settings make, below the folder of all parts."""
    return root / _digest([PARTS_VERSION, settings.of_parts()], 12)


def find_parts(
    job: Job, units: Sequence[Unit], names: Sequence[PartName]
) -> tuple[dict[int, PartName], list[Work]]:
    """Return the parts of units by index, and the work that is left.

    A part is used if the names, sizes and stamps of its inputs are those of the unit. If only sizes
    or stamps differ, the contents decide: `run_unit` compares them.

    Args:
        job: Facts of the work.
        units: Units to find.
        names: Names of parts.
    """
    known: dict[str, list[PartName]] = {}
    for name in names:
        if name.damage in (CLEAN, job.settings.errors):
            known.setdefault(name.key, []).append(name)
    done: dict[int, PartName] = {}
    todo: list[Work] = []
    for unit in units:
        candidates = known.get(unit.key, [])
        same = [name for name in candidates if name.stamp == unit.stamp]
        if same:
            done[unit.index] = same[0]
        else:
            todo.append((unit, tuple(candidates)))
    return done, todo


# ---- from a unit to its part ---------------------------------------------------------------------


def matching_part(job: Job, work: Work) -> PartName | None:
    """Return the candidate that was made of the unit's present contents, read again, or None.

    Raises:
        UserError: An input cannot be read.
    """
    unit, candidates = work
    if not candidates:
        return None
    content, n_bytes = read_content(job.settings, unit)
    for name in (name for name in candidates if name.content == content):
        if name.key == unit.key:
            return name
        with contextlib.suppress(UserError):  # damaged, or an equal unit took it
            # lines and texts of equal bytes are other documents; without JSON, one is shorter
            is_shorter = read_part(job.part(name)).text_bytes < n_bytes
            if is_shorter == (unit.files[0].kind == "jsonl") and name.damage == CLEAN:
                return name
    return None


def read_content(settings: Settings, unit: Unit) -> tuple[str, int]:
    """Return digest and bytes of a unit's present contents; the digest is in its part's name.

    Raises:
        UserError: An input cannot be read.
    """
    reader = Documents(settings.text_field, settings.errors)
    for entry in unit.files:
        with explained_input(entry):
            reader.skim(entry, unit.start, unit.stop)
    return reader.content, reader.n_bytes


def digest_contents(units: Sequence[tuple[str, str]]) -> str:
    """Return the digest of all inputs' contents.

    Args:
        units: Key and digest of the contents of each unit, in order.
    """
    return _digest([list(unit) for unit in units], 64)


def run_unit(job: Job, work: Work) -> tuple[PartName, int]:
    """Tokenize a unit's documents into its part, independently of all other units.

    A part that exists already and was made of equal contents is returned instead, renamed if its
    inputs are. Each document begins with the end-of-text token. Memory (measured): 20 MB besides
    the interpreter and the tokenizer, and for the longest document 4 bytes a byte; 40 if it is a
    single word, as Chinese is to GPT-2's pattern.

    Returns:
        The name of the part, and the number of tokens that were made.

    Raises:
        UserError: An input cannot be read or is damaged, or the disk is full.
    """
    unit, errors = work[0], job.settings.errors
    found = matching_part(job, work)
    if found is not None:
        if found.key == unit.key:  # its file may be deleted, and its tokens in shards
            return found, 0
        own = found._replace(key=unit.key, stamp=unit.stamp)
        with contextlib.suppress(FileNotFoundError):  # an equal unit took it
            os.replace(job.part(found), job.part(own))
            return own, 0
    tokenizer = job.settings.build_tokenizer()
    reader = Documents(job.settings.text_field, errors)
    with explained("write", job.parts):
        # not in the folder of the parts itself, which may have 100,000 files and is listed here
        temporary = temporary_path(job.parts / UNFINISHED / unit.key)
        try:
            with temporary.open("wb") as file:
                writer = PartWriter(file)
                for document in _documents(reader, unit):
                    _add(writer, reader, document, tokenizer)
                part = writer.complete(reader.skipped, reader.replaced)
            damage = errors if part.skipped or part.replaced else CLEAN
            name = PartName(unit.key, unit.stamp, reader.content, damage)
            os.replace(temporary, job.part(name))
            sync_folder(job.parts)
        finally:
            temporary.unlink(missing_ok=True)
    return name, part.tokens


def _documents(reader: Documents, unit: Unit) -> Iterator[Document]:
    for entry in unit.files:
        with explained_input(entry):
            yield from reader.read(entry, unit.start, unit.stop)
            check_unchanged(entry)


def _add(writer: PartWriter, reader: Documents, document: Document, tokenizer: Tokenizer) -> None:
    try:
        tokens = tokenizer.encode(document.text)
    except UserError as error:  # tiktoken limits runs of white space
        reader.count_damaged(document.where, str(error))
        return
    assert int(tokens.max(initial=0)) < tokenizer.vocab_size, tokenizer.name
    assert tokenizer.eot_token is not None  # pipeline.py checks it
    writer.add(document.text.encode(), np.insert(tokens, 0, tokenizer.eot_token))


def describe_units(indices: Sequence[int]) -> str:
    """Return numbers as ranges: 0-3, 7."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][1] == index - 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    ranges = [f"{first}-{last}" if last > first else f"{first}" for first, last in runs]
    return ", ".join(ranges[:20]) + (", ..." if len(ranges) > 20 else "")
