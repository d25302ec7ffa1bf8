"""Documents to a dataset: processes turn units of the inputs into shards; the manifest comes last.

A unit is some 64 MiB of consecutive documents: many small files together, or a part of a large one.
Units depend on the inputs alone, so the dataset has the same bytes for any number of processes. A
unit becomes a small dataset, a folder that appears complete or not at all, so a run that was killed
continues with the units that are there. The dataset is the shards of all units in order.
"""

import contextlib
import functools
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from gpt_lightning.data.dataset import read_manifest
from gpt_lightning.data.formats import FORMATS, file_name
from gpt_lightning.data.manifest import MANIFEST, SPLITS, Manifest, Shard, TextOrigin
from gpt_lightning.data.shards import token_pieces
from gpt_lightning.data.tokenizers import Tokenizer, train_bpe
from gpt_lightning.errors import UserError
from gpt_lightning.files import (
    explained,
    file_sha256,
    json_digest,
    move_into_place,
    workspace,
    write_atomic,
)
from gpt_lightning.output import progress_bar
from gpt_lightning.prepare.pool import check_main_guard, run_all
from gpt_lightning.prepare.readers import Reader, group_sizes
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.sources import Input, fingerprint, is_url
from gpt_lightning.prepare.target import Made, Target, write_extras, write_shards

UNIT_BYTES = 2**26
UNIT_PARTS = 4096
Unit = tuple[Input, ...]  # parts that are tokenized together, in order
Piece = tuple[str, int, np.ndarray]  # split, bytes of text, tokens


# ---- units ---------------------------------------------------------------------------------------


def plan_units(inputs: Sequence[Input]) -> list[Unit]:
    """Return the units of the inputs, of about UNIT_BYTES each, in the order of the inputs.

    Raises:
        UserError: A Parquet file is damaged.
    """
    units: list[Unit] = []
    parts: list[Input] = []
    held = 0
    for part in chain.from_iterable(map(_parts, inputs)):
        parts.append(part)
        held += part.size
        if held >= UNIT_BYTES or len(parts) == UNIT_PARTS:
            units.append(tuple(parts))
            parts = []
            held = 0
    if parts:
        units.append(tuple(parts))
    return units


def _parts(entry: Input) -> Iterator[Input]:
    """Yield the parts of a file: ranges of JSONL, row groups of Parquet, else the whole file."""
    if entry.kind == "jsonl" and not is_url(entry.path):
        for start in range(0, max(entry.size, 1), UNIT_BYTES):
            stop = min(start + UNIT_BYTES, entry.size)
            yield replace(entry, start=start, stop=stop, size=stop - start)
    elif entry.kind == "parquet" and not is_url(entry.path):
        start = 0
        held = 0
        for group, size in enumerate(group_sizes(entry), 1):
            held += size
            if held >= UNIT_BYTES:
                yield replace(entry, start=start, stop=group, size=held)
                start = group
                held = 0
        yield replace(entry, start=start, size=held)
    else:
        yield entry


def unit_size(unit: Unit) -> int:
    """Return the approximate bytes of text."""
    return sum(part.size for part in unit)


# ---- a unit to its shards ------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """Folder and settings that all units share."""

    folder: Path
    settings: Settings

    def place(self, unit: Unit) -> Path:
        """Return the folder of a unit."""
        return self.folder / fingerprint(unit)[:16]


@functools.lru_cache(maxsize=1)
def tokenizer_of(job: Job) -> Tokenizer:
    """Return the tokenizer of a job, made once a process."""
    return job.settings.build_tokenizer()


def make_unit(job: Job, unit: Unit) -> Manifest:
    """Return the manifest of a unit, after writing its shards; a finished unit is kept.

    Raises:
        UserError: An input cannot be read or is damaged, or the disk is full.
    """
    place = job.place(unit)
    there = _finished(place, job.settings)
    if there:
        return there
    with explained("write", job.folder), workspace(place) as folder:
        new = folder / "new"
        new.mkdir()
        manifest = _write_unit(job, unit, new)
        manifest.save(new)
        move_into_place(folder, place, overwrite=True)
    return manifest


