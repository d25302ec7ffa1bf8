"""Units of work: a pure function of the inputs. Each becomes a part.

Neither the number of workers nor earlier runs decide the borders of units, so that the parts, and
the dataset, are the same however often the work was interrupted.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.tokenizers import Tokenizer, build_tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, replacement, write_atomic
from gpt_lightning.prepare.columns import column_sizes
from gpt_lightning.prepare.documents import Document, Documents
from gpt_lightning.prepare.inputs import Input, explained_input, is_url, open_input
from gpt_lightning.prepare.parts import Part, PartWriter, read_part
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.target import delete_parts, delete_renamed

UNIT_BYTES = 2**24
UNIT_FILES = 4096
PLAN = "plan.json"
PLAN_VERSION = 1  # of the parts' format and of how units are cut


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
    """Yield groups of neighbouring texts up to unit_bytes, and all other files alone."""
    texts: list[Input] = []
    held = 0
    for entry in inputs:
        if entry.kind == "text":
            texts.append(entry)
            held += entry.size or 0
        if texts and (entry.kind != "text" or held >= unit_bytes or len(texts) >= UNIT_FILES):
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

    def part(self, unit: Unit) -> Path:
        """Return the path of a unit's part."""
        return self.parts / f"{unit.index:08d}.part"

    def done(self, units: Sequence[Unit]) -> dict[int, Part]:
        """Return index -> description of the units whose parts are complete."""
        found = {unit.index: read_part(self.part(unit)) for unit in units}
        return {index: part for index, part in found.items() if part}

    def plan(self) -> dict[str, Any]:
        """Return the facts that decide the bytes of the parts, besides the number of units."""
        return {"version": PLAN_VERSION, **self.settings.of_parts(), "inputs": self.inputs}


def open_parts(job: Job, n_units: int) -> None:
    """Make the folder of parts, or continue with an existing one of the same work.

    Args:
        job: Facts of the work.
        n_units: Number of units.

    Raises:
        UserError: The folder cannot be written.
    """
    content = (json.dumps({**job.plan(), "units": n_units}, indent=2) + "\n").encode()
    path = job.parts / PLAN
    with explained("write", job.parts):
        if job.parts.exists() and (not path.exists() or path.read_bytes() != content):
            print(f"{job.parts} is of other inputs or settings: starting again", flush=True)
            delete_parts(job.parts)
        job.parts.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            write_atomic(path, content)


def discard_parts(job: Job) -> None:
    """Delete the folder of parts if it is of this work, not of another process's work."""
    delete_renamed(job.parts)
    try:
        plan = json.loads((job.parts / PLAN).read_bytes())
    except (OSError, ValueError):  # no folder, or not ours
        return
    if {**plan, **job.plan()} == plan:
        delete_parts(job.parts)


# ---- from a unit to its part ---------------------------------------------------------------------


def run_unit(job: Job, unit: Unit) -> Part:
    """Tokenize a unit's documents into its part, independently of all other units.

    Each document begins with the end-of-text token. Memory (measured): 20 MB besides the
    interpreter and the tokenizer, and for the longest document 4 bytes a byte; 40 if it is a single
    word, as Chinese is to GPT-2's pattern.

    Raises:
        UserError: An input cannot be read or is damaged, or the disk is full.
    """
    tokenizer = build_tokenizer(job.settings.tokenizer)
    reader = Documents(job.settings.text_field, job.settings.errors)
    with (
        explained("write", job.parts),
        replacement(job.part(unit)) as temporary,
        temporary.open("wb") as file,
    ):
        writer = PartWriter(file)
        for document in _documents(reader, unit):
            _add(writer, reader, document, tokenizer)
        return writer.complete(reader.skipped, reader.replaced)


def _documents(reader: Documents, unit: Unit) -> Iterator[Document]:
    for entry in unit.files:
        with explained_input(entry):
            yield from reader.read(entry, unit.start, unit.stop)
        _check_unchanged(entry)


def _check_unchanged(entry: Input) -> None:
    """Raise if an input changed since the plan was made."""
    if is_url(entry.path) or not entry.stamp.isdigit():
        return
    stat = Path(entry.path).stat()
    if (stat.st_size, str(stat.st_mtime_ns)) != (entry.size, entry.stamp):
        raise UserError(f"{entry.label} changed while it was read: run the same command again")


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
