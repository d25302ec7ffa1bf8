"""Documents to a dataset: make the files of all units, write the shards, deliver the dataset.

The tables of the pieces decide the split and the block of each document. A block is what is read at
once: the documents of a split in one piece or, with a shuffle, in one bucket. A shard is a range of
tokens in consecutive blocks, so any worker can write any shard.

A shuffle takes two passes. `scatter` rewrites a piece in the order of the buckets; then a bucket is
gathered from all pieces, sorted in memory, and written into its shards.
"""

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gpt_lightning.data.formats import capacity, extras, file_header, file_name
from gpt_lightning.data.manifest import SPLITS, Manifest, Shard, TextOrigin
from gpt_lightning.data.order import shuffle_keys
from gpt_lightning.data.shards import write_stream
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype, train_bpe
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, json_digest, replacement, write_atomic
from gpt_lightning.output import progress_bar
from gpt_lightning.prepare.documents import Documents
from gpt_lightning.prepare.executors import check_main_guard, run_all
from gpt_lightning.prepare.inputs import Input, fingerprint
from gpt_lightning.prepare.settings import MIN_TOKENS, Settings, exact, split_borders
from gpt_lightning.prepare.target import INPUTS, Made, Target
from gpt_lightning.prepare.units import (
    Job,
    Piece,
    Record,
    Unit,
    content_of,
    plan_units,
    run_unit,
)

BUCKET_TOKENS = 2**23  # mean of a bucket of shuffled documents, which is sorted in memory
COPIED = 2**16  # documents that are copied at a time


