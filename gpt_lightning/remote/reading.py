"""Parts of files behind URLs: facts about a file, and reads that outlive a lost connection."""

import io
import os
from dataclasses import dataclass
from functools import partial
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.remote.attempts import AGAIN, attempts

READ_BYTES = 2**20  # read from a URL at a time
# Facts that change with a file; no store has all of them.
TAGS = ("ETag", "etag", "sha256", "blob_id", "md5", "md5Hash", "checksum", "mtime", "created")
HTTP_TAGS = ("Content-MD5", "Last-Modified")


@dataclass(frozen=True)
class Facts:
    """Facts about a file behind a URL.

    Attributes:
        size: Bytes; None if the store does not return them.
        tag: ETag, digest or time of the last change; "" if the store has none.
        ranges: True if a part can be read alone. Not every HTTP server returns ranges of bytes.
    """

    size: int | None
    tag: str
    ranges: bool


def facts(url: str, fresh: bool = False, first: bool = False, again: str = AGAIN) -> Facts:
    """Return the facts about a file.

    Args:
        url: Address of the file.
        fresh: True to ask the store, although this process may have listed it before.
        first: True for the first request to a new address.
        again: Hint for a connection that stays lost.
    """

    def info(system: Any, path: str) -> dict[str, Any]:
        if fresh and not url.startswith("hf://"):  # the hub limits the number of requests
            system.invalidate_cache()
        found: dict[str, Any] = system.info(path)
        return found

    found = attempts(url, info, "read", first, again)
    tag = next((f"{key} {found[key]}" for key in TAGS + HTTP_TAGS if found.get(key)), "")
    size = None if found.get("size") is None else int(found["size"])
    return Facts(size, tag, size is not None and _has_ranges(url, found))


def _has_ranges(url: str, found: dict[str, Any]) -> bool:
    return not url.startswith(("http://", "https://")) or bool(found.get("partial"))


class RemoteFile(io.RawIOBase):
    """File behind a URL; after a lost connection it is opened again at the same place.

    Args:
        url: Address of the file.
        size: Bytes of the file; None if unknown.
        seekable: False to read an HTTP server's answer from front to back.
        again: Hint for a connection that stays lost.
    """

    def __init__(self, url: str, size: int | None, seekable: bool, again: str = AGAIN) -> None:
        self._url, self._size, self._again = url, size, again
        self._at = 0
        self._file: Any = None
        self._is_http = url.startswith(("http://", "https://"))
        self._is_stream = self._is_http and not seekable

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return not self._is_stream

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if self._is_stream:
            raise io.UnsupportedOperation("seek")
        if whence == os.SEEK_END and self._size is None:
            raise self._without_ranges()
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size or 0}
        at = start[whence] + offset
        if at != self._at and self._file is not None:
            try:
                self._file.seek(at)
            except ValueError as error:
                raise self._without_ranges() from error
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        content = attempts(self._url, partial(self._read, buffer), "read", again=self._again)
        self._at += len(content)
        return len(content)

    def _read(self, buffer: Any, system: Any, path: str) -> bytes:
        try:
            if self._file is None:
                self._file = self._opened(system, path)
            content: bytes = self._file.read(len(buffer))
            if not content and self._at < (self._size or 0):
                raise ConnectionError(f"it ended after {self._at:,} of {self._size:,} bytes")
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
        file = system.open(path, "rb", block_size=0, size=self._size, headers=headers)
        skip = self._at if file.r.status != 206 else 0
        while skip:
            content = file.read(min(skip, READ_BYTES))
            if not content:
                raise ConnectionError(f"it ended {skip:,} bytes before {self._at:,}")
            skip -= len(content)
        return file

    def _without_ranges(self) -> UserError:
        return UserError(
            f"{self._url}: the server does not return ranges of bytes, which Parquet needs: "
            "download the file, and give its path"
        )

    def _close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def close(self) -> None:
        self._close()
        super().close()
