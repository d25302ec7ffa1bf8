"""Compressed files as streams of bytes, which end where the file is whole and nowhere else."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.inputs import DATA_EXTRA, Input

CHUNK_BYTES = 2**16  # decompressed at a time


def decompressed(file: BinaryIO, entry: Input) -> io.RawIOBase:
    """The bytes of a compressed file."""
    if entry.compression == ".gz":
        # GzipFile is no RawIOBase, but offers readinto, which is all that BufferedReader asks for.
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    return ZstdReader(file)


def intact(reader: BinaryIO, entry: Input) -> Iterator[bytes]:
    """The lines of a compressed file.

    Raises:
        UserError: the file is damaged or was cut off.
    """
    try:
        yield from reader
    except (EOFError, zlib.error, gzip.BadGzipFile, ZstdDamage) as error:
        raise UserError(
            f"{entry.label}: expected intact {entry.compression}, found damage "
            f"({' '.join(str(error).split())}); get the file again"
        ) from error


class ZstdDamage(Exception):
    """A .zst file is damaged or ends too early."""


class ZstdReader(io.RawIOBase):
    """A .zst file as a stream of bytes, frame after frame.

    The package's own stream_reader takes a file that was cut off in a frame for a complete one.

    Args:
        file: the compressed bytes.
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
        """Decompresses one chunk more; False at the end."""
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
