"""Datasets behind a URL: shards are prefetched into a local cache of bounded size.

A file in the cache is named by its SHA-256 and appears complete and checked or not at all, so it is
never stale. A shard whose SHA-256 is nowhere published is named by its address, size and tags (ETag
and others, if they are listed); the digest of its first copy is kept, and later copies must have
it. Processes (ranks, loader workers) and datasets share the cache: one process fetches a shard, the
others wait for it at a lock. A shard is mapped while windows are copied from it and not longer,
because a deleted file that is mapped takes space.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import queue
import re
import shlex
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from gpt_lightning.data import external
from gpt_lightning.data.formats import LLMC_HEADER_BYTES, advise_random, file_header
from gpt_lightning.data.manifest import MANIFEST, Manifest, Shard, open_shard
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import ALL_SHARDS, TokenStream, stamp
from gpt_lightning.data.transfer import attempts, fetch_file
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, lives, locked, write_atomic

SILENT_S = 3600.0  # age from which on a temporary of another host is taken for left
FETCHERS = 4  # threads of a process that fetch ahead
BLOCK_SHARDS = 20  # a corpus that is sorted into ten parts shows all of them in so many shards
BLOCK_WINDOWS = 262_144
BORROWED = 3  # shards at most of which a lane reads what others leave
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "mtime", "Last-Modified")
_KEPT = re.compile(r"[0-9a-f]{64}\.(?:npy|bin)")
_TEMPORARY = re.compile(rf"\.{_KEPT.pattern}\.tmp\.(.+)\.(\d+)")


class ShardCache:
    """Local copies of the shards of one URL, in a folder that all URLs share.

    Args:
        url: URL of the dataset's folder, on any file system of fsspec.
        folder: Folder that keeps the shards.
        limit_bytes: Size limit of all files in the folder, also of those that are being fetched;
            the least recently used are deleted.
        streams: Number of datasets that share the limit.

    Attributes:
        listing_digest: Digest of the names, sizes and tags of files without a manifest.
    """

    def __init__(self, url: str, folder: Path, limit_bytes: int, streams: int = 1) -> None:
        self.url, self.folder, self.limit_bytes = url.rstrip("/"), folder, limit_bytes
        self.streams, self.listing_digest = streams, ""
        self._published: dict[str, str] = {}  # file -> SHA-256, of files without a manifest
        self._sizes: dict[str, int | None] = {}  # file -> bytes in the listing
        self._tags: dict[str, list[str]] = {}  # file -> tags that the listing has
        self._kind = "npy", "uint16"
        self._largest = 0  # bytes of the dataset's largest file
        self._expected: queue.SimpleQueue[Shard | None] | None = None
        self._coming: set[str] = set()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_expected": None, "_coming": set()}

    def stream(self, manifest: Manifest, split: str) -> "RemoteStream":
        """Return the tokens of a split; its shards are fetched when they are needed."""
        return RemoteStream(self, manifest, split)

    # ---- what is there -------------------------------------------------------------------------

    def manifest(self) -> Manifest:
        """Fetch the dataset's manifest, or make one for the shards of another program.

        Raises:
            UserError: The URL does not answer, or has neither.
        """

        def fetch(system: Any, path: str) -> bytes | None:
            try:
                return system.cat_file(path)
            except FileNotFoundError:
                return None

        url = f"{self.url}/{MANIFEST}"
        content = attempts(url, fetch)
        manifest = self._listed() if content is None else Manifest.parse(content, url)
        self._kind = manifest.format, manifest.dtype
        sizes = (file_bytes(shard, *self._kind) for shard in manifest.shards())
        self._largest = max(sizes, default=0)
        if self.folder.exists():
            self._make_room(0)
        return manifest

    def _listed(self) -> Manifest:
        """Return a manifest of the token shards that are listed at the URL."""

        def listing(system: Any, path: str) -> list[dict[str, Any]]:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                return system.ls(path, detail=True)
            return []

        entries = {
            PurePosixPath(entry["name"]).name: entry for entry in attempts(self.url, listing)
        }
        self._sizes = {name: entry["size"] for name, entry in entries.items() if name}
        manifest = external.remote_dataset(self.url, self._sizes, self._heads)
        for shard in manifest.shards():
            lfs = entries[shard.file].get("lfs") or {}  # of the Hugging Face hub
            self._published |= {shard.file: lfs["sha256"]} if "sha256" in lfs else {}
            found = (entries[shard.file].get(tag) for tag in TAGS)
            self._tags[shard.file] = [str(tag) for tag in found if tag is not None]
        tags = [
            [shard.file, shard.tokens, *(str(entries[shard.file].get(tag)) for tag in TAGS)]
            for shard in manifest.shards()
        ]
        self.listing_digest = hashlib.sha256(json.dumps(tags).encode()).hexdigest()
        return manifest

    def _heads(self, names: list[str]) -> list[bytes]:
        """Return the first 1,024 bytes of files."""

        def fetch(system: Any, path: str) -> list[bytes]:
            paths = [f"{path}/{name}" for name in names]
            if not self.url.startswith("http"):
                return system.cat_ranges(paths, 0, LLMC_HEADER_BYTES, on_error="raise")

            def head(path: str) -> bytes:  # a server without ranges would send all of it
                with system.open(path, "rb", block_size=0) as file:
                    return file.read(LLMC_HEADER_BYTES)

            with ThreadPoolExecutor(16) as pool:
                return list(pool.map(head, paths))

        return attempts(self.url, fetch)

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard in the cache."""
        if not (name := shard.sha256 or self._published.get(shard.file)):
            facts = [f"{self.url}/{shard.file}", shard.tokens, *self._tags.get(shard.file, [])]
            name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
        return self.folder / f"{name}{Path(shard.file).suffix}"

    def digest(self, shard: Shard) -> str:
        """Return the SHA-256 that a shard must have; "" before the first fetch, if unknown."""
        if digest := shard.sha256 or self._published.get(shard.file):
            return digest
        first = self.path(shard).with_suffix(".sha256")
        return first.read_text() if first.exists() else ""

    # ---- fetching ------------------------------------------------------------------------------

    def get(self, shard: Shard) -> Path:
        """Return the shard's file, fetched if need be.

        Raises:
            UserError: The shard cannot be fetched, or differs from the manifest.
        """
        path = self.path(shard)
        if not path.exists():
            with self._fetching(path):
                self._coming.discard(path.name)
                if not path.exists():
                    self._fetch(shard)
        _touch(path)
        return path

    def expect(self, shards: list[Shard]) -> None:
        """Fetch shards in the background, in their order; those that are there are kept."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._expected, self._coming, self._pid = None, set(), os.getpid()
        if self._expected is None:
            self._expected = queue.SimpleQueue()
            arguments = (weakref.ref(self), self._expected)
            for _ in range(FETCHERS):
                # daemon threads: the end of a run does not wait for unused shards
                threading.Thread(target=_fetch_all, args=arguments, daemon=True).start()
                weakref.finalize(self, self._expected.put, None)
        for shard in shards:
            path = self.path(shard)
            if path.exists():
                _touch(path)
            elif path.name not in self._coming:
                self._coming.add(path.name)
                self._expected.put(shard)

    def _fetch_expected(self, shard: Shard) -> None:
        path = self.path(shard)
        # the reader of the shard tries again and raises the error
        with contextlib.suppress(UserError), self._fetching(path):
            # a shard that its reader has fetched meanwhile may be evicted already
            if path.name in self._coming and not path.exists():
                self._fetch(shard)
        self._coming.discard(path.name)

    @contextlib.contextmanager
    def _fetching(self, path: Path) -> Iterator[None]:
        """Let no other thread or process fetch a file."""
        with explained("write", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / f".{path.name}.lock"):
                yield

    def _fetch(self, shard: Shard) -> None:
        path, digest = self.path(shard), self.digest(shard)
        size, first = file_bytes(shard, *self._kind), path.with_suffix(".sha256")
        url, fix = f"{self.url}/{shard.file}", "check the file"
        if first.exists():
            fix = f"if the first copy was wrong, forget it with `rm {shlex.quote(str(first))}`"
        room = functools.partial(self._make_room, size)
        # another program's .npy may have a header of another size than ours
        exact = self._sizes.get(shard.file) or (size if self._kind[0] == "llmc" else None)
        found = fetch_file(url, path, digest, room, None if shard.sha256 else exact, fix)
        if not digest:
            write_atomic(first, found.encode())

    def _make_room(self, incoming: int, temporary: Path | None = None) -> None:
        """Delete the least recently used files, so that `incoming` bytes are within the limit.

        A file that is being fetched, as `temporary` from now on, counts as the largest of the
        dataset and the cache. Those of processes that were killed are deleted; on another host, of
        those that have not written for an hour.
        """
        with locked(self.folder / ".room.lock", poll_s=0.005):
            total, files, in_flight = incoming, [], 0
            for path in [*self.folder.iterdir(), *self.folder.glob(f"{'[0-9a-f]' * 12}/*")]:
                match = _TEMPORARY.fullmatch(path.name)
                if not match and not _KEPT.fullmatch(path.name):
                    continue
                found = None
                with contextlib.suppress(FileNotFoundError):  # it may be renamed at this moment
                    found = path.stat()
                if not match and found:
                    total += found.st_size
                    files.append((found.st_mtime_ns, found.st_size, path))
                elif match and _is_left(match, found.st_mtime if found else math.inf):
                    path.unlink(missing_ok=True)
                elif match:  # also one that is renamed at this moment
                    in_flight += 1
            largest = max([self._largest, *(size for _, size, _ in files)])
            total += in_flight * largest
            for _, size, path in sorted(files):
                if total > self.limit_bytes:
                    path.unlink(missing_ok=True)
                    total -= size
            if temporary:
                temporary.touch()


def _fetch_all(
    cache: "weakref.ref[ShardCache]", expected: "queue.SimpleQueue[Shard | None]"
) -> None:
    """Fetch the shards of a queue; None ends it when nobody uses the cache any more."""
    while (shard := expected.get()) is not None:
        if (used := cache()) is not None:
            used._fetch_expected(shard)
        del used


def _is_left(match: re.Match[str], mtime: float) -> bool:
    """Return whether the process of a temporary has ended, or is of another host and silent."""
    if match[1] == socket.gethostname():
        return not lives(int(match[2]))
    return mtime < time.time() - SILENT_S


def _touch(path: Path) -> None:
    """Make a file the most recently used one."""
    with contextlib.suppress(FileNotFoundError):  # another process may delete it at once
        now = time.time_ns()  # the system's own stamp is too coarse to order quick reads
        os.utime(path, ns=(now, now))


def file_bytes(shard: Shard, file_format: str, dtype: str) -> int:
    """Return the size of a shard's file."""
    header = len(file_header(file_format, dtype, shard.tokens))
    return header + shard.tokens * np.dtype(dtype).itemsize


