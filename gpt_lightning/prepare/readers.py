"""Readers of compressed files and of columns of Parquet files."""

import gzip
import io
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.input_file import DATA_EXTRA, Input, damaged

if TYPE_CHECKING:
    import pyarrow.parquet

CHUNK_BYTES = 2**16  # decompressed at a time
LINE_BYTES = 2**20  # held at a time to find lines
WINDOW_BYTES = 2**31  # `zstd --long=31`, as in dumps of Reddit; zstd's own limit is 2**27


# ---- compressed files: a file that was cut off raises an error -----------------------------------


def compressed_lines(file: BinaryIO, entry: Input) -> Iterator[bytes]:
    """Yield the lines of a compressed file.

    Raises:
        UserError: The file is damaged or was cut off.
    """
    # GzipFile is no RawIOBase, but has readinto, all that BufferedReader uses.
    stream: Any = gzip.GzipFile(fileobj=file) if entry.compression == ".gz" else ZstdReader(file)
    try:
        yield from io.BufferedReader(stream, LINE_BYTES)
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


# ---- columns of Parquet files --------------------------------------------------------------------


def open_parquet(file: BinaryIO, entry: Input) -> "pyarrow.parquet.ParquetFile":
    """Open a Parquet file and read its footer.

    Raises:
        UserError: pyarrow is not installed, or the file is not Parquet.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError(f"reading Parquet needs the package pyarrow: {DATA_EXTRA}") from error
    try:
        return pq.ParquetFile(file)
    except (pa.ArrowException, OSError) as error:
        raise damaged(entry, "Parquet", error) from error


def column_sizes(file: BinaryIO, entry: Input, text_field: str) -> list[int]:
    """Return the bytes of the text in each row group, decompressed.

    Raises:
        UserError: The file is not Parquet, or has no such column of strings.
    """
    table = open_parquet(file, entry)
    schema = table.schema_arrow
    if text_field not in schema.names:
        raise UserError(
            f"{entry.path}: expected a column {text_field!r}, found "
            f"{', '.join(map(repr, schema.names[:8]))}; name one with --text_field"
        )
    import pyarrow.types as types

    kind = schema.field(text_field).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    if not any(
        test(value) for test in (types.is_string, types.is_large_string, types.is_string_view)
    ):
        raise UserError(
            f"{entry.path}: expected strings in the column {text_field!r}, found {kind}; name "
            "another with --text_field"
        )
    metadata = table.metadata
    paths = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    column, groups = paths.index(text_field), range(metadata.num_row_groups)
    return [metadata.row_group(i).column(column).total_uncompressed_size for i in groups]


def bytes_of(column: Any) -> Any:
    """Return a column's strings as bytes: pyarrow does not check that they are UTF-8."""
    import pyarrow as pa

    return column.cast(pa.large_string()).cast(pa.large_binary())
