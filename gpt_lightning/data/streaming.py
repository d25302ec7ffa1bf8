"""Datasets behind a URL: their manifest, and streams whose shards come through a cache."""

import math
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import HEAD_BYTES, file_header
from gpt_lightning.data.manifest import MANIFEST, Manifest, Shard, remote_dataset
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import TokenStream, open_shard, stamp
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, file_sha256, json_digest
from gpt_lightning.remote.attempts import attempts
from gpt_lightning.remote.cache import CachedFile, FileCache
from gpt_lightning.remote.files import listed, read_if_there

BLOCK_SHARDS = 20  # a corpus that is sorted into ten parts shows all of them in so many shards
BLOCK_WINDOWS = 262_144
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "LastModified", "mtime", "Last-Modified")


class RemoteShards:
    """Shards of one URL, and the cache that keeps them.

    Without a published SHA-256 the cache key is a shard's address, size and tags (ETag and others,
    if they are listed).

    Args:
        url: URL of the dataset's folder, on any file system of fsspec.
        folder: Folder of the cache, which all URLs share.
        limit_bytes: Size limit of the cache.
        patience_s: Time to wait for a shard in an outage.

    Attributes:
        manifest: The dataset's manifest, or one made for the shards of another program.
        listing_digest: Digest of the names, sizes and tags of files without a manifest.

    Raises:
        UserError: The URL does not answer, or has neither.
    """

    def __init__(self, url: str, folder: Path, limit_bytes: int, patience_s: float = 0.0):
        self.url = url.rstrip("/")
        self.listing_digest = ""
        self._entries: dict[str, Fields] = {}  # the listing, if there is no manifest
        url = f"{self.url}/{MANIFEST}"
        content = read_if_there(url)
        self.manifest = self._listed() if content is None else Manifest.parse(content, url)
        sizes = (self.file(shard).n_bytes for shard in self.manifest.shards())
        self.cache = FileCache(folder, limit_bytes, max(sizes, default=0), patience_s)
        if folder.exists():
            self.cache.make_room(0)

    def _listed(self) -> Manifest:
        """Return a manifest of the token shards that are listed at the URL."""
        self._entries = entries = listed(self.url)
        sizes = {name: entry["size"] for name, entry in entries.items() if name}
        manifest = remote_dataset(self.url, sizes, self._heads)
        tags = [
            [shard.file, shard.tokens, *(str(entries[shard.file].get(tag)) for tag in TAGS)]
            for shard in manifest.shards()
        ]
        self.listing_digest = json_digest(tags)
        return manifest

    def _heads(self, names: Sequence[str]) -> list[bytes]:
        """Return the first 1,024 bytes of files."""

        def fetch(system: Any, path: str) -> list[bytes]:
            # a server without ranges would send all of a file
            options = {"block_size": 0} if self.url.startswith("http") else {}

            def head(name: str) -> bytes:
                with system.open(f"{path}/{name}", "rb", **options) as file:
                    return file.read(HEAD_BYTES)

            with ThreadPoolExecutor(16) as pool:
                return list(pool.map(head, names))

        return attempts(self.url, fetch)

    def file(self, shard: Shard) -> CachedFile:
        """Return the file of a shard, as the cache keeps it."""
        kind, dtype = self.manifest.format, np.dtype(self.manifest.dtype)
        size = len(file_header(kind, dtype.name, shard.tokens)) + shard.tokens * dtype.itemsize
        entry = self._entries.get(shard.file, {})
        # another program's .npy may have a header of another size than ours
        exact = entry.get("size") or (size if kind == "llmc" else None)
        lfs = entry.get("lfs") or {}  # the Hugging Face hub has it
        url, sha256 = f"{self.url}/{shard.file}", shard.sha256 or lfs.get("sha256")
        tags = (entry.get(tag) for tag in TAGS)
        facts = [url, shard.tokens, *(str(tag) for tag in tags if tag is not None)]
        name = (sha256 or json_digest(facts)) + Path(shard.file).suffix
        return CachedFile(url, name, sha256 or "", size, None if shard.sha256 else exact)