class RemoteStream(TokenStream):
    """Split whose shards are fetched from a URL when they are needed, or shortly before.

    Args:
        cache: Cache of the URL.
        manifest: Manifest of the dataset.
        split: train, val or test.

    Attributes:
        nodes: Machines, each with a cache of its own, that read the split together.

    Raises:
        UserError: A shard is larger than the cache.
    """

    def __init__(self, cache: ShardCache, manifest: Manifest, split: str) -> None:
        super().__init__(cache.folder, manifest, split)
        self._cache, self._where = cache, cache.url
        self._repair = f"check the files, and run `rm -r {shlex.quote(str(cache.folder))}`"
        self._bytes = [file_bytes(shard, self._format, self._dtype) for shard in self._shards]
        self._checked: dict[int, list[int]] = {}  # size and inode of files that were compared
        self.nodes = 1
        self._beside: dict[Path, int] = {}  # files of the validation split that are kept, too
        largest = max(self._bytes, default=0)
        if largest > cache.limit_bytes // cache.streams:
            name = self._shards[self._bytes.index(largest)].file
            raise UserError(
                f"data.cache_limit_gb is {cache.limit_bytes / 1e9:g}, but {name} of {cache.url} "
                f"alone has {largest / 1e9:g} GB: raise it to {_gb(largest * cache.streams)}"
            )

    def horizon(self, block_size: int) -> int:
        largest = max(shard.tokens for shard in self._shards)
        return 2 * (largest // block_size + 1)

    def cached(self) -> dict[Path, int]:
        return {self._cache.path(s): n for s, n in zip(self._shards, self._bytes, strict=True)}

    def _room(self, beside: dict[Path, int]) -> int:
        """Return the bytes that this dataset may have in the cache beside some files."""
        return (self._cache.limit_bytes - sum(beside.values())) // self._cache.streams

    def expect(self, shards: list[int]) -> None:
        for path in self._beside:
            _touch(path)
        room = self._room(self._beside)
        ahead = []
        for index in shards:
            room -= self._bytes[index]
            if room < 0:
                break
            ahead.append(self._shards[index])
        self._cache.expect(ahead)

    # ---- orders for which the cache is large enough --------------------------------------------

    def shuffle_blocks(
        self, block_size: int, lanes: int, beside: dict[Path, int] | None = None
    ) -> tuple[int, str]:
        """Return the number of blocks in which windows are shuffled, and a remark on them.

        A block has 20 shards and 262,144 windows, or the whole split. It is smaller, and the remark
        says so, where the cache of a node does not hold its part of two blocks and the validation
        split. Where no block leaves room for that split, the remark says that it is fetched again.
        """
        n, self._beside = len(self._shards), beside or {}
        windows = max(1, len(self) // block_size // n)  # a shard
        wanted = max(BLOCK_SHARDS * (1 + (lanes > 1)), math.ceil(BLOCK_WINDOWS / windows))
        first, most = max(1, n // wanted), max(1, n // lanes)

        def fitting(beside: dict[Path, int]) -> int | None:
            room, tried = self._room(beside), range(first, max(first + 1, n))
            return next((blocks for blocks in tried if self._held(blocks, lanes) <= room), None)

        blocks, again = fitting(self._beside), ""
        if blocks is None and self._beside:
            blocks, again = fitting({}), ", and validation fetches its shards again each time"
            self._beside = {}
        blocks = max(first, most) if blocks is None else blocks
        if blocks <= first and not again:
            return first, ""
        kept = sum((beside or {}).values())
        needed = self._held(first, lanes) * self._cache.streams + kept
        also = f" and {_gb(kept)} GB of validation" if kept else ""
        return blocks, (
            f"shuffle     windows of {max(1, n // blocks)} of the {n} shards of {self._cache.url} "
            f"at a time{again}; for {n // first}{also} set data.cache_limit_gb {_gb(needed)}"
        )

    def _held(self, blocks: int, lanes: int) -> int:
        """Return the bytes of a node's part of this block and of the next, and a shard on its way.

        Args:
            blocks: Number of blocks.
            lanes: Number of lanes, of which the node reads one.
        """
        n, largest = len(self._shards), max(self._bytes)
        shards = math.ceil(math.ceil(n / blocks) / lanes) + (lanes > 1)
        held = (2 * shards if blocks > 1 else shards) + BORROWED * (lanes > 1) + 1
        return min(held * largest, sum(self._bytes))

    def check_order(self, order: WindowOrder) -> None:
        """Raise a UserError if an order would fetch shards again and again."""
        largest, total = max(self._bytes), sum(self._bytes)
        fix = "set another data.order"
        if order.name == "random":
            needed, fix = total, "set data.order shuffled and data.eval_batches null"
        elif order.name != "shuffled":
            return
        elif order.shuffle_windows is not None:
            # a group ends in the middle of shards, and the last window of each reaches into another
            n_tokens = min(order.shuffle_windows, order.n_windows) * order.block_size
            needed = min(total, 2 * math.ceil(n_tokens * len(self._shards) / len(self)) * largest)
            fix = "lower data.shuffle_windows"
        else:  # at the least, without the next block
            here = order.lanes // math.gcd(order.lanes, self.nodes)
            n_shards = math.ceil(math.ceil(len(self._shards) / order.blocks) / order.lanes)
            needed = min(total, (n_shards + BORROWED * (order.lanes > 1)) * here * largest)
            if needed > self._room(self._beside):  # of a checkpoint
                self._beside = {}
        cache = self._cache
        if needed > cache.limit_bytes // cache.streams:
            among = f", which {cache.streams} datasets share" * (cache.streams > 1)
            raise UserError(
                f"data.order {order.name} reads {needed / 1e9:.3g} GB of {cache.url} at a time, "
                f"and data.cache_limit_gb is {cache.limit_bytes / 1e9:g}{among}: shards would be "
                f"fetched again and again; raise it to {_gb(needed * cache.streams)}, or {fix}"
            )

    # ---- reading -------------------------------------------------------------------------------

    def stamps(self) -> dict[str, Any]:
        digest = self._cache.listing_digest
        return {ALL_SHARDS: digest} if digest else {}

    def check_stamps(self, stamps: dict[str, Any]) -> None:
        # The digests of a manifest name the files, which are checked when they are opened.
        if self._cache.listing_digest and stamps and stamps != self.stamps():
            raise UserError(
                f"shards of {self._cache.url} have changed since the checkpoint was saved, and "
                "without a manifest their tokens cannot be compared: resume with "
                "--data.allow_changes true"
            )

    def _tokens(self, index: int) -> np.ndarray:
        """Map a shard's tokens from a file whose digest was checked in this process."""
        shard = self._shards[index]
        kept = Shard(self._cache.path(shard).name, shard.tokens, shard.sha256)
        while True:
            path = self._cache.get(shard)
            try:
                if self._checked.get(index) != (found := stamp(path)[:2]):
                    if file_sha256(path) != self._cache.digest(shard):  # damaged: fetched again
                        path.unlink(missing_ok=True)
                        continue
                    self._checked[index] = found
                tokens = open_shard(path.parent, kept, self._dtype, self._format)
                if self.is_random:
                    advise_random(tokens)
                return tokens
            except (FileNotFoundError, UserError):
                if path.exists():  # else another process evicted it meanwhile
                    raise


def _gb(n_bytes: int) -> str:
    """Return bytes in 1e9 bytes with three digits, rounded up, as a limit is given."""
    digits = 3 - math.ceil(math.log10(max(n_bytes, 1) / 1e9 * (1 + 1e-12)))
    return f"{math.ceil(n_bytes / 1e9 * 10**digits) / 10**digits:g}"
