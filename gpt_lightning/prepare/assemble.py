"""Tokens to shards: write a split as a stream, or assemble parts, each shard on its own."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import capacity, file_header, file_name, write_extras
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, sync_folder, temporary_path, write_atomic
from gpt_lightning.prepare.parts import Table, TokenReader, read_part, read_tables
from gpt_lightning.prepare.settings import MIN_TOKENS, SPLITS, Settings, exact, split_borders
from gpt_lightning.prepare.target import upload


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


# ---- parts to shards -----------------------------------------------------------------------------

PLAN = "plan.json"
PARTS = "parts.txt"
ENDS = "ends.npy"
RUN_DOCUMENTS = 2**20  # rows of the index that are sorted in memory
CHUNK_TOKENS = 2**22  # read and written at a time
BUCKET_TOKENS = 2**23  # mean of a bucket of shuffled documents, which is sorted in memory
# place of a document's tokens: number of the part, offset in its file, length, CRC-32
ROW = np.dtype([("part", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("sum", "<u4")])


@dataclass(frozen=True)
class Plan:
    """Result of reading the tables of all parts; with the index it decides all shards.

    Attributes:
        identity: Digest of the parts and settings.
        tokens: Split name -> number of tokens.
        documents: Split name -> number of documents.
        runs: Split name -> position of the last token + 1 of each run of the index.
        buckets: Number of buckets of shuffled documents.
        sha256: SHA-256 of all documents' SHA-256, which is equal for equal texts in equal order,
            independent of their files.
        counts: Sums of the parts' documents, skipped, replaced and text_bytes.
    """

    identity: str
    tokens: dict[str, int]
    documents: dict[str, int]
    runs: dict[str, list[int]]
    buckets: int
    sha256: str
    counts: dict[str, int]


@dataclass(frozen=True)
class ShardTask:
    """Shard to write: tokens first .. last - 1 of a split."""

    split: str
    index: int
    first: int
    last: int


@dataclass(frozen=True)
class Assembly:
    """Assembly of parts into shards in a folder, in which a later run continues.

    The tables of the parts are read once, into an index on disk that is sorted by the order of the
    documents in each split. Then any worker can write any shard.

    Attributes:
        folder: Folder of the index and, in its folder `new`, of the dataset.
        parts: Folder of the parts.
        dtype: Type of the tokens.
        settings: Settings of the splits and the shards.
        url: Address to which shards are moved; None: they stay in `new`.
    """

    folder: Path
    parts: Path
    dtype: np.dtype[Any]
    settings: Settings
    url: str | None = None

    # ---- the index -------------------------------------------------------------------------------

    def plan(self) -> Plan | None:
        """Return the plan of an earlier run, or None if there is none."""
        try:
            return Plan(**json.loads((self.folder / PLAN).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None

    def make_plan(self, names: Sequence[str], identity: str) -> Plan:
        """Read the tables of all parts, and write the index.

        Memory: 1 Mi rows of the index a few times, and 16 bytes for each part and bucket.

        Args:
            names: Files of the parts in the order of the documents.
            identity: Digest of the parts and settings.

        Raises:
            UserError: A part is damaged, or a split has fewer than two tokens.
            OSError: The disk is full.
        """
        paths = [self.parts / name for name in names]
        counts = dict.fromkeys(("documents", "tokens", "text_bytes", "skipped", "replaced"), 0)
        for path in paths:
            part = read_part(path)
            counts = {key: n + getattr(part, key) for key, n in counts.items()}
        index = _Index(self, counts["tokens"])
        for number, path in enumerate(paths):
            for table in read_tables(path, read_part(path), self.dtype.itemsize):
                index.add(number, table)
            index.ends.append(list(index.tokens.values()))
        index.spill()
        for split, n_tokens in index.tokens.items():
            check_size(split, n_tokens, f"{index.documents[split]} documents")
        if self.settings.shuffle is not None:
            for split, sizes in index.bucket_tokens.items():
                _save(self.folder / f"{split}.buckets.npy", np.cumsum(sizes))
        _save(self.folder / ENDS, np.array(index.ends, np.int64))
        plan = Plan(
            identity,
            index.tokens,
            index.documents,
            index.runs,
            index.buckets,
            index.digest.hexdigest(),
            counts,
        )
        write_atomic(self.folder / PLAN, json.dumps(dataclasses.asdict(plan)).encode())
        return plan

    def tasks(self, plan: Plan) -> list[ShardTask]:
        """Return all shards; those of small splits first, so that parts are soon needed no more."""
        size = capacity(self.settings.format, self.settings.shard_tokens)
        return [
            ShardTask(split, index, first, min(first + size, n_tokens))
            for split, n_tokens in sorted(plan.tokens.items(), key=lambda item: item[1])
            for index, first in enumerate(range(0, n_tokens, size))
        ]

    # ---- shards ----------------------------------------------------------------------------------

    def finished(self, task: ShardTask) -> Shard | None:
        """Return a shard that an earlier run has completed, or None."""
        name = file_name(self.settings.format, task.split, task.index)
        try:
            shard = Shard(**json.loads((self.folder / f"{name}.json").read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return shard if self.url or (self.folder / "new" / name).exists() else None

    def write_shard(self, task: ShardTask) -> Shard:
        """Write a shard, complete or not at all.

        Raises:
            UserError: A part is damaged, the disk is full, or the address cannot be written.
        """
        file_format, n_tokens = self.settings.format, task.last - task.first
        name = file_name(file_format, task.split, task.index)
        header = file_header(file_format, self.dtype.name, n_tokens)
        digest = hashlib.sha256(header)
        with explained("write", self.folder):
            temporary = temporary_path(self.folder / name)
            try:
                with temporary.open("wb") as file:
                    file.write(header)
                    for tokens in self._tokens(task):
                        content = tokens.view(np.uint8).data
                        digest.update(content)
                        file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                if self.url:
                    upload(temporary, f"{self.url}/{name}")
                else:
                    os.replace(temporary, self.folder / "new" / name)
                    sync_folder(self.folder / "new")
            finally:
                temporary.unlink(missing_ok=True)
        shard = Shard(name, n_tokens, digest.hexdigest())
        write_atomic(self.folder / f"{name}.json", json.dumps(dataclasses.asdict(shard)).encode())
        return shard

    def _tokens(self, task: ShardTask) -> Iterator[np.ndarray]:
        plan = self.plan()
        assert plan is not None
        names = (self.folder / PARTS).read_text().splitlines()
        reader = TokenReader([self.parts / name for name in names], self.dtype)
        ordered = self._in_order if self.settings.shuffle is None else self._shuffled
        for start, rows in ordered(plan, task):
            yield reader.read(rows)[max(task.first - start, 0) : task.last - start]

    def _in_order(self, plan: Plan, task: ShardTask) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first position and the rows of consecutive documents of a shard."""
        start = 0
        for run, end in enumerate(plan.runs[task.split]):
            if start < min(end, task.last) and end > task.first:
                order, rows = self._run(task.split, run)
                low = max(int(np.searchsorted(order, np.uint64(task.first), "right")) - 1, 0)
                high = int(np.searchsorted(order, np.uint64(task.last)))
                while low < high:
                    starts = order[low : min(low + 2**16, high)]
                    count = int(np.searchsorted(starts, starts[0] + np.uint64(CHUNK_TOKENS)))
                    yield int(starts[0]), rows[low : low + count]
                    low += count
            start = end

    def _shuffled(self, plan: Plan, task: ShardTask) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first position and the rows of consecutive documents, a bucket at a time."""
        ends = np.load(self.folder / f"{task.split}.buckets.npy")
        runs = [self._run(task.split, run) for run in range(len(plan.runs[task.split]))]
        first = int(np.searchsorted(ends, task.first, "right"))
        for bucket in range(first, int(np.searchsorted(ends, task.last)) + 1):
            low = _first_key(bucket, plan.buckets)
            high = _first_key(bucket + 1, plan.buckets) if bucket + 1 < plan.buckets else None
            orders, tables = [], []
            for order, rows in runs:
                i = int(np.searchsorted(order, low))
                j = len(order) if high is None else int(np.searchsorted(order, high))
                orders.append(order[i:j])
                tables.append(rows[i:j])
            found = np.concatenate(tables)[np.argsort(np.concatenate(orders))]
            lengths = found["length"].astype(np.int64)
            starts = int(ends[bucket]) - np.cumsum(lengths[::-1])[::-1]
            chosen = (starts < task.last) & (starts + lengths > task.first)
            if chosen.any():
                yield int(starts[chosen][0]), found[chosen]

    def _run(self, split: str, run: int) -> tuple[np.ndarray, np.ndarray]:
        names = (f"{split}-{run:05d}.{kind}.npy" for kind in ("order", "rows"))
        order, rows = (np.load(self.folder / name, mmap_mode="r") for name in names)
        return order, rows

    # ---- parts that the shards have replaced -----------------------------------------------------

    def ends(self) -> np.ndarray:
        """Return the tokens of each split up to the end of each part, (parts, splits)."""
        return np.load(self.folder / ENDS)

    def replaced(self, plan: Plan, done: Collection[ShardTask], ends: np.ndarray) -> int:
        """Return the number of leading parts of which all tokens are in complete shards."""
        written = dict.fromkeys(plan.tokens, 0)
        for task in self.tasks(plan):
            if written[task.split] == task.first and task in done:
                written[task.split] = task.last
        if self.settings.shuffle is not None:
            return len(ends) if written == plan.tokens else 0
        return int((ends <= list(written.values())).all(axis=1).sum())


class _Index:
    """Index of documents that is made from the tables of parts, in sorted runs of 1 Mi rows.

    Args:
        assembly: Assembly that is planned.
        n_tokens: Tokens of all parts.
    """

    def __init__(self, assembly: Assembly, n_tokens: int) -> None:
        settings = assembly.settings
        self._assembly, self._settings = assembly, settings
        self._borders = split_borders(n_tokens, settings.val_fraction, settings.test_fraction)
        self._position = self._number = 0  # tokens and documents of all splits
        self._held: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {s: [] for s in self._borders}
        self._n_held = 0
        self.buckets = 1 + n_tokens // BUCKET_TOKENS
        self.bucket_tokens = {split: np.zeros(self.buckets, np.int64) for split in self._borders}
        self.tokens = dict.fromkeys(self._borders, 0)
        self.documents = dict.fromkeys(self._borders, 0)
        self.runs: dict[str, list[int]] = {split: [] for split in self._borders}
        self.ends: list[list[int]] = []  # tokens of each split up to each part's end
        self.digest = hashlib.sha256()

    def add(self, part: int, table: Table) -> None:
        """Add the documents of a block."""
        settings, lengths = self._settings, table.lengths
        if settings.split_by == "fraction":
            numbers = _split_at(lengths, self._position, self._borders)
        else:
            numbers = split_of(table.digests, settings.val_fraction, settings.test_fraction)
        rows = np.empty(len(lengths), ROW)
        rows["part"], rows["length"], rows["sum"] = part, lengths, table.sums
        sizes = lengths * self._assembly.dtype.itemsize
        rows["offset"] = table.offset + np.cumsum(sizes) - sizes
        for split in self._borders:
            chosen = numbers == SPLITS.index(split)
            if settings.shuffle is None:
                own = lengths[chosen]
                order = (self.tokens[split] + np.cumsum(own) - own).astype(np.uint64)
            else:
                order = shuffle_keys(settings.shuffle, self._number, len(lengths))[chosen]
            self._held[split].append((order, rows[chosen]))
            self.tokens[split] += int(lengths[chosen].sum())
            self.documents[split] += int(chosen.sum())
        self.digest.update(table.digests.data)
        self._position += int(lengths.sum())
        self._number += len(lengths)
        self._n_held += len(lengths)
        if self._n_held >= RUN_DOCUMENTS:
            self.spill()

    def spill(self) -> None:
        """Write the held rows as a run, sorted by their order in the split."""
        for split, held in self._held.items():
            pieces = held or [(np.empty(0, np.uint64), np.empty(0, ROW))]
            order, rows = (np.concatenate(column) for column in zip(*pieces, strict=True))
            if self._settings.shuffle is not None:
                buckets = ((order >> np.uint64(32)) * np.uint64(self.buckets)) >> np.uint64(32)
                lengths = np.bincount(buckets.astype(np.int64), rows["length"], self.buckets)
                self.bucket_tokens[split] += lengths.astype(np.int64)
                sequence = np.argsort(order)
                order, rows = order[sequence], rows[sequence]
            name = f"{split}-{len(self.runs[split]):05d}"
            _save(self._assembly.folder / f"{name}.order.npy", order)
            _save(self._assembly.folder / f"{name}.rows.npy", rows)
            self.runs[split].append(self.tokens[split])
            held.clear()
        self._n_held = 0


def _save(path: Path, array: np.ndarray) -> None:
    with open(path, "wb") as file:
        np.save(file, array, allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())


def shuffle_keys(seed: int, first: int, count: int) -> np.ndarray:
    """Return the sort keys of documents first .. first + count - 1 in a shuffled dataset, uint64.

    They are splitmix64's sequence: all keys of a seed are distinct.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    z = (z + _mixed(np.array([seed], np.uint64) + golden)) * golden
    return _mixed(z)


def _mixed(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _first_key(bucket: int, buckets: int) -> np.uint64:
    """Return the lowest key of a bucket."""
    return np.uint64(-(-(bucket << 32) // buckets) << 32)


def _split_at(
    lengths: np.ndarray, position: int, borders: dict[str, tuple[int, int]]
) -> np.ndarray:
    """Return the number in SPLITS of the split in which each document begins, (documents,).

    A document is not cut.
    """
    starts = position + np.cumsum(lengths) - lengths
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
