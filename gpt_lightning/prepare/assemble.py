"""Parts to shards: an index of all documents, by which any worker can write any shard."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import capacity, file_header, file_name
from gpt_lightning.data.manifest import Shard
from gpt_lightning.files import (
    explained,
    file_sha256,
    sync_folder,
    temporary_path,
    write_atomic,
)
from gpt_lightning.prepare.document_index import DocumentIndex, save_array
from gpt_lightning.prepare.parts import TokenReader, read_part, read_tables
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.shard_writer import check_size
from gpt_lightning.prepare.sorted_runs import CHUNK_TOKENS, SortedRuns, read_run
from gpt_lightning.prepare.target import upload

PLAN = "plan.json"
PARTS = "parts.txt"
ENDS = "ends.npy"


@dataclass(frozen=True)
class Plan:
    """Result of reading the tables of all parts; with the index it decides all shards.

    Attributes:
        identity: Digest of the parts and settings.
        tokens: Split name -> number of tokens.
        documents: Split name -> number of documents.
        runs: Split name -> position of the last token + 1 of each run of the index.
        run_parts: Number of leading parts that are whole in the runs up to each.
        buckets: Number of buckets of shuffled documents.
        sha256: SHA-256 of all documents' SHA-256, which is equal for equal texts in equal order,
            independent of their files.
        counts: Sums of the parts' documents, skipped, replaced and text_bytes.
    """

    identity: str
    tokens: dict[str, int]
    documents: dict[str, int]
    runs: dict[str, list[int]]
    run_parts: list[int]
    buckets: int
    sha256: str
    counts: dict[str, int]


@dataclass(frozen=True)
class ShardTask:
    """Shard, or piece of a large file, to write: tokens first .. last - 1 of a split.

    Attributes:
        file: Name of the file.
        offset: Tokens of the file that are before the piece; None: the piece is the whole file.
    """

    split: str
    first: int
    last: int
    file: str
    offset: int | None = None

    @property
    def done(self) -> str:
        """Name of the file that says that the piece is complete."""
        return f"{self.file}{'' if self.offset is None else f'-{self.offset}'}.json"


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

        Memory: 256 Ki rows of the index a few times, and 16 bytes for each part and bucket.

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
        index = DocumentIndex(self.folder, self.dtype, self.settings, counts["tokens"])
        for number, path in enumerate(paths):
            for table in read_tables(path, read_part(path), self.dtype.itemsize):
                index.add(number, table)
            index.ends.append(list(index.tokens.values()))
        index.spill()
        for split, n_tokens in index.tokens.items():
            check_size(split, n_tokens, f"{index.documents[split]} documents")
        if self.settings.shuffle is not None:
            for split, sizes in index.bucket_tokens.items():
                save_array(self.folder / f"{split}.buckets.npy", np.cumsum(sizes))
        save_array(self.folder / ENDS, np.array(index.ends, np.int64))
        plan = Plan(
            identity,
            index.tokens,
            index.documents,
            index.runs,
            [*index.run_parts[:-1], len(paths)],
            index.buckets,
            index.digest.hexdigest(),
            counts,
        )
        write_atomic(self.folder / PLAN, json.dumps(dataclasses.asdict(plan)).encode())
        return plan

    def tasks(self, plan: Plan) -> list[ShardTask]:
        """Return all shards; those of small splits first, so that parts are soon needed no more.

        nanoGPT's one file of a split is written in pieces, unless it is uploaded.
        """
        settings = self.settings
        size, tasks = capacity(settings.format, settings.shard_tokens), []
        piece = settings.shard_tokens if self.url is None else size
        for split, n_tokens in sorted(plan.tokens.items(), key=lambda item: item[1]):
            for index, begin in enumerate(range(0, n_tokens, size)):
                end = min(begin + size, n_tokens)
                name = file_name(settings.format, split, index)
                for first in range(begin, end, piece):
                    last = min(first + piece, end)
                    offset = None if (first, last) == (begin, end) else first - begin
                    tasks.append(ShardTask(split, first, last, name, offset))
        return tasks

    # ---- shards ----------------------------------------------------------------------------------

    def finished(self, task: ShardTask) -> Shard | None:
        """Return a shard or piece that an earlier run has completed, or None."""
        try:
            shard = Shard(**json.loads((self.folder / task.done).read_bytes()))
        except (OSError, ValueError, TypeError):
            return None
        return shard if self.url or (self.folder / "new" / task.file).exists() else None

    def write_shard(self, task: ShardTask) -> Shard:
        """Write a shard, complete or not at all; or a piece, which is written again until it is.

        Returns:
            The shard; that of a piece has no digest.

        Raises:
            UserError: A part is damaged, the disk is full, or the address cannot be written.
        """
        with explained("write", self.folder):
            digest = self._write_whole(task) if task.offset is None else self._write_piece(task)
        shard = Shard(task.file, task.last - task.first, digest)
        write_atomic(self.folder / task.done, json.dumps(dataclasses.asdict(shard)).encode())
        return shard

    def _write_whole(self, task: ShardTask) -> str:
        header = file_header(self.settings.format, self.dtype.name, task.last - task.first)
        digest = hashlib.sha256(header)
        temporary = temporary_path(self.folder / task.file)
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
                upload(temporary, f"{self.url}/{task.file}")
            else:
                os.replace(temporary, self.folder / "new" / task.file)
                sync_folder(self.folder / "new")
        finally:
            temporary.unlink(missing_ok=True)
        return digest.hexdigest()

    def _write_piece(self, task: ShardTask) -> str:
        assert task.offset is not None
        path = self.folder / "new" / task.file
        path.touch()
        with path.open("r+b") as file:
            file.seek(task.offset * self.dtype.itemsize)  # formats with pieces have no header
            for tokens in self._tokens(task):
                file.write(tokens.view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        sync_folder(path.parent)
        return ""

    def shards(self, plan: Plan, written: Mapping[ShardTask, Shard]) -> dict[str, list[Shard]]:
        """Return the shards of each split in order, with the digests of files in pieces."""
        splits: dict[str, list[Shard]] = {split: [] for split in plan.tokens}
        for task in self.tasks(plan):
            shard = written[task]
            if task.offset:
                before = splits[task.split].pop()
                shard = replace(shard, tokens=before.tokens + shard.tokens)
            splits[task.split].append(shard)
        for shards in splits.values():
            for index, shard in enumerate(shards):
                if not shard.sha256:
                    digest = file_sha256(self.folder / "new" / shard.file)
                    shards[index] = replace(shard, sha256=digest)
        return splits

    def _tokens(self, task: ShardTask) -> Iterator[np.ndarray]:
        plan = self._known_plan()
        if self.settings.shuffle is None:
            paths, pieces = self._part_paths(), self._in_order(plan, task)
        else:
            runs = self.sorted_runs(plan, task.split)
            paths, pieces = runs.paths(), runs.rows(task.first, task.last)
        reader = TokenReader(paths, self.dtype)
        for start, rows in pieces:
            yield reader.read(rows)[max(task.first - start, 0) : task.last - start]

    def _known_plan(self) -> Plan:
        plan = self.plan()
        assert plan is not None
        return plan

    def _part_paths(self) -> list[Path]:
        return [self.parts / name for name in (self.folder / PARTS).read_text().splitlines()]

    def _in_order(self, plan: Plan, task: ShardTask) -> Iterator[tuple[int, np.ndarray]]:
        """Yield the first position and the rows of consecutive documents of a shard."""
        start = 0
        for run, end in enumerate(plan.runs[task.split]):
            if start < min(end, task.last) and end > task.first:
                order, rows = read_run(self.folder, task.split, run)
                low = max(int(np.searchsorted(order, np.uint64(task.first), "right")) - 1, 0)
                high = int(np.searchsorted(order, np.uint64(task.last)))
                while low < high:
                    starts = order[low : min(low + 2**16, high)]
                    count = int(np.searchsorted(starts, starts[0] + np.uint64(CHUNK_TOKENS)))
                    yield int(starts[0]), rows[low : low + count]
                    low += count
            start = end

    # ---- runs of shuffled documents --------------------------------------------------------------

    def sorted_runs(self, plan: Plan, split: str) -> SortedRuns:
        """Return the shuffled documents of a split."""
        return SortedRuns(self.folder, split, len(plan.runs[split]), plan.buckets, self.dtype)

    def missing_runs(self, plan: Plan) -> list[int]:
        """Return the runs to write before the first shard; none without a shuffle."""
        if self.settings.shuffle is None:
            return []
        paths = [self.sorted_runs(plan, split).paths() for split in plan.runs]
        runs = enumerate(zip(*paths, strict=True))
        return [run for run, files in runs if not all(path.exists() for path in files)]

    def write_run(self, run: int) -> int:
        """Write the documents of a run in the order of the shuffle; return their tokens.

        Raises:
            UserError: A part is damaged, or the disk is full.
        """
        plan, parts = self._known_plan(), self._part_paths()
        for split in plan.runs:
            self.sorted_runs(plan, split).write(run, parts)
        return sum(ends[run] - (ends[run - 1] if run else 0) for ends in plan.runs.values())

    def cut_runs(self, plan: Plan, done: Collection[ShardTask]) -> None:
        """Cut off the shuffled documents that no unfinished shard needs."""
        if self.settings.shuffle is None:
            return
        needed = dict(plan.tokens)
        for task in reversed(self.tasks(plan)):
            if needed[task.split] == task.last and task in done:
                needed[task.split] = task.first
        for split, end in needed.items():
            if end < plan.tokens[split]:
                self.sorted_runs(plan, split).cut(end)

    # ---- parts that the shards have replaced -----------------------------------------------------

    def ends(self) -> np.ndarray:
        """Return the tokens of each split up to the end of each part, (parts, splits)."""
        return np.load(self.folder / ENDS)

    def replaced(self, plan: Plan, done: Collection[ShardTask], ends: np.ndarray) -> int:
        """Return the number of leading parts whose tokens are all in complete shards or runs."""
        written = dict.fromkeys(plan.tokens, 0)
        for task in self.tasks(plan):
            if written[task.split] == task.first and task in done:
                written[task.split] = task.last
        if self.settings.shuffle is not None:
            missing = self.missing_runs(plan)
            return [0, *plan.run_parts][missing[0]] if missing else len(ends)
        return int((ends <= list(written.values())).all(axis=1).sum())
