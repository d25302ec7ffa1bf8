"""Files behind a URL: facts about them, and reads that outlive a lost connection."""

import contextlib
import io
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from gpt_lightning.errors import UserError, reason_of
from gpt_lightning.prepare.input_file import Input, Kind

T = TypeVar("T")
READ_BYTES = 2**20  # of a URL at a time
# Facts that change with a file; no store has all of them.
STAMPS = ("ETag", "etag", "sha256", "blob_id", "md5", "md5Hash", "checksum", "mtime", "created")
HTTP_STAMPS = ("Content-MD5", "Last-Modified")
NO_STAMP = "none "


@contextlib.contextmanager
def explained_url(url: str) -> Iterator[None]:
    """Turn any exception of a store into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except ImportError as error:  # fsspec's text names the package to install
        raise UserError(f"cannot open {url}: {error}") from error
    except Exception as error:
        origin = _origin(error)
        missing = isinstance(origin, FileNotFoundError) or _status(origin) in (404, 410)
        reason = "no such file" if missing else reason_of(origin)
        raise UserError(
            f"cannot read {url}: {reason}; check the address and the connection, and run the same "
            "command again: it continues from the completed parts"
        ) from error


def _origin(error: Exception) -> BaseException:
    """Return the error behind fsspec's FileNotFoundError, which it raises for any of http."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    is_http = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return cause if cause is not None and is_http else error


def _status(error: BaseException) -> int | None:
    """Return the status of an answer by http that is an error of aiohttp or of the hub."""
    response = getattr(error, "response", None)
    found = getattr(error, "status", None) or getattr(response, "status_code", None)
    return found if isinstance(found, int) else None


def _is_passing(error: Exception, reached: bool) -> bool:
    """Return whether a lost connection or a busy server is the reason of an error."""
    origin = _origin(error)
    status = _status(origin)
    if status is not None:
        return status in (408, 429) or status >= 500
    if not reached and isinstance(origin, OSError):
        return False
    paths = (FileNotFoundError, PermissionError, NotADirectoryError, IsADirectoryError)
    return not isinstance(origin, (*paths, ImportError, ValueError, NotImplementedError))


def patiently(url: str, work: Callable[[Any, str], T], reached: bool = True) -> T:
    """Call a function with a URL's file system and path, again after errors that may pass.

    The last error is the file system's; explained_url turns it into a UserError.

    Args:
        url: Address on any file system of fsspec.
        work: Function of the file system and the path.
        reached: False if this is the first request: without a connection the address is wrong.
    """
    from gpt_lightning.remote.attempts import ATTEMPTS, BACKOFF_S, on_file_system  # needs fsspec

    for attempt in range(ATTEMPTS):
        try:
            return work(*on_file_system(url))
        except Exception as error:
            if attempt == ATTEMPTS - 1 or not _is_passing(error, reached):
                raise
            if not attempt:
                print(
                    f"cannot read {url} ({reason_of(_origin(error))}): trying "
                    f"{ATTEMPTS - 1} times more",
                    flush=True,
                )
        time.sleep(BACKOFF_S * 2**attempt)
    raise AssertionError(url)


class RemoteFile(io.RawIOBase):
    """File behind a URL; after a lost connection it is opened again at the same place.

    Args:
        entry: Input behind a URL.
    """

    def __init__(self, entry: Input) -> None:
        self._entry = entry
        self._at = 0
        self._file: Any = None
        self._is_http = entry.path.startswith(("http://", "https://"))
        self._is_stream = self._is_http and entry.kind != "parquet" and not entry.seekable

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._is_stream

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if self._is_stream:
            raise io.UnsupportedOperation("seek")
        if whence == os.SEEK_END and self._entry.size is None:
            raise self._without_ranges()
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._entry.size or 0}
        at = start[whence] + offset
        if at != self._at and self._file is not None:
            try:
                self._file.seek(at)
            except ValueError as error:
                raise self._without_ranges() from error
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        with explained_url(self._entry.path):
            content = patiently(self._entry.path, partial(self._read, buffer))
        self._at += len(content)
        return len(content)

    def _read(self, buffer: Any, system: Any, path: str) -> bytes:
        try:
            if self._file is None:
                self._file = self._opened(system, path)
            content: bytes = self._file.read(len(buffer))
            if not content and self._at < (self._entry.size or 0):
                raise ConnectionError(f"it ended after {self._at:,} of {self._entry.size:,} bytes")
        except BaseException as error:
            self._close()
            if self._is_http and isinstance(error, ValueError):
                raise self._without_ranges() from error
            raise
        buffer[: len(content)] = content
        return content

    def _opened(self, system: Any, path: str) -> Any:
        """Return the file, opened where this one is."""
        if not self._is_stream:
            file = system.open(path, "rb")
            file.seek(self._at)
            return file
        headers = {"Range": f"bytes={self._at}-"} if self._at else {}
        file = system.open(path, "rb", block_size=0, size=self._entry.size, headers=headers)
        skip = self._at if file.r.status != 206 else 0
        while skip:
            content = file.read(min(skip, READ_BYTES))
            if not content:
                raise ConnectionError(f"it ended {skip:,} bytes before {self._at:,}")
            skip -= len(content)
        return file

    def _without_ranges(self) -> UserError:
        return UserError(
            f"{self._entry.path}: the server does not return ranges of bytes, which Parquet needs: "
            "download the file, and give its path"
        )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        self._close()
        super().close()


def remote_input(
    url: str, kind: Kind, compression: str, again: bool = False, reached: bool = True
) -> Input:
    """Return the input behind a URL; any error of its file system is raised.

    Args:
        url: Address of the file.
        kind: text, jsonl or parquet.
        compression: .gz, .zst or "".
        again: True to ask the store, although this process may have listed it before.
        reached: False if this is the first request.
    """

    def info(system: Any, path: str) -> Mapping[str, Any]:
        if again and not url.startswith("hf://"):  # the hub limits the number of requests
            system.invalidate_cache()
        found: Mapping[str, Any] = system.info(path)
        return found

    return _remote_input(patiently(url, info, reached), url, kind, compression)


def _remote_input(info: Mapping[str, Any], url: str, kind: Kind, compression: str) -> Input:
    # without a stamp every run compares the contents
    none = f"{NO_STAMP}{uuid.uuid4()}"
    stamp = next((f"{key} {info[key]}" for key in STAMPS + HTTP_STAMPS if info.get(key)), none)
    size = None if info.get("size") is None else int(info["size"])
    # Not every http server returns ranges of bytes.
    seekable = size is not None and (not url.startswith("http") or bool(info.get("partial")))
    return Input(url, url, kind, compression, size, stamp, seekable)
