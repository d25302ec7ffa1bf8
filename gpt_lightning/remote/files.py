"""Files behind URLs: list, read whole or in parts, download, upload, delete."""

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, file_sha256, replacement
from gpt_lightning.remote.attempts import NO_FILE, PATIENCE_S, T, attempts, raise_unless_missing

TRANSFERS = 3  # of a file that arrives with other bytes
# facts that change with a file; no store has all of them
TAGS = "ETag etag sha256 blob_id md5 md5Hash checksum mtime created Content-MD5 Last-Modified"


def protocols(system: Any) -> set[str]:
    """Return the protocols of a file system of fsspec."""
    return {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)


def is_local(system: Any) -> bool:
    """Return whether a file system is that of this machine, including mounted disks."""
    return "file" in protocols(system)


# ---- reading -----------------------------------------------------------------------------------


def listed(url: str) -> dict[str, Fields]:
    """Return the entries of a folder by name, as fsspec lists them; none if it does not exist."""

    def entries(system: Any, path: str) -> list[Fields]:
        system.invalidate_cache()
        return list(system.ls(path, detail=True))

    found = _if_there(url, entries, "list") or []
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}


def find(url: str, is_file: bool) -> list[str]:
    """Return the addresses of the files that a URL names.

    Args:
        url: File, folder with all files below it, or glob.
        is_file: True if it is no folder, unless it is a glob.

    Raises:
        UserError: It cannot be listed.
    """

    def files(system: Any, path: str) -> list[str]:
        # else a folder is left out that could not be listed
        strict = {"on_error": raise_unless_missing} if "http" in protocols(system) else {}
        if any(character in path for character in "*["):  # a ? begins a URL's query
            found = system.glob(path, detail=True, **strict)
            paths = [name for name in found if found[name]["type"] != "directory"]
            if "**" not in path:  # a shell passes them so
                folders = sorted(set(found) - set(paths))
                paths += [name for folder in folders for name in system.find(folder, **strict)]
        else:
            paths = [path] if is_file else system.find(path, **strict)
        return list(dict.fromkeys(map(system.unstrip_protocol, paths)))

    return attempts(url, files, "read", first=True)


def read(url: str, first: bool = False) -> bytes:
    """Return the content of a file; `first` as in attempts."""
    return attempts(url, lambda system, path: system.cat_file(path), first=first)


def read_if_there(url: str) -> bytes | None:
    """Return the content of a file; None if it does not exist."""
    return _if_there(url, lambda system, path: bytes(system.cat_file(path)))


def _if_there(url: str, work: Callable[[Any, str], T], action: str = "fetch") -> T | None:
    """Return the result of `attempts`; None if the file does not exist."""

    def found(system: Any, path: str) -> T | None:
        try:
            return work(system, path)
        except NO_FILE as error:
            raise_unless_missing(error)
            return None

    return attempts(url, found, action)


def fetch_file(
    url: str,
    path: Path,
    sha256: str,
    patience_s: float = 0.0,
    check: Callable[[Path], object] = bool,
) -> None:
    """Fetch a file, which appears at `path` complete and checked or not at all.

    Args:
        url: Address of the file.
        path: Path of the copy.
        sha256: Expected digest; "" for any.
        patience_s: Argument of `attempts`.
        check: Function that raises a UserError for a copy that is not the expected one.

    Raises:
        UserError: All attempts failed, or another file came each time.
        OSError: The file cannot be written.
    """

    def get(system: Any, there: str) -> None:
        system.get_file(there, str(temporary))

    with replacement(path) as temporary:
        for _ in range(TRANSFERS):  # bytes may be damaged on their way
            attempts(url, get, patience_s=patience_s)
            found = file_sha256(temporary)
            if sha256 in ("", found):
                break
        else:
            raise UserError(
                f"cannot fetch {url}: expected SHA-256 {sha256}, found {found}: check the file at "
                "this address"
            )
        check(temporary)
        sync_file(temporary)


def sync_file(path: Path) -> None:
    """Sync the content of a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ---- parts of a file ---------------------------------------------------------------------------


def facts(url: str, fresh: bool = False, first: bool = False) -> tuple[int | None, str, bool]:
    """Return facts about a file: size, tag, and whether a part of it can be read alone.

    The size is None if the store does not return it. The tag is an ETag, a digest or the time of
    the last change, "" if the store has none. Not every HTTP server returns ranges of bytes.

    Args:
        url: Address of the file.
        fresh: True to ask the store, although this process may have listed it before, and to wait
            in an outage.
        first: True for the first request to a new address.
    """

    def info(system: Any, path: str) -> Fields:
        if fresh and not url.startswith("hf://"):  # the hub limits the number of requests
            system.invalidate_cache()
        return dict(system.info(path))

    found = attempts(url, info, "read", first, PATIENCE_S * fresh)  # fresh: in the work
    tag = next((f"{key} {found[key]}" for key in TAGS.split() if found.get(key)), "")
    is_http, size = url.startswith("http"), found.get("size")
    return (size, tag, size is not None and (not is_http or bool(found.get("partial"))))


def open_seekable(url: str, size: int | None) -> BinaryIO:
    """Open a file, seekable; a temporary copy of it if its parts cannot be read alone.

    Args:
        url: Address of the file.
        size: Bytes of a file whose parts can be read alone; None: another file.
    """
    if size is not None:
        return io.BufferedReader(RemoteFile(url, size), 2**20)
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it

    def fetch(system: Any, path: str) -> None:
        copy.truncate(copy.seek(0))
        system.get_file(path, copy)

    attempts(url, fetch, "read", patience_s=PATIENCE_S)
    copy.seek(0)
    return copy


class RemoteFile(io.RawIOBase):
    """File behind a URL with ranges; after a lost connection it is opened again.

    Args:
        url: Address of the file.
        size: Bytes of the file.
    """

    def __init__(self, url: str, size: int):
        self._url = url
        self._size = size
        self._at = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = (0, self._at, self._size)[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        content = attempts(
            self._url, partial(self._read, len(buffer)), "read", patience_s=PATIENCE_S
        )
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)

    def _read(self, n: int, system: Any, path: str) -> bytes:
        try:
            self._file = self._file or system.open(path, "rb")
            self._file.seek(self._at)
            content: bytes = self._file.read(n)
            if not content and self._at < self._size:
                raise ConnectionError(f"it ended after {self._at:,} of {self._size:,} bytes")
        except BaseException:
            self._file = None
            raise
        return content


# ---- writing -----------------------------------------------------------------------------------


def upload(path: Path, url: str) -> None:
    """Upload a file. On a disk, its name means a complete file at every moment, as in a store.

    Raises:
        UserError: All attempts failed.
    """

    def put(system: Any, there: str) -> None:
        if is_local(system):
            with explained("write", there), replacement(Path(there)) as temporary:
                shutil.copyfile(path, temporary)
                sync_file(temporary)
            return
        system.put_file(str(path), there)
        system.invalidate_cache()
        size = path.stat().st_size
        found = system.info(there)["size"]
        if found != size:
            raise ConnectionError(f"sent {size:,} bytes, found {found:,}")

    attempts(url, put, "write")


def delete(url: str) -> None:
    """Delete a file, if it exists."""

    def remove(system: Any, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(path)

    attempts(url, remove, "delete")
