"""Compressed files as streams of bytes; a file that was cut off raises an error."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.inputs import DATA_EXTRA, Input

CHUNK_BYTES = 2**16  # decompressed at a time


def decompressed(file: BinaryIO, entry: Input) -> io.RawIOBase:
    """Return the bytes of a compressed file as a stream."""
    if entry.compression == ".gz":
        # GzipFile is no RawIOBase, but has readinto, all that BufferedReader uses.
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    return ZstdReader(file)


def intact(reader: BinaryIO, entry: Input) -> Iterator[bytes]:
    """Yield the lines of a compressed file.

    Raises:
        UserError: The file is damaged or was cut off.
    """
    try:
        yield from reader
    except (EOFError, zlib.error, gzip.BadGzipFile, ZstdDamage) as error:
        raise UserError(
            f"{entry.label}: expected intact {entry.compression}, found damage "
            f"({' '.join(str(error).split())}); get the file again"
        ) from error


class ZstdDamage(Exception):
    """A .zst file is damaged or was cut off."""


class ZstdReader(io.RawIOBase):
    """Stream of the bytes of a .zst file, frame after frame.

    The package's stream_reader accepts a file that was cut off within a frame.

    Args:
        file: Compressed bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._module = _zstandard()
        self._file = file
        self._frame: Any = None
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left and self._more():
            pass
        n_bytes = min(len(buffer), len(self._left))
        buffer[:n_bytes] = self._left[:n_bytes]
        self._left = self._left[n_bytes:]
        return n_bytes

    def _more(self) -> bool:
        """Decompress one more chunk; return False at the end."""
        ended = self._frame is not None and self._frame.eof
        chunk = self._frame.unused_data if ended else b""
        chunk = chunk or self._file.read(CHUNK_BYTES)
        if not chunk:
            if self._frame is None or ended:
                return False
            raise ZstdDamage("the file ends within a frame")
        if self._frame is None or ended:
            self._frame = self._module.ZstdDecompressor().decompressobj()
        try:
            self._left = memoryview(self._frame.decompress(chunk))
        except self._module.ZstdError as error:
            raise ZstdDamage(str(error)) from error
        return True


def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"reading .zst needs the package zstandard: {DATA_EXTRA}") from error
    return zstandard
