"""Documents to a dataset: processes turn units of the inputs into shards; the manifest comes last.

A unit is some 64 MiB of consecutive documents: many small files together, or a part of a large one.
Units depend on the inputs alone, so the dataset has the same bytes for any number of processes. The
tokens of a unit are written to its own shards as they come. Its record is written after them, so a
run that was killed continues with the units that have one.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import struct
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from gpt_lightning.data.formats import FORMATS, capacity, extras, file_header, file_name
from gpt_lightning.data.manifest import SPLITS, Manifest, Shard, TextOrigin
from gpt_lightning.data.shards import ShardWriter, token_pieces, write_stream
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype, train_bpe
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, json_digest, write_atomic
from gpt_lightning.output import progress_bar
from gpt_lightning.prepare.pool import check_main_guard, run_all
from gpt_lightning.prepare.readers import Documents, column_sizes
from gpt_lightning.prepare.settings import MIN_TOKENS, Settings, exact, split_borders
from gpt_lightning.prepare.sources import Input, check_unchanged, contents, fingerprint
from gpt_lightning.prepare.target import INPUTS, Made, Target

UNIT_BYTES = 2**26
UNIT_PARTS = 4096
CLEAN = "clean"
# row of a unit's table of documents: tokens with the end-of-text token, bytes and SHA-256 of the
# text in UTF-8
ROW = np.dtype([("tokens", "<i8"), ("bytes", "<i8"), ("sha256", "V32")])
ROW_BYTES = struct.Struct("<qq32s")  # the same


# ---- units ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """Consecutive documents of one file.

    Attributes:
        entry: File.
        start: First byte (JSONL) or row group (Parquet); 0 for other files, which are read whole.
        stop: First byte or row group after the part; None: the end of the file.
        size: Approximate bytes of text.
    """

    entry: Input
    start: int
    stop: int | None
    size: int


@dataclass(frozen=True)
class Unit:
    """Parts that are tokenized together, in order."""

    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        """Approximate bytes of text, for the progress bar."""
        return sum(part.size for part in self.parts)

    @functools.cached_property
    def key(self) -> str:
        """Digest of the files' names, sizes and stamps, and of the places in them."""
        facts = [
            [part.entry.name, part.entry.size, part.entry.stamp, part.start, part.stop]
            for part in self.parts
        ]
        return json_digest(facts)[:16]


def plan_units(
    inputs: Sequence[Input], text_field: str, unit_bytes: int = UNIT_BYTES
) -> list[Unit]:
    """Return the units of the inputs, of about unit_bytes each, in the order of the inputs.

    Raises:
        UserError: A Parquet file is damaged or has no such column.
    """
    units: list[Unit] = []
    parts: list[Part] = []
    held = 0
    for entry in inputs:
        for part in _parts(entry, text_field, unit_bytes):
            parts.append(part)
            held += part.size
            if held >= unit_bytes or len(parts) == UNIT_PARTS:
                units.append(Unit(tuple(parts)))
                parts = []
                held = 0
    if parts:
        units.append(Unit(tuple(parts)))
    return units


def _parts(entry: Input, text_field: str, unit_bytes: int) -> Iterator[Part]:
    """Yield the parts of a file: ranges of JSONL, row groups of Parquet, else the whole file."""
    if entry.kind == "parquet":
        limit = unit_bytes if entry.seekable else sys.maxsize  # each part would copy the file
        start = 0
        held = 0
        for group, size in enumerate(column_sizes(entry, text_field)):
            held += size
            if held >= limit:
                yield Part(entry, start, group + 1, held)
                start = group + 1
                held = 0
        if held or not start:
            yield Part(entry, start, None, held)
    elif entry.kind == "jsonl" and entry.size and entry.seekable and not entry.compression:
        for start in range(0, entry.size, unit_bytes):
            stop = min(start + unit_bytes, entry.size)
            yield Part(entry, start, stop, stop - start)
    else:
        yield Part(entry, 0, None, entry.size or 0)


# ---- a unit to its shards ------------------------------------------------------------------------