class RemoteStream(TokenStream):
    """Split whose shards are fetched from a URL when they are needed, or shortly before.

    Args:
        remote: Shards of the URL.
        split: train, val or test.

    Attributes:
        nodes: Machines, each with a cache of its own, that read the split together.

    Raises:
        UserError: A shard is larger than the cache.
    """

    def __init__(self, remote: RemoteShards, split: str):
        cache = remote.cache
        super().__init__(cache.folder, remote.manifest, split)
        self._remote = remote
        self._cache = cache
        self._where = remote.url
        self._repair = f"check the files, and run `rm -r {shlex.quote(str(cache.folder))}`"
        self._files = [remote.file(shard) for shard in self._shards]
        self._bytes = [file.n_bytes for file in self._files]
        self._checked: dict[int, list[int]] = {}  # size and inode of files that were compared
        self._room = cache.limit_bytes
        largest = max(self._bytes, default=0)
        if largest > self._room:
            name = self._shards[self._bytes.index(largest)].file
            raise UserError(
                f"data.cache_limit_gb is {cache.limit_bytes / 1e9:g}, but {name} of {remote.url} "
                f"alone has {largest / 1e9:g} GB: "
                f"raise it to {math.ceil(largest / 1e9)}"
            )

    def horizon(self, block_size: int) -> int:
        return 2 * (max(self.shard_tokens) // block_size + 1)

    def expect(self, shards: list[int]) -> None:
        sizes = np.cumsum([self._bytes[index] for index in shards])
        ahead = shards[: np.searchsorted(sizes, self._room, side="right")]
        self._cache.expect([self._files[index] for index in ahead])

    # ---- orders for which the cache is large enough --------------------------------------------

    def shuffle_blocks(self, block_size: int, lanes: int) -> tuple[int, str]:
        """Return the number of blocks in which windows are shuffled, and a remark on them.

        A block has 20 shards and 262,144 windows, or the whole split. It is smaller, and the remark
        says so, where the cache of a node does not hold its part of two blocks.
        """
        n = len(self._shards)
        windows = max(1, len(self) // block_size // n)  # a shard
        wanted = max(BLOCK_SHARDS * (1 + (lanes > 1)), math.ceil(BLOCK_WINDOWS / windows))
        first = max(1, n // wanted)
        fitting = (b for b in range(first, max(first + 1, n)) if self._held(b, lanes) <= self._room)
        blocks = next(fitting, max(first, n // lanes))
        if blocks <= first:
            return first, ""
        needed = self._held(first, lanes)
        return blocks, (
            f"shuffle     windows of {max(1, n // blocks)} of the {n} shards of {self._remote.url} "
            f"at a time; for {n // first} set data.cache_limit_gb {math.ceil(needed / 1e9)}"
        )

    def _held(self, blocks: int, lanes: int) -> int:
        """Return the bytes of a node's part of this block and of the next, and a shard on its way.

        Args:
            blocks: Number of blocks.
            lanes: Number of lanes, of which the node reads one.
        """
        n, largest = len(self._shards), max(self._bytes)
        shards = math.ceil(n / (blocks * lanes)) + (lanes > 1)
        held = (2 * shards if blocks > 1 else shards) + 1
        return min(held * largest, sum(self._bytes))

    def check_order(self, order: WindowOrder) -> None:
        """Raise a UserError if an order would fetch shards again and again."""
        largest, total = max(self._bytes), sum(self._bytes)
        if order.name not in ("random", "shuffled"):
            return
        needed, fix = total, "set data.order shuffled and data.eval_batches null"
        if order.name == "shuffled":  # the block that is read, without the next one
            here = order.lanes // math.gcd(order.lanes, self.nodes)
            n_shards = math.ceil(len(self._shards) / (order.blocks * order.lanes))
            needed = min(total, (n_shards + (order.lanes > 1)) * here * largest)
            fix = "set another data.order"
        if needed > self._room:
            limit = math.ceil(needed / 1e9)
            raise UserError(
                f"data.order {order.name} reads {needed / 1e9:.3g} GB of {self._where} at a time, "
                f"and data.cache_limit_gb is {self._cache.limit_bytes / 1e9:g}: shards would be "
                f"fetched again and again; raise it to {limit}, or {fix}"
            )

    # ---- reading -------------------------------------------------------------------------------

    @property
    def stamp(self) -> str:
        """Digest of the listing; "" with a manifest, whose digests name the files in the cache."""
        return self._remote.listing_digest

    def check_stamp(self, before: str) -> None:
        if self.stamp:  # files with digests are checked when they are opened
            super().check_stamp(before)

    def _tokens(self, index: int) -> np.ndarray:
        """Map a shard's tokens from a file whose digest was checked in this process."""
        shard, file = self._shards[index], self._files[index]
        kept = Shard(file.name, shard.tokens, shard.sha256)
        while True:
            path = self._cache.get(file)
            try:
                if self._checked.get(index) != (found := stamp(path)[:2]):
                    if file_sha256(path) != self._cache.digest(file):  # damaged: fetched again
                        path.unlink(missing_ok=True)
                        continue
                    self._checked[index] = found
                return open_shard(path.parent, kept, self._manifest, self.is_random)
            except (FileNotFoundError, UserError):
                if path.exists():  # else another process evicted it meanwhile
                    raise
