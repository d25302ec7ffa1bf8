"""Index of the documents of all parts, on disk, in the order that they have in each split."""

import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.order import splitmix64
from gpt_lightning.files import write_durable
from gpt_lightning.prepare.parts import Table
from gpt_lightning.prepare.settings import SPLITS, Settings, exact, split_borders

RUN_DOCUMENTS = 2**18  # rows of the index that are sorted in memory, and shuffled on the disk
# tokens of a run, or a 64th of all: while it is shuffled, they are on the disk twice
RUN_TOKENS = 2**25
BUCKET_TOKENS = 2**23  # mean of a bucket of shuffled documents, which is sorted in memory
# place of a document's tokens: number of the part, offset in its file, length, CRC-32
ROW = np.dtype([("part", "<u4"), ("offset", "<u8"), ("length", "<u4"), ("sum", "<u4")])


class DocumentIndex:
    """Index of documents that is made from the tables of parts, in sorted runs.

    A run has 256 Ki rows, or fewer that have 32 Mi tokens or a 64th of all.

    Args:
        folder: Folder of the runs.
        dtype: Type of the tokens.
        settings: Settings of the splits and the shuffle.
        n_tokens: Tokens of all parts.
    """

    def __init__(
        self, folder: Path, dtype: np.dtype[Any], settings: Settings, n_tokens: int
    ) -> None:
        self._folder, self._itemsize, self._settings = folder, dtype.itemsize, settings
        self._borders = split_borders(n_tokens, settings.val_fraction, settings.test_fraction)
        self._position = self._number = 0  # tokens and documents of all splits
        self._held: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {s: [] for s in self._borders}
        self._n_held = self._tokens_held = 0
        self._run_tokens = max(RUN_TOKENS, n_tokens // 64)
        self.buckets = 1 + n_tokens // BUCKET_TOKENS
        self.bucket_tokens = {split: np.zeros(self.buckets, np.int64) for split in self._borders}
        self.tokens = dict.fromkeys(self._borders, 0)
        self.documents = dict.fromkeys(self._borders, 0)
        self.runs: dict[str, list[int]] = {split: [] for split in self._borders}
        self.run_parts: list[int] = []  # leading parts that are whole in the runs up to each
        self._part = 0
        self.ends: list[list[int]] = []  # tokens of each split up to each part's end
        self.digest = hashlib.sha256()

    def add(self, part: int, table: Table) -> None:
        """Add the documents of a block."""
        self._part, settings, lengths = part, self._settings, table.lengths
        if settings.split_by == "fraction":
            numbers = _split_at(lengths, self._position, self._borders)
        else:
            numbers = split_of(table.digests, settings.val_fraction, settings.test_fraction)
        rows = np.empty(len(lengths), ROW)
        rows["part"], rows["length"], rows["sum"] = part, lengths, table.sums
        sizes = lengths * self._itemsize
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
        self._tokens_held += int(lengths.sum())
        if self._n_held >= RUN_DOCUMENTS or self._tokens_held >= self._run_tokens:
            self.spill()

    def spill(self) -> None:
        """Write the held rows as a run, sorted by their order in the split."""
        for split, held in self._held.items():
            name = f"{split}-{len(self.runs[split]):05d}"
            pieces = held or [(np.empty(0, np.uint64), np.empty(0, ROW))]
            order, rows = (np.concatenate(column) for column in zip(*pieces, strict=True))
            if self._settings.shuffle is not None:
                buckets = ((order >> np.uint64(32)) * np.uint64(self.buckets)) >> np.uint64(32)
                lengths = np.bincount(buckets.astype(np.int64), rows["length"], self.buckets)
                self.bucket_tokens[split] += lengths.astype(np.int64)
                ends = np.cumsum([0, *lengths], dtype=np.int64)
                save_array(self._folder / f"{name}.buckets.npy", ends)
                sequence = np.argsort(order)
                order, rows = order[sequence], rows[sequence]
            save_array(self._folder / f"{name}.order.npy", order)
            save_array(self._folder / f"{name}.rows.npy", rows)
            self.runs[split].append(self.tokens[split])
            held.clear()
        self.run_parts.append(self._part)
        self._n_held = self._tokens_held = 0


def save_array(path: Path, array: np.ndarray) -> None:
    """Write an array and sync it to the disk."""
    content = io.BytesIO()  # np.save into a file hides the reason of a failed write
    np.save(content, array, allow_pickle=False)
    write_durable(path, content.getbuffer())


def shuffle_keys(seed: int, first: int, count: int) -> np.ndarray:
    """Return the sort keys of documents first .. first + count - 1 in a shuffled dataset, uint64.

    They are splitmix64's sequence: all keys of a seed are distinct.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    z = np.arange(first + 1, first + count + 1, dtype=np.uint64)
    z = (z + splitmix64(np.array([seed], np.uint64) + golden)) * golden
    return splitmix64(z)


def first_key(bucket: int, buckets: int) -> np.uint64:
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
