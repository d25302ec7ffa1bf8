"""Compressed files as streams of bytes; a file that was cut off raises an error."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.input_file import DATA_EXTRA, Input, damaged

CHUNK_BYTES = 2**16  # decompressed at a time
WINDOW_BYTES = 2**31  # of `zstd --long=31`, as dumps of Reddit have it; zstd's own limit is 2**27


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
        raise damaged(entry, f"intact {entry.compression}", error) from error


class ZstdDamage(Exception):
    """A .zst file is damaged or was cut off."""


class ZstdReader(io.RawIOBase):
    """Stream of the bytes of a .zst file, frame after frame.

    The package's stream_reader accepts a file that was cut off within a frame.

    Args:
        file: Compressed bytes.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._pieces = _pieces(file)
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        n_bytes = min(len(buffer), len(self._left))
        buffer[:n_bytes] = self._left[:n_bytes]
        self._left = self._left[n_bytes:]
        return n_bytes


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    """Yield the decompressed bytes of a .zst file, which may be empty for a chunk."""
    try:
        import zstandard
    except ImportError as error:
        raise UserError(f"reading .zst needs the package zstandard: {DATA_EXTRA}") from error
    frame, rest = None, b""
    while chunk := rest or file.read(CHUNK_BYTES):
        frame = frame or zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()
        try:
            yield frame.decompress(chunk)
        except zstandard.ZstdError as error:
            raise ZstdDamage(str(error)) from error
        rest = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame is not None:
        raise ZstdDamage("the file ends within a frame")
