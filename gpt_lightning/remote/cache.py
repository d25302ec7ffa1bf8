"""Cache of remote files: a folder of bounded size that processes and datasets share.

A file in the cache is named by its SHA-256 and appears complete and checked or not at all, so it is
never stale. A file whose SHA-256 is nowhere published has another name of its own; the digest of
its first copy is kept, and later copies must have it. One process (rank or loader worker) fetches a
file, the others wait for it at a lock. A reader maps a file while it copies from it and not longer,
because a deleted file that is mapped takes space.
"""

import contextlib
import functools
import os
import queue
import re
import shlex
import socket
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, lives, locked, write_atomic
from gpt_lightning.remote.files import fetch_file

SILENT_S = 3600.0  # age from which on a temporary of another host is taken for left
FETCHERS = 4  # threads of a process that fetch ahead
_FIRST = ".sha256"  # suffix of the digest of a first copy
_KEPT = re.compile(rf"[0-9a-f]{{64}}(?!\{_FIRST}$)\.\w+")
_TEMPORARY = re.compile(r"\.[0-9a-f]{64}\.\w+\.tmp\.(.+)\.(\d+)")


@dataclass(frozen=True)
class CachedFile:
    """File behind a URL, as a cache keeps it.

    Attributes:
        url: Address of the file.
        name: File name in the cache: 64 hexadecimal digits and a suffix.
        sha256: Published digest; "" if there is none.
        n_bytes: Size for which room is made.
        exact: Size that the file must have; None for any.
    """

    url: str
    name: str
    sha256: str
    n_bytes: int
    exact: int | None = None


class FileCache:
    """Local copies of remote files.

    Args:
        folder: Folder that keeps the copies.
        limit_bytes: Size limit of all files in the folder, also of those that are being fetched;
            the least recently used are deleted.
        largest: Bytes of the largest file that is fetched.
        patience_s: Time to wait for a server that does not answer.
    """

    def __init__(self, folder: Path, limit_bytes: int, largest: int = 0, patience_s: float = 0.0):
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.largest = largest
        self.patience_s = patience_s
        self._expected: queue.SimpleQueue[CachedFile | None]
        self._coming: set[str] = set()
        self._pid = 0  # process of the threads that fetch ahead; 0 before the first is started

    def __reduce__(self) -> tuple[type, tuple[Path, int, int, float]]:
        return FileCache, (self.folder, self.limit_bytes, self.largest, self.patience_s)

    def path(self, file: CachedFile) -> Path:
        """Return the path of a file in the cache."""
        return self.folder / file.name

    def digest(self, file: CachedFile) -> str:
        """Return the SHA-256 that a file must have; "" before the first fetch, if unknown."""
        first = self.path(file).with_suffix(_FIRST)
        return file.sha256 or (first.read_text() if first.exists() else "")

    def get(self, file: CachedFile) -> Path:
        """Return the path of a file, fetched if need be.

        Raises:
            UserError: The file cannot be fetched, or has another digest.
        """
        path = self.path(file)
        if not path.exists():
            with self._fetching(path):
                self._coming.discard(path.name)
                if not path.exists():
                    self._fetch(file)
        self.touch(file)
        return path

    def touch(self, file: CachedFile) -> None:
        """Make a file the most recently used one, if it is there."""
        with contextlib.suppress(FileNotFoundError):  # another process may delete it at once
            now = time.time_ns()  # the system's own stamp is too coarse to order quick reads
            os.utime(self.path(file), ns=(now, now))

    def expect(self, files: list[CachedFile]) -> None:
        """Fetch files in the background, in their order; those that are there are kept."""
        if self._pid != os.getpid():  # threads do not survive a fork
            self._pid, self._coming = os.getpid(), set()
            self._expected = queue.SimpleQueue()
            arguments = (weakref.ref(self), self._expected)
            for _ in range(FETCHERS):
                # daemon threads: the end of a run does not wait for unused files
                threading.Thread(target=_fetch_all, args=arguments, daemon=True).start()
                weakref.finalize(self, self._expected.put, None)
        for file in files:
            if self.path(file).exists():
                self.touch(file)
            elif file.name not in self._coming:
                self._coming.add(file.name)
                self._expected.put(file)

    def _fetch_expected(self, file: CachedFile) -> None:
        path = self.path(file)
        # the reader of the file tries again and raises the error
        with contextlib.suppress(UserError), self._fetching(path):
            # a file that its reader has fetched meanwhile may be evicted already
            if path.name in self._coming and not path.exists():
                self._fetch(file)
        self._coming.discard(path.name)

    @contextlib.contextmanager
    def _fetching(self, path: Path) -> Iterator[None]:
        """Let no other thread or process fetch a file."""
        with explained("write", self.folder), locked(self.folder / f".{path.name}.lock"):
            yield

    def _fetch(self, file: CachedFile) -> None:
        path, digest = self.path(file), self.digest(file)
        first, fix = path.with_suffix(_FIRST), "check the file"
        if first.exists():
            fix = f"if the first copy was wrong, forget it with `rm {shlex.quote(str(first))}`"
        room = functools.partial(self.make_room, file.n_bytes)
        found = fetch_file(file.url, path, digest, room, file.exact, fix, self.patience_s)
        if not digest:
            write_atomic(first, found.encode())

    def make_room(self, incoming: int, temporary: Path | None = None) -> None:
        """Delete the least recently used files, so that `incoming` bytes are within the limit.

        A file that is being fetched, as `temporary` from now on, counts as the largest one of the
        cache. Those of processes that were killed are deleted; on another host, of those that have
        not written for an hour.
        """
        with locked(self.folder / ".room.lock", poll_s=0.005):
            total, files, in_flight = incoming, [], 0
            for path in self.folder.iterdir():
                match = _TEMPORARY.fullmatch(path.name)
                in_flight += match is not None  # also one that is renamed at this moment
                with contextlib.suppress(FileNotFoundError):
                    found = path.stat()
                    if match and _is_left(match, found.st_mtime):
                        in_flight -= 1
                        path.unlink()
                    elif _KEPT.fullmatch(path.name):
                        total += found.st_size
                        files.append((found.st_mtime_ns, found.st_size, path))
            total += in_flight * max([self.largest, *(size for _, size, _ in files)])
            for _, size, path in sorted(files):
                if total > self.limit_bytes:
                    path.unlink(missing_ok=True)
                    total -= size
            if temporary:
                temporary.touch()


def _fetch_all(
    cache: "weakref.ref[FileCache]", expected: "queue.SimpleQueue[CachedFile | None]"
) -> None:
    """Fetch the files of a queue; None ends it when nobody uses the cache any more."""
    while (file := expected.get()) is not None:
        if (used := cache()) is not None:
            used._fetch_expected(file)
        del used


def _is_left(match: re.Match[str], mtime: float) -> bool:
    """Return whether the process of a temporary has ended, or is of another host and silent."""
    if match[1] == socket.gethostname():
        return not lives(int(match[2]))
    return mtime < time.time() - SILENT_S
