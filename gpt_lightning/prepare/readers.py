"""Documents in files: the text of each, and its place for error messages."""

import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

from gpt_lightning.errors import UserError, one_line, optional
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.sources import HEAD_BYTES, Input, check_unchanged, local_path

BATCH_ROWS = 64  # rows of Parquet in memory at a time
CHUNK_BYTES = 2**18
WINDOW_BYTES = 2**31  # `zstd --long=31`, as in dumps of Reddit; zstd's own limit is 2**27
ZSTD = b"\x28\xb5\x2f\xfd"
# first bytes of files that are not text: UTF-16, gzip, zstd, Parquet, PDF, zip, bzip2, xz
MAGICS = (
    b"\xff\xfe",
    b"\xfe\xff",
    b"\x1f\x8b",
    ZSTD,
    b"PAR1",
    b"%PDF",
    b"PK\x03\x04",
    b"BZh91AY",
    b"\xfd7zXZ\x00",
)
Rows = Iterator[tuple[Callable[[], object], int]]  # function that returns the text, and its number


class Reader:
    """Reader of the documents of a file or a part of it, which counts those that are damaged.

    Memory: the longest document a few times, and of a Parquet file the pages of a row group.

    Args:
        entry: File.
        folder: Folder for the copy of a file behind a URL.
        settings: text_field, and errors: strict raises an error, skip omits and counts.
    """

    def __init__(self, entry: Input, folder: Path, settings: Settings):
        self.entry = entry
        self.settings = settings
        self.path = local_path(entry, folder)
        self.skipped = 0
        self._number = 0  # of the document: its line or row, counted from the begin of the part

    def texts(self) -> Iterator[str]:
        """Yield the documents in order.

        Raises:
            UserError: The file cannot be read, or a document is damaged and errors is strict.
        """
        field = self.settings.text_field
        for read, number in self._rows():
            self._number = number
            try:
                text = read()
                if not isinstance(text, str):
                    found = f"found {text!r:.60} (--text_field names another)"
                    raise ValueError(f"expected text in the field {field!r}, {found}")
            except (ValueError, RecursionError) as error:
                self.damaged(error)
            else:
                yield text
        check_unchanged(self.entry)

    def damaged(self, error: Exception) -> None:
        """Count a damaged document, or raise a UserError if errors is strict."""
        if self.settings.errors == "strict":
            reason = str(error).replace("line 1 ", "")  # JSON's, whose lines begin here
            fix = "repair it, or omit it with --errors skip"
            raise UserError(f"{self._place()}: damaged document, {reason}; {fix}") from error
        self.skipped += 1

    def _place(self) -> str:
        """Return file and line; this reads the file up to the part."""
        entry = self.entry
        number = self._number
        if entry.kind == "text":
            return entry.label
        if entry.kind == "parquet":
            return f"{entry.label}, row {number:,}"
        with open(self.path, "rb") as file:
            while file.tell() < entry.start:
                file.readline()
                number += 1
        return f"{entry.label}, line {number:,}"

    def _rows(self) -> Rows:
        """Yield the documents of the part, undecoded, and their numbers."""
        entry = self.entry
        field = self.settings.text_field
        with _readable(entry), open(self.path, "rb") as file:
            if entry.kind == "text":
                content = file.read()
                check_begin(content, entry.label)
                yield content.decode, 1
            elif entry.kind == "parquet":
                yield from _parquet_rows(file, entry, field)
            elif entry.kind in ("csv", "tsv"):
                yield from _table_rows(file, entry, field)
            else:
                lines = _unpacked(file) if entry.kind == "packed" else _lines(file, entry)
                yield from _json_rows(lines, entry.label, field)


# ---- JSON lines ----------------------------------------------------------------------------------


def _json_rows(lines: Iterable[bytes], label: str, field: str) -> Rows:
    """Yield the fields of the objects in lines."""
    for number, line in enumerate(lines, 1):
        if number == 1:
            check_begin(line, label)
        if line.strip():
            yield partial(_field, line.strip(), field), number


def _field(line: bytes, field: str) -> object:
    """Return the field of an object in a line, or what else is there."""
    found = json.loads(line)
    return found[field] if isinstance(found, dict) and field in found else found


