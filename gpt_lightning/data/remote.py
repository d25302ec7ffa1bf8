"""Datasets behind a URL: shards are prefetched into a local cache of bounded size.

A file in the cache is named by its SHA-256 and appears complete and checked or not at all, so it is
never stale. Processes (ranks, loader workers) share the cache: one fetches a shard, the others wait
for it at a lock. A file that is deleted while it is mapped stays readable to the mapping process.
"""

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import numpy as np
from fsspec.registry import known_implementations

from gpt_lightning.data.manifest import MANIFEST, Manifest, Shard, open_shard
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, locked, replacement

ATTEMPTS = 6
BACKOFF_S = 0.5  # doubles with every attempt, 15 s in all
SILENCE_S = 60.0  # timeout of a connection that sends nothing
T = TypeVar("T")


class ShardCache:
    """Local copies of the shards of one URL.

    Args:
        url: URL of the dataset's folder, on any file system of fsspec.
        folder: Folder that keeps the shards.
        limit_bytes: Size limit of all files in the folder; the least recently used are deleted.
    """

    def __init__(self, url: str, folder: Path, limit_bytes: int) -> None:
        self.url, self.folder, self.limit_bytes = url.rstrip("/"), folder, limit_bytes
        self._expected: queue.SimpleQueue[Shard] | None = None
        self._coming: set[str] = set()
        self._pid = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_expected": None, "_coming": set()}

    def stream(self, manifest: Manifest, split: str) -> "RemoteStream":
        """Return the tokens of a split; its shards are fetched when they are needed."""
        return RemoteStream(self, manifest, split)

    def manifest(self) -> Manifest:
        """Fetch the dataset's manifest.

        Raises:
            UserError: The URL does not answer or has no manifest.
        """
        if self.folder.exists():
            self._evict()
        url = f"{self.url}/{MANIFEST}"
        content = attempts(url, lambda system, path: system.cat_file(path))
        return Manifest.parse(content, url)

    def path(self, shard: Shard) -> Path:
        """Return the path of a shard in the cache."""
        return self.folder / f"{shard.sha256}{Path(shard.file).suffix}"

    def get(self, shard: Shard) -> Path:
        """Return the shard's file, fetched if need be.

        Raises:
            UserError: The shard cannot be fetched, or differs from the manifest.
        """
        path = self.path(shard)
        with self._fetching(path):
            self._coming.discard(shard.sha256)
            if not path.exists():
                self._fetch(shard)
            with contextlib.suppress(FileNotFoundError):  # another process may evict it at once
                now = time.time_ns()  # the system's own stamp is too coarse to order quick reads
                os.utime(path, ns=(now, now))
        return path

    def expect(self, shards: list[Shard]) -> None:
        """Fetch shards in the background, in their order."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._expected, self._coming, self._pid = None, set(), os.getpid()
        if self._expected is None:
            self._expected = queue.SimpleQueue()
            # a daemon thread: the end of a run does not wait for unused shards
            threading.Thread(
                target=self._fetch_expected, args=(self._expected,), daemon=True
            ).start()
        for shard in shards:
            if shard.sha256 not in self._coming and not self.path(shard).exists():
                self._coming.add(shard.sha256)
                self._expected.put(shard)

    def _fetch_expected(self, expected: "queue.SimpleQueue[Shard]") -> None:
        while True:
            shard = expected.get()
            path = self.path(shard)
            # the reader of the shard tries again and raises the error
            with contextlib.suppress(UserError), self._fetching(path):
                # a shard that its reader has fetched meanwhile may be evicted already
                if shard.sha256 in self._coming and not path.exists():
                    self._fetch(shard)
            self._coming.discard(shard.sha256)

    @contextlib.contextmanager
    def _fetching(self, path: Path) -> Iterator[None]:
        """Let no other thread or process fetch a file."""
        with explained("write", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            with locked(self.folder / f".{path.name}.lock"):
                yield

    def _fetch(self, shard: Shard) -> None:
        fetch_file(f"{self.url}/{shard.file}", self.path(shard), shard.sha256)
        self._evict(keep=self.path(shard))

    def _evict(self, keep: Path | None = None) -> None:
        """Delete the least recently used files until the cache is within its limit."""
        files = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if path.suffix in (".npy", ".bin"):
                    files.append((path.stat().st_mtime_ns, path.stat().st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.limit_bytes:
                return
            if path != keep:
                path.unlink(missing_ok=True)
                total -= size


class RemoteStream(TokenStream):
    """Split whose shards are fetched from a URL when they are needed, or shortly before.

    Args:
        cache: Cache of the URL.
        manifest: Manifest of the dataset.
        split: train, val or test.

    Raises:
        UserError: A shard has no digest, or is larger than the cache.
    """

    def __init__(self, cache: ShardCache, manifest: Manifest, split: str) -> None:
        super().__init__(cache.folder, manifest, split)
        self._cache = cache
        self._item_bytes = np.dtype(manifest.dtype).itemsize
        for shard in self._shards:
            if not shard.sha256:
                raise UserError(f"{cache.url}: {shard.file} has no SHA-256 in {MANIFEST}")
            if shard.tokens * self._item_bytes > cache.limit_bytes:
                raise UserError(
                    f"data.cache_limit_gb is {cache.limit_bytes / 1e9:g}, but {shard.file} of "
                    f"{cache.url} alone has {shard.tokens * self._item_bytes / 1e9:g} GB: raise it"
                )

    def horizon(self, block_size: int) -> int:
        largest = max(shard.tokens for shard in self._shards)
        return 2 * (largest // block_size + 1)

    def expect(self, starts: np.ndarray, length: int) -> None:
        first = np.searchsorted(self._ends, starts, side="right")
        _, places = np.unique(first, return_index=True)
        ahead: list[Shard] = []
        room = self._cache.limit_bytes // 2  # the other half is for the shards being read
        for index in first[np.sort(places)].tolist():
            room -= self._shards[index].tokens * self._item_bytes
            if room < 0 and ahead:
                break
            ahead.append(self._shards[index])
        self._cache.expect(ahead)

    def stamps(self) -> dict[str, list[int]]:
        return {}

    def check_stamps(self, stamps: dict[str, list[int]]) -> None:
        pass  # the manifest's digests name the files, which are checked when they are opened

    def _tokens(self, index: int) -> np.ndarray:
        if index in self._maps:
            self._maps[index] = self._maps.pop(index)  # most recently used
            return self._maps[index][0]
        tokens = self._opened(self._shards[index])
        self._maps[index] = tokens, tokens.nbytes
        while sum(size for _, size in self._maps.values()) > self._cache.limit_bytes:
            self._maps.pop(next(iter(self._maps)))  # an open map keeps a deleted file's space
        return tokens

    def _opened(self, shard: Shard) -> np.ndarray:
        """Map a shard's tokens from a file whose digest was checked in this process."""
        while True:
            path = self._cache.get(shard)
            try:
                if file_sha256(path) == shard.sha256:
                    kept = Shard(path.name, shard.tokens, shard.sha256)
                    return open_shard(path.parent, kept, self._dtype, self._format)
                path.unlink(missing_ok=True)  # damaged in the cache: fetched again
            except (FileNotFoundError, UserError):
                if path.exists():  # else another process evicted it meanwhile
                    raise