def prepare_documents(
    inputs: Sequence[Input], name: str, target: Target, settings: Settings
) -> tuple[Manifest | None, bool]:
    """Return the dataset of documents, and whether it was made now; None for one job.

    Unfinished work is in `.NAME.parts` beside `out` until the dataset is complete. A run that was
    killed at any moment continues from the finished units and shards, with the same bytes as a
    result. Units of other settings stay, unless the target is overwritten.

    Raises:
        UserError: The inputs or settings make no dataset, the folder holds something else, the disk
            is full, or units are missing for a merge.
    """
    check_main_guard()
    chosen = settings.tokenizer
    place = target.out.resolve()
    root = place.with_name(f".{place.name}.parts")
    target.wanted.update(inputs=fingerprint(inputs), format=settings.format)
    target.wanted.update(settings.of_documents(), shuffle=settings.shuffle)
    target = dataclasses.replace(target, has_contents=partial(_has_contents, inputs, settings))
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
    if settings.shard_index is not None and not target.existing():
        units = plan_units(inputs, settings.text_field)
        _make_units(job, units[settings.shard_index :: settings.shard_count])
        print(f"this job is done; parts are missing of: {_missing(job, units) or '-'}", flush=True)
        return None, True
    made = target.make_once(partial(_make, job, inputs, name, target, tokenizer))
    shutil.rmtree(job.folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # it holds work of other settings
        if chosen != settings.tokenizer:
            Path(settings.tokenizer).unlink(missing_ok=True)
        root.rmdir()
    return made


def with_trained_tokenizer(inputs: Sequence[Input], settings: Settings, root: Path) -> Settings:
    """Return the settings with the file of a tokenizer that is trained on the training documents.

    It is trained in this process, and once for equal inputs and settings.

    Args:
        inputs: Files of the documents.
        settings: Settings with a tokenizer bpe:N.
        root: Folder of unfinished work.

    Raises:
        UserError: The documents are ids, or too few.
    """
    key = json_digest([fingerprint(inputs), settings.of_documents()])[:12]
    path = root / f"{key}-tokenizer.json"
    if not path.exists():
        print(f"training {settings.tokenizer} on the training documents", flush=True)
        made = train_bpe(settings.tokenizer, _training_texts(inputs, settings))
        root.mkdir(parents=True, exist_ok=True)
        write_atomic(path, made.content.encode())
    return dataclasses.replace(settings, tokenizer=str(path))


def _training_texts(inputs: Sequence[Input], settings: Settings) -> Iterator[str]:
    reader = Documents(settings.text_field, settings.errors)
    units = plan_units(inputs, settings.text_field)
    with progress_bar(sum(unit.size for unit in units)) as bar:
        for unit in units:
            for entry in unit.files:
                for text, where in reader.read(entry, unit.start, unit.stop):
                    if not isinstance(text, str):
                        raise UserError(f"{where()}: ids are no text to train a tokenizer on")
                    digest = hashlib.sha256(text.encode()).digest()
                    if not hashed_splits(np.frombuffer(digest, "<u8")[:1], settings)[0]:
                        yield text
            bar.update(unit.size)


def _has_contents(inputs: Sequence[Input], settings: Settings, facts: dict[str, str]) -> bool:
    """Return whether the inputs have the sizes and contents in a dataset's facts about its own."""
    if facts.get("sizes") != fingerprint(inputs, times=False):
        return False
    print("the inputs' times changed: comparing their contents", flush=True)
    units = plan_units(inputs, settings.text_field)
    found = dict(run_all(partial(content_of, settings), units, settings))
    return facts.get("contents") == json_digest([(unit.key, found[unit]) for unit in units])


# ---- units ---------------------------------------------------------------------------------------


def _missing(job: Job, units: Sequence[Unit]) -> str:
    """Return the jobs of an array whose units are missing; "" if all are finished."""
    count = job.settings.shard_count or len(units)
    jobs = sorted({unit.index % count for unit in units if not job.record(unit)})
    return "shard_index " * bool(jobs) + ", ".join(map(str, jobs))


def _make_units(job: Job, units: Sequence[Unit]) -> dict[Unit, Record]:
    """Return the records of units in order, after making those that are missing.

    A unit is finished if its record has the present sizes and stamps of its inputs. If only these
    differ, run_unit compares the contents.
    """
    records = {unit: record for unit in units if (record := job.record(unit))}
    done = {u: r for u, r in records.items() if r.stamp == u.stamp and r.fits(job.settings)}
    todo = [unit for unit in units if unit not in done]
    if done and todo:
        print(f"continuing: {len(done)} of {len(units)} parts are complete", flush=True)
    n_bytes = sum(unit.size for unit in units)
    with progress_bar(n_bytes, sum(unit.size for unit in done)) as bar:
        for unit, record in run_all(partial(run_unit, job), todo, job.settings):
            done[unit] = record
            bar.update(unit.size)
    return {unit: done[unit] for unit in units}


# ---- the dataset ---------------------------------------------------------------------------------


def _make(
    job: Job, inputs: Sequence[Input], name: str, target: Target, tokenizer: Tokenizer
) -> Made:
    """Make the missing units and shards, and deliver the dataset."""
    settings, units = job.settings, plan_units(inputs, job.settings.text_field)
    if settings.merge and (missing := _missing(job, units)):
        raise UserError(f"parts are missing of {missing}: run these jobs, then merge again")
    records = _make_units(job, units)
    folder = _shards_folder(job, records)
    assembly = Assembly(folder, job.pieces(records), token_dtype(tokenizer.vocab_size), settings)
    for split in assembly.splits:
        number = SPLITS.index(split)
        found = f"{assembly.documents[number]} documents"
        check_size(name, split, assembly.sizes[number].sum(), found)
    if not (folder / "new").exists():
        begin_dataset(folder / "new", tokenizer, settings)
    for left in (folder / "new").glob(".*.tmp.*"):  # a killed process left them
        left.unlink()
    splits = _write_shards(assembly)
    contents = json_digest([(unit.key, record.content) for unit, record in records.items()])
    sizes = fingerprint(inputs, times=False)
    facts = {"inputs": target.wanted["inputs"], "sizes": sizes, "contents": contents}
    write_atomic(folder / "new" / INPUTS, json.dumps(facts).encode() + b"\n")
    recorded = settings.of_documents() | {
        "tokenizer": target.wanted["tokenizer"],
        "documents": int(assembly.documents.sum()),
        "skipped": sum(record.skipped for record in records.values()),
        "replaced": sum(record.replaced for record in records.values()),
    }
    manifest = Manifest(
        tokenizer=tokenizer.spec(),
        vocab_size=tokenizer.vocab_size,
        dtype=assembly.dtype.name,
        source=TextOrigin(name, int(assembly.text_bytes.sum()), assembly.sha256),
        settings=recorded,
        splits=splits,
        format=settings.format,
        text_bytes={split: int(assembly.text_bytes[SPLITS.index(split)]) for split in splits},
    )
    return target.deliver(folder, manifest)


def _shards_folder(job: Job, records: dict[Unit, Record]) -> Path:
    """Make the folder of the shards of these units and settings; delete those of others."""
    facts = [[unit.key, record.content, record.errors] for unit, record in records.items()]
    settings = job.settings.of_documents() | {"errors": None, "format": job.settings.format}
    folder = job.folder / f"shards-{json_digest([facts, settings])[:16]}"
    for other in job.folder.glob("shards-*"):
        if other != folder:
            shutil.rmtree(other)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_shards(assembly: "Assembly") -> dict[str, tuple[Shard, ...]]:
    """Return the shards of each split; those that are missing are written."""
    settings = assembly.settings
    if settings.shuffle is not None:
        print("shuffling the documents on the disk", flush=True)
        list(run_all(assembly.scatter, range(len(assembly.pieces)), settings))
    tasks, shards, size = assembly.tasks(), {}, assembly.dtype.itemsize
    with progress_bar(size * sum(task.last - task.first for task in tasks)) as bar:
        for task, shard in run_all(assembly.write_shard, tasks, settings):
            shards[task] = shard
            bar.update(size * shard.tokens)
    return {
        split: tuple(shards[task] for task in tasks if SPLITS[task.split] == split)
        for split in assembly.splits
    }


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
        fix = f"needs {MIN_TOKENS}: give more text, change val_fraction, test_fraction or split_by"
        raise UserError(f"{name}: the {split} split has {content}, {n_tokens} tokens, {fix}")


# ---- from pieces to shards ---------------------------------------------------------------------


class ShardTask(NamedTuple):
    """Shard to write: tokens first .. last - 1 of a split."""

    file: str
    split: int
    first: int
    last: int


@dataclasses.dataclass
class Assembly:
    """Pieces that become shards.

    Args:
        folder: Folder of unfinished shards and, in its folder `new`, of the dataset.
        pieces: Pieces of all units in order.
        dtype: Type of the tokens.
        settings: Settings of the splits and the shards.

    Attributes:
        n_tokens: Tokens of all pieces.
        splits: Borders of each split in tokens, for split_by fraction.
        n_blocks: Number of blocks of a split.
        sizes: Tokens of each block of each split, (splits, blocks).
        documents: Documents of each split, (splits,).
        text_bytes: Bytes of each split's texts in UTF-8, (splits,).
        sha256: SHA-256 of all documents' SHA-256, which is equal for equal texts in equal order,
            independent of their files.

    Raises:
        UserError: A table is damaged.
    """

    folder: Path
    pieces: list[Piece]
    dtype: np.dtype
    settings: Settings

    def __post_init__(self) -> None:
        pieces, settings = self.pieces, self.settings
        counts = np.array([(0, 0), *((piece.documents, piece.tokens) for piece in pieces)])
        self._before = np.cumsum(counts, 0)  # documents and tokens before each piece
        self.n_tokens = int(self._before[-1, 1])
        self.splits = split_borders(self.n_tokens, settings.val_fraction, settings.test_fraction)
        shuffled = settings.shuffle is not None
        self.n_blocks = 1 + self.n_tokens // BUCKET_TOKENS if shuffled else len(pieces)
        self.sizes = np.zeros((len(SPLITS), self.n_blocks), np.int64)
        self.documents, self.text_bytes = np.zeros((2, len(SPLITS)), np.int64)
        digest = hashlib.sha256()
        for index, piece in enumerate(pieces):
            table = piece.table()
            splits = self._split_numbers(index, table)
            blocks = self._buckets(self._keys(index)) if shuffled else np.full(len(table), index)
            np.add.at(self.sizes, (splits, blocks), table["tokens"])
            self.documents += np.bincount(splits, minlength=len(SPLITS))
            np.add.at(self.text_bytes, splits, table["bytes"])
            digest.update(table["sha256"].tobytes())
        self.sha256 = digest.hexdigest()

    def _split_numbers(self, index: int, table: np.ndarray) -> np.ndarray:
        """Return the number in SPLITS of each document's split, int64 (documents,).

        By hash, equal documents get the same split: validation text that is also trained on would
        lower the validation loss.
        """
        if self.settings.split_by != "fraction":
            hashes = np.ascontiguousarray(table["sha256"]).view("<u8")[::4]  # first of four words
            return hashed_splits(hashes, self.settings)
        lengths = table["tokens"]
        starts = self._before[index, 1] + np.cumsum(lengths) - lengths
        borders = [first for first, _ in self.splits.values()]
        numbers = np.array([SPLITS.index(split) for split in self.splits])
        return numbers[np.searchsorted(borders, starts, "right") - 1]

    def _keys(self, index: int) -> np.ndarray:
        """Return the shuffle's sort key of each document, uint64 (documents,)."""
        first, last = self._before[index : index + 2, 0].tolist()
        return shuffle_keys(self.settings.shuffle or 0, first, last - first)

    def _buckets(self, keys: np.ndarray) -> np.ndarray:
        shares = (keys >> np.uint64(32)) * np.uint64(self.n_blocks)
        return (shares >> np.uint64(32)).astype(np.int64)

    def tasks(self) -> list[ShardTask]:
        """Return all shards."""
        size, tasks = capacity(self.settings.format, self.settings.shard_tokens), []
        for number, n_tokens in enumerate(self.sizes.sum(1).tolist()):
            for index, first in enumerate(range(0, n_tokens, size)):
                name = file_name(self.settings.format, SPLITS[number], index)
                tasks.append(ShardTask(name, number, first, min(first + size, n_tokens)))
        return tasks

    # ---- shards ----------------------------------------------------------------------------------

    def write_shard(self, task: ShardTask) -> Shard:
        """Write a shard, complete or not at all, unless an earlier run has completed it.

        Raises:
            UserError: A piece is damaged, or the disk is full.
        """
        path = self.folder / "new" / task.file
        if path.exists():
            return Shard(task.file, task.last - task.first, file_sha256(path))
        with explained("write", self.folder), replacement(path) as temporary:
            chunks = self._chunks(task)
            written = write_stream(temporary, chunks, self.dtype, self.settings.format)
        return dataclasses.replace(written, file=task.file)

    def _chunks(self, task: ShardTask) -> Iterator[np.ndarray]:
        ends = np.cumsum(self.sizes[task.split])
        starts = ends - self.sizes[task.split]
        for block in np.flatnonzero((starts < task.last) & (ends > task.first)).tolist():
            tokens, start = self._tokens(task.split, block), starts[block]
            yield tokens[max(task.first - start, 0) : task.last - start]

    def _tokens(self, split: int, block: int) -> np.ndarray:
        if self.settings.shuffle is not None:
            return self._gathered(split, block)
        piece = self.pieces[block]
        table = piece.table()
        tokens = piece.read(table, self.dtype)
        own = self._split_numbers(block, table) == split
        return tokens[np.repeat(own, table["tokens"])]

    # ---- the shuffle -----------------------------------------------------------------------------

    def scatter(self, index: int) -> None:
        """Write the documents of a piece in the order (split, bucket, key), unless it is done.

        Raises:
            UserError: The piece is damaged, or the disk is full.
        """
        piece, (rows_path, tokens_path) = self.pieces[index], self.scattered(index)
        if rows_path.exists():
            return
        table, keys = piece.table(), self._keys(index)
        buckets = self._split_numbers(index, table) * self.n_blocks + self._buckets(keys)
        order = np.lexsort((keys, buckets))
        tokens = reordered(piece.read(table, self.dtype), table["tokens"], order)
        rows = np.array([buckets, keys, table["tokens"]], np.uint64)[:, order]
        write_atomic(tokens_path, tokens.tobytes())
        write_atomic(rows_path, rows.tobytes())  # last: it makes the scattering finished

    def scattered(self, index: int) -> tuple[Path, Path]:
        """Return the files of a scattered piece: its rows and its tokens."""
        return self.folder / f"{index:06d}.documents", self.folder / f"{index:06d}.tokens"

    def _gathered(self, split: int, bucket: int) -> np.ndarray:
        """Return the documents of a bucket in the shuffle's order, (tokens,)."""
        number, rows, tokens = split * self.n_blocks + bucket, [], []
        for index in range(len(self.pieces)):
            rows_path, tokens_path = self.scattered(index)
            buckets, keys, lengths = np.fromfile(rows_path, np.uint64).reshape(3, -1)
            low, high = np.searchsorted(buckets, [number, number + 1])
            before, count = int(lengths[:low].sum()), int(lengths[low:high].sum())
            offset = before * self.dtype.itemsize
            rows.append(np.array([keys[low:high], lengths[low:high]]))
            tokens.append(np.fromfile(tokens_path, self.dtype, count, offset=offset))
        keys, lengths = np.concatenate(rows, 1)
        return reordered(np.concatenate(tokens), lengths, np.argsort(keys))


def hashed_splits(hashes: np.ndarray, settings: Settings) -> np.ndarray:
    """Return the numbers in SPLITS of documents by the hashes of their texts, int64 (documents,).

    Args:
        hashes: First 8 bytes of the texts' SHA-256, uint64 (documents,). Below a first border they
            are validation, below a second one test.
        settings: Settings of the splits.
    """
    val, test = exact(settings.val_fraction), exact(settings.test_fraction)
    first, second = (np.uint64(int(share * 2**64)) for share in (val, val + test))
    return np.where(hashes < first, 1, np.where(hashes < second, 2, 0))


def reordered(tokens: np.ndarray, lengths: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Return consecutive documents in another order, (n,).

    Args:
        tokens: Tokens of the documents, (n,).
        lengths: Tokens of each document, (documents,).
        order: Numbers of the documents in their new order, (documents,).
    """
    ends, found = np.cumsum(lengths), []
    for some in np.array_split(order, 1 + len(order) // COPIED):
        places = zip((ends - lengths)[some].tolist(), ends[some].tolist(), strict=True)
        found.append(np.concatenate([tokens[:0], *(tokens[begin:end] for begin, end in places)]))
    return np.concatenate(found)
