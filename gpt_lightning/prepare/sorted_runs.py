"""Shuffled documents, on the disk once: each run of the index is written in the shuffle's order.

The parts of a run are deleted when it is written. Then a bucket of shuffled documents is one piece
of each run. Shards are written from the last to the first, and a run is cut where all later shards
are complete.
"""

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.files import explained, replacement
from gpt_lightning.prepare.document_index import first_key
from gpt_lightning.prepare.parts import TokenReader

CHUNK_TOKENS = 2**22  # read and written at a time


@dataclass(frozen=True)
class SortedRuns:
    """Documents of one split, a file for each run of the index.

    Attributes:
        folder: Folder of the index.
        split: Name of the split.
        n_runs: Number of runs.
        buckets: Number of buckets of shuffled documents.
        dtype: Type of the tokens.
    """

    folder: Path
    split: str
    n_runs: int
    buckets: int
    dtype: np.dtype[Any]

    def paths(self) -> list[Path]:
        """Return the file of each run; one that exists was complete."""
        return [self.folder / f"{self.split}-{run:05d}.tokens" for run in range(self.n_runs)]

    def write(self, run: int, parts: Sequence[Path]) -> None:
        """Write a run's documents, complete or not at all.

        Raises:
            UserError: A part is damaged, or the disk is full.
        """
        path = self.paths()[run]
        if path.exists():
            return
        _, rows = read_run(self.folder, self.split, run)
        reader, ends = TokenReader(list(parts), self.dtype), np.cumsum(rows["length"], dtype=int)
        chunks = np.searchsorted(ends, np.arange(0, ends[-1:].sum(), CHUNK_TOKENS))
        borders = np.unique([0, *chunks, len(rows)]).tolist()
        with (
            explained("write", self.folder),
            replacement(path) as temporary,
            temporary.open("wb") as file,
        ):
            for begin, end in itertools.pairwise(borders):
                file.write(reader.read(rows[begin:end]).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())

    def rows(self, first: int, last: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first position and the rows of consecutive documents, a bucket at a time.

        The rows' parts are the files of `paths`.

        Args:
            first: First token of the split that is wanted.
            last: Token after the last one.
        """
        bucket_ends = self._bucket_ends()
        runs = [read_run(self.folder, self.split, run) for run in range(self.n_runs)]
        ends = [self._ends(run) for run in range(self.n_runs)]
        begin, end = (
            np.searchsorted(bucket_ends, first, "right"),
            np.searchsorted(bucket_ends, last),
        )
        for bucket in range(int(begin), int(end) + 1):
            orders, tables = [], []
            for run, (order, rows) in enumerate(runs):
                chosen = slice(self._place(order, bucket), self._place(order, bucket + 1))
                table = rows[chosen].copy()
                lengths = table["length"].astype(np.int64)
                before = ends[run][bucket] + np.cumsum(lengths) - lengths
                table["part"], table["offset"] = run, before * self.dtype.itemsize
                orders.append(order[chosen])
                tables.append(table)
            found = np.concatenate(tables)[np.argsort(np.concatenate(orders))]
            lengths = found["length"].astype(np.int64)
            starts = int(bucket_ends[bucket]) - np.cumsum(lengths[::-1])[::-1]
            wanted = (starts < last) & (starts + lengths > first)
            if wanted.any():
                yield int(starts[wanted][0]), found[wanted]

    def cut(self, needed: int) -> None:
        """Cut off the documents of buckets that begin at token `needed` of the split or later."""
        bucket = int(np.searchsorted(self._bucket_ends(), needed))
        for run, path in enumerate(self.paths()):
            n_bytes = int(self._ends(run)[bucket + 1]) * self.dtype.itemsize
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size > n_bytes:
                    os.truncate(path, n_bytes)

    def _bucket_ends(self) -> np.ndarray:
        ends: np.ndarray = np.load(self.folder / f"{self.split}.buckets.npy")
        return ends

    def _ends(self, run: int) -> np.ndarray:
        """Return 0, and the tokens of a run up to the end of each bucket, (buckets + 1,)."""
        ends: np.ndarray = np.load(self.folder / f"{self.split}-{run:05d}.buckets.npy")
        return ends

    def _place(self, order: np.ndarray, bucket: int) -> int:
        """Return the number of a run's documents that are before a bucket."""
        if bucket >= self.buckets:
            return len(order)
        return int(np.searchsorted(order, first_key(bucket, self.buckets)))


def read_run(folder: Path, split: str, run: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order and the rows of a run of the index, without reading them."""
    names = (f"{split}-{run:05d}.{kind}.npy" for kind in ("order", "rows"))
    order, rows = (np.load(folder / name, mmap_mode="r") for name in names)
    return order, rows