@dataclass(frozen=True)
class Record:
    """Description of a finished unit.

    Attributes:
        shards: Files of tokens of each split, in order of SPLITS; with split_by fraction all tokens
            are in the first.
        documents: Number of documents of each split.
        text_bytes: Bytes of the texts of each split in UTF-8.
        errors: Setting `errors` if something was skipped or replaced, else CLEAN.
        skipped: Damaged documents that were omitted (errors skip).
        replaced: Characters that replace damaged bytes (errors replace).
    """

    shards: list[list[Shard]]
    documents: list[int]
    text_bytes: list[int]
    errors: str
    skipped: int
    replaced: int


@dataclass(frozen=True)
class Job:
    """Folder and settings that all units share."""

    folder: Path
    settings: Settings

    @classmethod
    def below(cls, root: Path, settings: Settings) -> "Job":
        """Return the job of these settings, whose folder is in a folder of all unfinished work."""
        facts = settings.of_documents() | {"errors": None, "shuffle": None}
        return cls(root / json_digest([facts, settings.format], sort_keys=True)[:12], settings)

    def record(self, unit: Unit) -> Record | None:
        """Return the record of a finished unit; None if it is missing or does not fit."""
        try:
            found = json.loads((self.folder / f"{unit.key}.json").read_bytes())
            found["shards"] = [[Shard(**row) for row in rows] for rows in found["shards"]]
            record = Record(**found)
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return record if record.errors in (CLEAN, self.settings.errors) else None

    def table_path(self, unit: Unit) -> Path:
        """Return the path of a unit's table of documents."""
        return self.folder / f"{unit.key}.documents"

    def table(self, unit: Unit) -> np.ndarray:
        """Return the table of the documents of a unit, ROW (documents,)."""
        return np.fromfile(self.table_path(unit), ROW)

    def is_whole(self, unit: Unit, record: Record) -> bool:
        """Return whether the files of a finished unit are as they were written."""
        try:
            n_bytes = self.table_path(unit).stat().st_size
            return n_bytes == ROW.itemsize * sum(record.documents) and all(
                file_sha256(self.folder / shard.file) == shard.sha256
                for shards in record.shards
                for shard in shards
            )
        except OSError:
            return False


def make_unit(job: Job, unit: Unit) -> Record:
    """Write the shards of a unit, then its record; a finished unit with whole shards is kept.

    Raises:
        UserError: An input cannot be read or is damaged, or the disk is full; the unit has no
            files then.
    """
    finished = job.record(unit)
    if finished and job.is_whole(unit, finished):
        return finished
    try:
        with explained("write", job.folder):
            job.folder.mkdir(parents=True, exist_ok=True)
            record = _write_unit(job, unit)
            content = json.dumps(asdict(record)).encode()
            write_atomic(job.folder / f"{unit.key}.json", content)
        return record
    except BaseException:
        for path in job.folder.glob(f"{unit.key}*"):
            path.unlink()
        with contextlib.suppress(OSError):  # other units are there
            job.folder.rmdir()
            job.folder.parent.rmdir()
        raise


def _write_unit(job: Job, unit: Unit) -> Record:
    """Write the tokens of a unit; each document begins with the end-of-text token.

    Memory: the longest document a few times.
    """
    settings = job.settings
    tokenizer = settings.build_tokenizer()
    assert tokenizer.eot_token is not None  # prepare_documents checks it
    dtype = token_dtype(tokenizer.vocab_size)
    eot = np.array([tokenizer.eot_token], dtype)
    limit = capacity(settings.format, settings.shard_tokens)
    reader = Documents(settings.text_field, settings.errors)
    documents = [0 for _ in SPLITS]
    text_bytes = [0 for _ in SPLITS]
    with contextlib.ExitStack() as files:
        table = files.enter_context(open(job.table_path(unit), "wb"))
        writers = []
        for split in SPLITS:
            writer = ShardWriter(job.folder, f"{unit.key}-{split}", dtype, settings.format, limit)
            writers.append(files.enter_context(contextlib.closing(writer)))
        for part in unit.parts:
            for text, where in reader.read(part.entry, part.start, part.stop):
                try:
                    tokens = tokenizer.encode(text)
                except UserError as error:  # tiktoken limits runs of white space
                    reader.count_damaged(where, str(error))
                    continue
                content = text.encode()
                digest = hashlib.sha256(content).digest()
                number = 0 if settings.split_by == "fraction" else split_number(digest, settings)
                writers[number].write(eot)
                writers[number].write(tokens)
                documents[number] += 1
                text_bytes[number] += len(content)
                table.write(ROW_BYTES.pack(len(tokens) + 1, len(content), digest))
            check_unchanged(part.entry)
        shards = [writer.finish() for writer in writers]
        table.flush()
        os.fsync(table.fileno())
    errors = settings.errors if reader.skipped or reader.replaced else CLEAN
    return Record(shards, documents, text_bytes, errors, reader.skipped, reader.replaced)