def _lines(file: BinaryIO, entry: Input) -> Iterator[bytes]:
    """Yield the lines that begin in a part of a file."""
    begin = max(entry.start - 1, 0)  # if that byte is a newline, a line begins at `start`
    file.seek(begin)
    for line in file:
        if entry.stop is not None and begin >= entry.stop:
            return
        if begin >= entry.start:
            yield line
        begin += len(line)


def _unpacked(file: BinaryIO) -> Iterable[bytes]:
    """Return the lines of a .gz or .zst file; one that was cut off raises an error."""
    head = file.read(4)
    file.seek(0)
    if head.startswith(b"{"):  # a client has unpacked it (Content-Encoding)
        return file
    return _zstd_lines(file) if head == ZSTD else gzip.GzipFile(fileobj=file)


def _zstd_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a .zst file; the package's own reader accepts one that was cut off."""
    zstandard = optional("zstandard", "data")
    unpacker = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES)
    frame = None
    rest = b""
    held = b""
    while chunk := rest or file.read(CHUNK_BYTES):
        frame = frame or unpacker.decompressobj()
        try:
            held += frame.decompress(chunk)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        *lines, held = held.split(b"\n")
        yield from lines
        rest = frame.unused_data
        if frame.eof:
            frame = None
    if frame:
        raise EOFError("the file ends within a frame")
    yield held


# ---- columns of tables ---------------------------------------------------------------------------


def _table_rows(file: BinaryIO, entry: Input, field: str) -> Rows:
    """Yield the cells of a column of a .csv or .tsv file, whose first line has the names."""
    csv.field_size_limit(2**31 - 1)
    # Python's csv reads text: bytes that are not UTF-8 pass through it and are decoded later.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    table = csv.DictReader(text, dialect="excel-tab" if entry.kind == "tsv" else "excel")
    names = table.fieldnames or []
    check_begin("".join(names).encode(errors="surrogateescape"), entry.label)
    _check_column(field, names, entry.label)
    for row in table:
        yield partial(_cell, row[field]), table.line_num


def _cell(cell: str | None) -> str | None:
    """Return a cell if it is UTF-8; None in a row that is too short."""
    return cell and cell.encode(errors="surrogateescape").decode()


def _parquet_rows(file: BinaryIO, entry: Input, field: str) -> Rows:
    parquet = optional("pyarrow.parquet", "data")
    # else Arrow reads whole row groups, and keeps them
    table = parquet.ParquetFile(file, buffer_size=CHUNK_BYTES, pre_buffer=False)
    _check_column(field, table.schema_arrow.names, entry.label)
    groups = range(table.num_row_groups)
    number = sum(table.metadata.row_group(group).num_rows for group in groups[: entry.start])
    own = list(groups[entry.start : entry.stop])
    for batch in table.iter_batches(BATCH_ROWS, own, [field]):
        for cell in batch.column(field):
            number += 1
            yield cell.as_py, number


def group_sizes(entry: Input) -> list[int]:
    """Return the bytes of each row group of a Parquet file, decompressed.

    Raises:
        UserError: The file is not Parquet.
    """
    with _readable(entry):
        metadata = optional("pyarrow.parquet", "data").read_metadata(entry.path)
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    return [group.total_byte_size for group in groups]


@contextlib.contextmanager
def _readable(entry: Input) -> Iterator[None]:
    """Turn an error of reading a file into a UserError of one line."""
    try:
        yield
    except UserError:
        raise
    except (OSError, EOFError, ValueError, zlib.error, csv.Error) as error:
        reason = f"cannot be read as {entry.kind} ({one_line(error)})"
        raise UserError(f"{entry.label} {reason}: check it, or get it again") from error


def _check_column(field: str, names: Iterable[str], label: str) -> None:
    if field not in names:
        found = ", ".join(map(repr, names)) or "nothing"
        raise UserError(f"{label}: expected a column {field!r} (--text_field), found {found:.200}")


# ---- bytes that are no text ----------------------------------------------------------------------


def check_begin(content: bytes, label: str) -> None:
    """Raise a UserError if the first bytes of a text or JSONL are those of another format.

    In UTF-16 without a byte order mark, half of the bytes of English are NUL.
    """
    head = content[:HEAD_BYTES]
    if head.startswith(MAGICS) or 4 * head.count(0) >= len(head) > 0:
        fix = "unpack it, or convert it, as UTF-16 with iconv -f utf-16le (or utf-16be) -t utf-8"
        raise UserError(f"{label} is not UTF-8 text: {fix}")