def _finished(folder: Path, settings: Settings) -> Manifest | None:
    """Return the manifest of a unit that is made and whole, else None."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(folder)
        if any(file_sha256(folder / shard.file) != shard.sha256 for shard in manifest.shards()):
            return None
    except (OSError, UserError):
        return None
    return None if manifest.settings["skipped"] and settings.errors == "strict" else manifest


def _write_unit(job: Job, unit: Unit, folder: Path) -> Manifest:
    """Write the tokens of a unit; each document begins with the end-of-text token.

    Memory: the longest document a few times.
    """
    settings = job.settings
    tokenizer = tokenizer_of(job)
    eot = np.array([tokenizer.eot_token])
    digests = hashlib.sha256()
    counts = Counter(documents=0, skipped=0)

    def pieces() -> Iterator[Piece]:
        for part in unit:
            reader = Reader(part, folder.parent, settings)
            for text in reader.texts():
                try:
                    tokens = tokenizer.encode(text)
                except UserError as error:  # tiktoken limits runs of white space
                    reader.damaged(error)
                    continue
                content = text.encode()
                digest = hashlib.sha256(content).digest()
                digests.update(digest)
                split = split_of(digest, settings)
                yield split, 0, eot
                yield split, len(content), tokens
                counts["documents"] += 1
            counts["skipped"] += reader.skipped

    manifest = write_shards(folder, tokenizer, settings, pieces())
    origin = replace(manifest.source, sha256=digests.hexdigest())
    return replace(manifest, tokenizer={}, source=origin, settings=dict(counts))


def split_of(digest: bytes, settings: Settings) -> str:
    """Return the split of a document by the SHA-256 of its text.

    Equal documents get the same split: validation text that is also trained on would lower the
    validation loss.
    """
    share = int.from_bytes(digest[:8], "little") / 2**64
    if share < settings.val_fraction:
        return "val"
    if share < settings.val_fraction + settings.test_fraction:
        return "test"
    return "train"


# ---- units to a dataset --------------------------------------------------------------------------


def prepare_documents(
    inputs: Sequence[Input], name: str, target: Target, settings: Settings
) -> Made:
    """Return the dataset of documents, and whether it was made now.

    Unfinished work is in `.NAME.parts-KEY` beside `out` until the dataset is complete. A run that
    was killed at any moment continues from the finished units, with the same bytes as a result.

    Raises:
        UserError: The inputs or settings make no dataset, the folder holds something else, or the
            disk is full.
    """
    check_main_guard()
    found = fingerprint(inputs)
    tokenizer = None if settings.trains else settings.build_tokenizer("")
    if tokenizer and tokenizer.eot_token is None:
        given = f"tokenizer {settings.tokenizer} has no end-of-text token to separate documents"
        raise UserError(f"{given}: use the tokenizer gpt2, or give one text file")
    origin = tokenizer.spec() if tokenizer else found
    key = json_digest([settings.of_text(), settings.text_field, settings.format, origin])[:12]
    place = target.out.resolve()
    job = Job(place.with_name(f".{place.name}.parts-{key}"), settings)
    wanted = settings.of_documents() | {"format": settings.format, "inputs": found}
    try:
        made = target.make_once(settings, wanted, functools.partial(_make, job, inputs, name))
        shutil.rmtree(job.folder, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):  # it holds finished units
            job.folder.rmdir()
    return made


def _make(job: Job, inputs: Sequence[Input], name: str, new: Path) -> Manifest:
    """Make the missing units, and move their shards into a folder."""
    settings = job.settings
    units = plan_units(inputs)
    if settings.shuffle is not None:
        order = np.random.default_rng(settings.shuffle).permutation(len(units))
        units = [units[index] for index in order]
    if settings.trains:
        path = job.folder / "tokenizer.json"
        if not path.exists():
            print(f"training {settings.tokenizer} on the training documents", flush=True)
            trained = train_bpe(settings.tokenizer, _training_texts(job, inputs))
            job.folder.mkdir(parents=True, exist_ok=True)
            write_atomic(path, trained.content.encode())
        job = Job(job.folder, replace(settings, tokenizer=str(path)))
    tokenizer = tokenizer_of(job)
    write_extras(new, tokenizer, settings)
    parts = _make_units(job, units)
    found = [
        (split, job.place(unit), shard)
        for unit, part in zip(units, parts, strict=True)
        for split, shards in part.splits.items()
        for shard in shards
    ]
    splits: dict[str, list[Shard]] = {split: [] for split in SPLITS}
    if FORMATS[settings.format].is_one_file:
        pieces = (
            (split, 0, tokens)
            for split, folder, shard in found
            for tokens in token_pieces(folder, shard, parts[0].dtype)
        )
        whole = write_shards(new, tokenizer, settings, pieces)
        splits |= {split: list(shards) for split, shards in whole.splits.items()}
    else:
        for split, folder, shard in found:
            name = file_name(settings.format, split, len(splits[split]))
            os.replace(folder / shard.file, new / name)
            splits[split].append(replace(shard, file=name))
    digest = hashlib.sha256()
    counts = Counter[str]()
    text_bytes = Counter[str]()
    for part in parts:
        digest.update(bytes.fromhex(part.source.sha256))
        counts.update(part.settings)
        text_bytes.update(part.text_bytes)
    return replace(
        parts[0],
        tokenizer=tokenizer.spec(),
        source=TextOrigin(name, text_bytes.total(), digest.hexdigest()),
        settings=settings.of_documents() | counts,
        splits={split: tuple(shards) for split, shards in splits.items() if shards},
        text_bytes={split: text_bytes[split] for split in SPLITS if splits[split]},
    )


def _make_units(job: Job, units: Sequence[Unit]) -> list[Manifest]:
    """Return the manifests of all units in order, after making those that are missing."""
    n_done = sum(job.place(unit).exists() for unit in units)
    if n_done:
        print(f"continuing: {n_done} of {len(units)} parts are complete", flush=True)
    parts: list[Manifest] = []
    with progress_bar(sum(map(unit_size, units))) as bar:
        for part in run_all(functools.partial(make_unit, job), units, job.settings):
            bar.update(unit_size(units[len(parts)]))
            parts.append(part)
    return parts


def _training_texts(job: Job, inputs: Sequence[Input]) -> Iterator[str]:
    for entry in inputs:
        for text in Reader(entry, job.folder, job.settings).texts():
            if split_of(hashlib.sha256(text.encode()).digest(), job.settings) == "train":
                yield text