def split_number(digest: bytes, settings: Settings) -> int:
    """Return the number in SPLITS of a document's split, by the SHA-256 of its text.

    Equal documents get the same split: validation text that is also trained on would lower the
    validation loss.
    """
    val_end, test_end = hash_borders(settings)
    share = int.from_bytes(digest[:8], "little")
    if share < val_end:
        return SPLITS.index("val")
    if share < test_end:
        return SPLITS.index("test")
    return SPLITS.index("train")


@functools.lru_cache(maxsize=4)
def hash_borders(settings: Settings) -> tuple[int, int]:
    """Return the first hash of 64 bits after the validation split, and after the test split."""
    val = exact(settings.val_fraction)
    test = exact(settings.test_fraction)
    return int(val * 2**64), int((val + test) * 2**64)


# ---- units to a dataset --------------------------------------------------------------------------


def prepare_documents(
    inputs: Sequence[Input], name: str, target: Target, settings: Settings
) -> Made:
    """Return the dataset of documents, and whether it was made now.

    Unfinished work is in `.NAME.parts` beside `out` until the dataset is complete. A run that was
    killed at any moment continues from the finished units, with the same bytes as a result.

    Raises:
        UserError: The inputs or settings make no dataset, the folder holds something else, or the
            disk is full.
    """
    check_main_guard()
    chosen = settings.tokenizer
    place = target.out.resolve()
    root = place.with_name(f".{place.name}.parts")
    target.wanted.update(inputs=fingerprint(inputs), format=settings.format)
    target.wanted.update(settings.of_documents(), shuffle=settings.shuffle)
    target = replace(target, has_contents=functools.partial(_has_contents, inputs))
    if settings.trains:
        if there := target.existing():
            return there, False
        settings = with_trained_tokenizer(inputs, settings, root)
    tokenizer = None if chosen == "char" else settings.build_tokenizer()
    if not tokenizer or tokenizer.eot_token is None:
        fix = "use the tokenizer gpt2, or give one text file"
        raise UserError(f"tokenizer {chosen} has no end-of-text token to separate documents: {fix}")
    file_header(settings.format, token_dtype(tokenizer.vocab_size).name, 0)  # or it cannot hold it
    extras(settings.format, tokenizer)
    job = Job.below(root, settings)
    made = target.make_once(functools.partial(_make, job, inputs, name, target, tokenizer))
    shutil.rmtree(job.folder, ignore_errors=True)
    if chosen != settings.tokenizer:
        Path(settings.tokenizer).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it holds work of other settings
        root.rmdir()
    return made