# ---- fetching ----------------------------------------------------------------------------------


def fetch_file(url: str, path: Path, sha256: str) -> None:
    """Fetch a file, which appears at `path` complete and checked or not at all.

    Raises:
        UserError: All attempts failed, or the digest differs.
        OSError: The file cannot be written.
    """

    def fetch(system: Any, remote_path: str) -> None:
        system.get_file(remote_path, str(temporary))
        found = file_sha256(temporary)
        if found != sha256:
            raise ValueError(f"expected SHA-256 {sha256}, found {found}")

    with replacement(path) as temporary:
        attempts(url, fetch)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())


def attempts(url: str, work: Callable[[Any, str], T], action: str = "fetch") -> T:
    """Call a function with a URL's file system and path until it succeeds, with growing pauses.

    Args:
        url: Address on any file system of fsspec.
        work: Function of the file system and the path.
        action: Verb for errors.

    Raises:
        UserError: The last attempt failed, or the file does not exist.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            return work(*on_file_system(url))
        except UserError:
            raise
        except (FileNotFoundError, NotADirectoryError, PermissionError) as error:
            reason = type(error).__name__
            problem = "does not exist" if action == "fetch" else f"cannot be used to {action}"
            raise UserError(
                f"{url} {problem} ({reason}): check the address and its permissions"
            ) from error
        except Exception as error:  # each file system has its own for lost connections
            reason = " ".join(str(error).split()) or type(error).__name__
            last: Exception = error
            if attempt == 0:
                print(
                    f"cannot {action} {url} ({reason}): trying {ATTEMPTS - 1} times more",
                    flush=True,
                )
    raise UserError(
        f"cannot {action} {url} after {ATTEMPTS} attempts ({reason}): check the connection and the "
        "file; --resume auto continues a run from its last checkpoint"
    ) from last


def on_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, one a process and thread loop, and the path on it.

    Raises:
        UserError: There is no such protocol, or it needs a package that is missing.
    """
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        options["client_kwargs"] = {"timeout": timeout}
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        known = known_implementations.get(url.partition("://")[0], {})
        package = known.get("class", "fsspec").partition(".")[0]
        fix = "use s3://, gs:// or a folder" if package == "fsspec" else f"pip install {package}"
        raise UserError(f"{url}: {' '.join(str(error).split())}: {fix}") from error
    return system, path