def _make(
    job: Job, inputs: Sequence[Input], name: str, target: Target, tokenizer: Tokenizer
) -> Made:
    """Make the missing units, and deliver the dataset."""
    settings = job.settings
    units = plan_units(inputs, settings.text_field)
    records = _make_units(job, units)
    if settings.shuffle is not None:
        order = np.random.default_rng(settings.shuffle).permutation(len(units)).tolist()
        units = [units[index] for index in order]
        records = [records[index] for index in order]
    if settings.split_by == "fraction":
        splits = splits_by_fraction(job, units, records)
    else:
        splits = splits_by_hash(records)
    for split in split_borders(0, settings.val_fraction, settings.test_fraction):
        found = splits[split]
        check_size(name, split, found.n_tokens, f"{found.documents} documents")
    new = job.folder / "new"
    shutil.rmtree(new, ignore_errors=True)  # of a run that was killed here
    dtype = token_dtype(tokenizer.vocab_size)
    begin_dataset(new, tokenizer, settings)
    shards = {
        split: _placed(job.folder, found.slices, split, dtype, settings.format)
        for split, found in splits.items()
        if found.n_tokens
    }
    facts = {"inputs": target.wanted["inputs"], "contents": contents(inputs)}
    write_atomic(new / INPUTS, json.dumps(facts).encode() + b"\n")
    digest = hashlib.sha256()
    for unit in units:
        digest.update(job.table(unit)["sha256"].tobytes())
    text_bytes = {split: splits[split].text_bytes for split in shards}
    manifest = Manifest(
        tokenizer=tokenizer.spec(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype.name,
        source=TextOrigin(name, sum(text_bytes.values()), digest.hexdigest()),
        settings=settings.of_documents()
        | {
            "tokenizer": target.wanted["tokenizer"],
            "documents": sum(found.documents for found in splits.values()),
            "skipped": sum(record.skipped for record in records),
            "replaced": sum(record.replaced for record in records),
        },
        splits=shards,
        format=settings.format,
        text_bytes=text_bytes,
    )
    return target.deliver(job.folder, manifest)


@dataclass(frozen=True)
class Slice:
    """Tokens first .. last - 1 of a shard."""

    shard: Shard
    first: int
    last: int


@dataclass
class Split:
    """Content of a split of the dataset.

    Attributes:
        slices: Its tokens, in order.
        documents: Number of documents.
        text_bytes: Bytes of their texts in UTF-8.
    """

    slices: list[Slice]
    documents: int = 0
    text_bytes: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return sum(part.last - part.first for part in self.slices)


def splits_by_hash(records: Sequence[Record]) -> dict[str, Split]:
    """Return the splits of units whose documents are in their splits' shards."""
    splits = {}
    for number, split in enumerate(SPLITS):
        shards = [shard for record in records for shard in record.shards[number]]
        splits[split] = Split(
            [Slice(shard, 0, shard.tokens) for shard in shards],
            sum(record.documents[number] for record in records),
            sum(record.text_bytes[number] for record in records),
        )
    return splits


def splits_by_fraction(
    job: Job, units: Sequence[Unit], records: Sequence[Record]
) -> dict[str, Split]:
    """Return the splits of the first, the next and the last tokens of all units.

    A document is in the split in which it begins.
    """
    settings = job.settings
    shards = [shard for record in records for shard in record.shards[0]]
    n_tokens = sum(shard.tokens for shard in shards)
    borders = split_borders(n_tokens, settings.val_fraction, settings.test_fraction)
    splits = {split: Split([]) for split in SPLITS}
    ends = dict.fromkeys(SPLITS, 0)  # last token + 1 of each split
    begin = 0
    for unit in units:
        table = job.table(unit)
        starts = begin + np.cumsum(table["tokens"]) - table["tokens"]
        for split, (first, last) in borders.items():
            own = table[(starts >= first) & (starts < last)]
            splits[split].documents += len(own)
            splits[split].text_bytes += int(own["bytes"].sum())
            ends[split] += int(own["tokens"].sum())
        begin += int(table["tokens"].sum())
    first = 0
    for split in borders:
        last = first + ends[split]
        splits[split].slices = slices_of(shards, first, last)
        first = last
    return splits


def slices_of(shards: Sequence[Shard], first: int, last: int) -> list[Slice]:
    """Return tokens first .. last - 1 of consecutive shards."""
    slices = []
    begin = 0
    for shard in shards:
        low = max(first - begin, 0)
        high = min(last - begin, shard.tokens)
        if low < high:
            slices.append(Slice(shard, low, high))
        begin += shard.tokens
    return slices


def _make_units(job: Job, units: Sequence[Unit]) -> list[Record]:
    """Return the records of all units in order, after making those that are missing."""
    n_done = sum(job.record(unit) is not None for unit in units)
    if n_done:
        print(f"continuing: {n_done} of {len(units)} parts are complete", flush=True)
    records: dict[Unit, Record] = {}
    with progress_bar(sum(unit.size for unit in units)) as bar:
        for unit, record in run_all(functools.partial(make_unit, job), units, job.settings):
            records[unit] = record
            bar.update(unit.size)
    return [records[unit] for unit in units]


def _placed(
    folder: Path, slices: Sequence[Slice], split: str, dtype: np.dtype, file_format: str
) -> tuple[Shard, ...]:
    """Write the shards of a split to the folder `new`, and return them.

    A whole shard becomes a link, which needs no space; a file system without links gets a copy.
    nanoGPT has one file a split.
    """
    new = folder / "new"
    if FORMATS[file_format].is_one_file:
        path = new / file_name(file_format, split, 0)
        pieces = (piece for part in slices for piece in _tokens(folder, part, dtype))
        with explained("write", folder):
            return (write_stream(path, pieces, dtype, file_format),)
    placed = []
    for index, part in enumerate(slices):
        path = new / file_name(file_format, split, index)
        shard = replace(part.shard, file=path.name)
        with explained("write", folder):
            if part.last - part.first < shard.tokens:
                shard = write_stream(path, _tokens(folder, part, dtype), dtype, file_format)
            else:
                try:
                    os.link(folder / part.shard.file, path)
                except OSError:
                    shutil.copyfile(folder / part.shard.file, path)
        placed.append(shard)
    return tuple(placed)


def _tokens(folder: Path, part: Slice, dtype: np.dtype) -> Iterator[np.ndarray]:
    """Yield the tokens of a slice in pieces, (n,) each."""
    begin = 0
    for piece in token_pieces(folder, part.shard, dtype.name):
        yield piece[max(part.first - begin, 0) : max(part.last - begin, 0)]
        begin += len(piece)


def _has_contents(inputs: Sequence[Input], facts: dict[str, str]) -> bool:
    """Return whether the inputs have the contents in a dataset's facts about its own."""
    print("the inputs' times changed: comparing their contents", flush=True)
    return facts.get("contents") == contents(inputs)


def begin_dataset(folder: Path, tokenizer: Tokenizer, settings: Settings) -> None:
    """Make the folder of a new dataset, with the files that its format needs besides the shards.

    Raises:
        UserError: The format does not know the tokenizer, or cannot hold its tokens.
    """
    file_header(settings.format, token_dtype(tokenizer.vocab_size).name, settings.shard_tokens)
    files = extras(settings.format, tokenizer)
    folder.mkdir()
    for name, content in files.items():
        write_atomic(folder / name, content)


def check_size(name: str, split: str, n_tokens: int, content: str) -> None:
    """Raise a UserError if a split has fewer than two tokens.

    Args:
        name: Name of the source.
        split: Name of the split.
        n_tokens: Its tokens.
        content: Content of the split, such as "3 documents".
    """
    if n_tokens < MIN_TOKENS:
        fix = f"needs {MIN_TOKENS}: give more text, or change val_fraction or test_fraction"
        raise UserError(f"{name}: the {split} split has {content}, {n_tokens} tokens, {fix}")


# ---- a tokenizer of the documents ----------------------------------------------------------------


def with_trained_tokenizer(inputs: Sequence[Input], settings: Settings, root: Path) -> Settings:
    """Return the settings with the file of a tokenizer that is trained on the training documents.

    It is trained in this process, and once for equal inputs and settings.

    Args:
        inputs: Files of the documents.
        settings: Settings with a tokenizer bpe:N.
        root: Folder of unfinished work.

    Raises:
        UserError: The documents are too few.
    """
    key = json_digest([fingerprint(inputs), settings.of_documents()])[:12]
    path = root / f"{key}-tokenizer.json"
    if not path.exists():
        print(f"training {settings.tokenizer} on the training documents", flush=True)
        made = train_bpe(settings.tokenizer, _training_texts(inputs, settings))
        root.mkdir(parents=True, exist_ok=True)
        write_atomic(path, made.content.encode())
    return replace(settings, tokenizer=str(path))


def _training_texts(inputs: Sequence[Input], settings: Settings) -> Iterator[str]:
    reader = Documents(settings.text_field, settings.errors)
    units = plan_units(inputs, settings.text_field)
    with progress_bar(sum(unit.size for unit in units)) as bar:
        for unit in units:
            for part in unit.parts:
                for text, _ in reader.read(part.entry, part.start, part.stop):
                    digest = hashlib.sha256(text.encode()).digest()
                    if SPLITS[split_number(digest, settings)] == "train":
                        yield text
            bar.update(unit.size)
