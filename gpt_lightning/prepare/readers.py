"""Documents in files: the text of each, and its place for error messages."""

import csv
import functools
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError, one_line, optional
from gpt_lightning.prepare.settings import Errors
from gpt_lightning.prepare.sources import BOM, Input, check_begin, explained_input, open_input

REPLACEMENT = "\ufffd"
CHUNK_BYTES = 2**20
MAX_CELL_BYTES = 2**31 - 1
BATCH_ROWS = 64  # rows of Parquet in memory at a time
WINDOW_BYTES = 2**31  # `zstd --long=31`, as in dumps of Reddit; zstd's own limit is 2**27
HEAD_BYTES = 4096  # bytes of a text that are examined
# first bytes of files that no setting turns into text
MAGICS = (
    b"\xff\xfe",  # UTF-16
    b"\xfe\xff",
    b"\x1f\x8b",  # gzip
    b"\x28\xb5\x2f\xfd",  # zstd
    b"PAR1",  # Parquet
    b"%PDF",
    b"PK\x03\x04",  # zip
    b"BZh91AY",  # bzip2
    b"\xfd7zXZ\x00",  # xz
)
RECODE = "if it is UTF-16, convert it with iconv -f utf-16le (or utf-16be) -t utf-8"
Place = Callable[[], str]  # returns file and line, which takes time
Rows = Iterator[tuple[bytes | None, Place]]  # content of each document, None for null; its place


class BadDocument(Exception):
    """A document is damaged; the message names what was expected and found."""


@dataclass
class Documents:
    """Reader of documents that counts skipped documents and replaced bytes.

    Memory: the longest document a few times, and of a Parquet file the pages of a row group.

    Args:
        text_field: Field of a JSON object, column of a Parquet or Arrow file.
        errors: strict: a damaged document raises an error. skip: it is omitted and counted.
            replace: bytes that are not UTF-8 and halves of surrogate pairs become U+FFFD, counted.
    """

    text_field: str
    errors: Errors
    skipped: int = 0
    replaced: int = 0

    def read(self, entry: Input, start: int, stop: int | None) -> Iterator[tuple[str, Place]]:
        """Yield the documents of a part of a file, in order, and the place of each.

        Args:
            entry: File to read.
            start: First byte (jsonl) or row group (parquet) of the part; others have one part.
            stop: First byte or row group after the part; None: the end of the file.

        Raises:
            UserError: The file cannot be read, or a document is damaged and errors is strict.
        """
        is_first = start == 0
        for content, where in self._rows(entry, start, stop):
            if entry.kind == "jsonl" and content is not None:
                if not content.strip():
                    continue
                if is_first:
                    check_begin(entry.path, content)
            is_first = False
            try:
                text = self._text(entry, content)
            except BadDocument as error:
                self.count_damaged(where, str(error))
            else:
                yield text, where

    def _rows(self, entry: Input, start: int, stop: int | None) -> Rows:
        """Yield the bytes of each document of a part of a file, undecoded, and its place."""
        with explained_input(entry), open_input(entry) as file:
            if entry.kind == "text":
                yield from _whole(file, entry)
            elif entry.kind == "jsonl":
                yield from _lines(file, entry, start, stop)
            elif entry.kind == "parquet":
                yield from _parquet_rows(file, entry, self.text_field, start, stop)
            elif entry.kind == "arrow":
                yield from _arrow_rows(file, entry, self.text_field)
            else:
                yield from _table_rows(file, entry, self.text_field)

    def _text(self, entry: Input, content: bytes | None) -> str:
        if content is None:
            raise BadDocument(f"expected a value in the column {self.text_field!r}, found null")
        if entry.kind == "jsonl":
            return self._field_of(content)
        return self._decoded(content)

    def count_damaged(self, where: Place, reason: str) -> None:
        """Count a damaged document, or raise.

        Raises:
            UserError: The setting errors is not skip.
        """
        if self.errors != "skip":
            raise UserError(f"{where()}: {reason}; repair it, or omit it with --errors skip")
        self.skipped += 1

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            if self.errors != "replace":
                found = not_utf8(content, error, 0, "--errors replace puts U+FFFD there")
                raise BadDocument(f"expected UTF-8, found {found}") from error
        text = content.decode(errors="replace")
        self.replaced += text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
        return text

    def _field_of(self, line: bytes) -> str:
        expected = f"expected a JSON object with a string in the field {self.text_field!r}, found"
        try:
            found = json.loads(self._decoded(line.rstrip(b"\r\n")))
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", type(error).__name__)
            raise BadDocument(f"{expected} no JSON ({reason})") from error
        text = found.get(self.text_field) if isinstance(found, dict) else None
        if not isinstance(text, str):
            raise BadDocument(f"{expected} {json.dumps(found)[:60]} (--text_field names another)")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self.errors != "replace":
                reason = f"character {error.start:,} is half of a surrogate pair"
                raise BadDocument(f"{reason} (--errors replace puts U+FFFD there)") from error
            before = text.count(REPLACEMENT)
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            self.replaced += text.count(REPLACEMENT) - before
        return text


# ---- contents of files ---------------------------------------------------------------------------


def _whole(file: BinaryIO, entry: Input) -> Rows:
    content = file.read()
    check_text(content, entry.path)
    yield content, lambda: entry.path


def _lines(file: BinaryIO, entry: Input, start: int, stop: int | None) -> Rows:
    offset = 0
    if start:
        offset = _first_line(file, start, stop)
    first = offset
    lines = _compressed_lines(file, entry) if entry.compression else iter(file.readline, b"")
    number = 0
    while stop is None or offset < stop:
        line = next(lines, b"")
        if not line:
            return
        if not offset:
            check_text(line, entry.path)
        number += 1
        where = functools.partial(_line_at, entry, first, number)
        yield line if offset else line.removeprefix(BOM), where
        offset += len(line)


def _first_line(file: BinaryIO, start: int, stop: int | None) -> int:
    """Seek the first line that begins at or after `start`; return its offset.

    The search ends at `stop`, as a line may have many gigabytes.
    """
    offset = start - 1  # if that byte is a newline, a line begins at `start`
    file.seek(offset)
    while stop is None or offset < stop:
        part = file.readline(CHUNK_BYTES)
        offset += len(part)
        if not part or part.endswith(b"\n"):
            return offset
    return offset


def _line_at(entry: Input, offset: int, number: int) -> str:
    """Return file and number of a line; this reads the file up to an offset.

    Args:
        entry: Input of the line.
        offset: Begin of a line.
        number: Number of the line from there.
    """
    with open_input(entry) as file:
        while offset > 0 and (chunk := file.read(min(CHUNK_BYTES, offset))):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return f"{entry.path}, line {number:,}"


# ---- compressed files: a file that was cut off raises an error -----------------------------------


def _compressed_lines(file: BinaryIO, entry: Input) -> Iterator[bytes]:
    unpacked = gzip.GzipFile(fileobj=file)
    is_gzip = entry.compression == ".gz"
    plain = file.read(1) == b"{"  # a client may have unpacked it (Content-Encoding)
    file.seek(0)
    if plain:
        yield from file
        return
    try:
        yield from io.BufferedReader(unpacked, CHUNK_BYTES) if is_gzip else _zstd_lines(file)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(entry, f"intact {entry.compression}", error) from error


def _zstd_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a .zst file; the package's own reader accepts one that was cut off."""
    zstandard = optional("zstandard", "data")
    frame, rest, held = None, b"", b""
    while chunk := rest or file.read(CHUNK_BYTES // 16):
        frame = frame or zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES).decompressobj()
        try:
            held += frame.decompress(chunk)
        except zstandard.ZstdError as error:
            raise EOFError(str(error)) from error
        *lines, held = held.split(b"\n")
        yield from (line + b"\n" for line in lines)
        rest = frame.unused_data if frame.eof else b""
        frame = None if frame.eof else frame
    if frame:
        raise EOFError("the file ends within a frame")
    yield from filter(None, [held])


# ---- columns of tables ---------------------------------------------------------------------------


def _table_rows(file: BinaryIO, entry: Input, text_field: str) -> Rows:
    """Yield the cells of a column of a .csv or .tsv file, whose first line has the names."""
    limit = csv.field_size_limit(MAX_CELL_BYTES)
    # Python's csv reads text: bytes that are not UTF-8 pass through it and are decoded later.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    table = csv.DictReader(text, dialect="excel-tab" if entry.kind == "tsv" else "excel")
    try:
        names = table.fieldnames or []
        check_text("\t".join(names).encode(errors="surrogateescape"), entry.path)
        if text_field not in names:
            found = ", ".join(map(repr, names[:8]))
            expected = f"expected a column named {text_field!r} (--text_field)"
            raise UserError(f"{entry.path}: {expected}, found {found or 'nothing'}")
        for row in table:
            where = functools.partial("{}, line {:,}".format, entry.path, table.line_num)
            cell = row[text_field]  # None in a row that is too short
            yield None if cell is None else cell.encode(errors="surrogateescape"), where
    except csv.Error as error:
        raise damaged(entry, "a table", error) from error
    finally:
        csv.field_size_limit(limit)


def _parquet(file: BinaryIO, entry: Input) -> Any:
    """Open a Parquet file and read its footer."""
    pyarrow = optional("pyarrow", "data")
    parquet = optional("pyarrow.parquet", "data")
    try:
        return parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(entry, "Parquet", error) from error


def _check_column(schema: Any, entry: Input, text_field: str) -> None:
    """Raise a UserError if a table has no such column of strings."""
    types = dict(zip(schema.names, schema.types, strict=True))
    kind: Any = types.get(text_field)
    value = kind.value_type if str(kind).startswith("dictionary") else kind
    if not re.fullmatch("(large_)?string(_view)?", str(value)):
        found = ", ".join(f"{name!r} of {kind}" for name, kind in list(types.items())[:8])
        expected = f"expected a column {text_field!r} of strings (--text_field)"
        raise UserError(f"{entry.path}: {expected}, found {found}")


def column_sizes(entry: Input, text_field: str) -> list[int]:
    """Return the bytes of the text in each row group of a Parquet file, decompressed.

    Raises:
        UserError: The file is not Parquet, or has no such column.
    """
    with explained_input(entry), open_input(entry) as file:
        table = _parquet(file, entry)
    _check_column(table.schema_arrow, entry, text_field)
    metadata = table.metadata
    names = [metadata.schema.column(i).path for i in range(metadata.num_columns)]
    column = names.index(text_field)
    groups = range(metadata.num_row_groups)
    return [metadata.row_group(i).column(column).total_uncompressed_size for i in groups]


def _parquet_rows(
    file: BinaryIO, entry: Input, text_field: str, start: int, stop: int | None
) -> Rows:
    table = _parquet(file, entry)
    groups = range(start, table.num_row_groups if stop is None else stop)
    row = sum(table.metadata.row_group(group).num_rows for group in range(start))
    batches = table.iter_batches(BATCH_ROWS, list(groups), [text_field])
    yield from _cells(batches, text_field, entry, row, "Parquet")


def _arrow_rows(file: BinaryIO, entry: Input, text_field: str) -> Rows:
    pyarrow = optional("pyarrow", "data")
    try:
        table = pyarrow.ipc.open_stream(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(entry, "a stream of Arrow, as save_to_disk writes it", error) from error
    _check_column(table.schema, entry, text_field)
    yield from _cells(table, text_field, entry, 0, "Arrow")


def _cells(batches: Any, text_field: str, entry: Input, row: int, kind: str) -> Rows:
    """Yield the bytes of each row of a column, after `row` rows."""
    pyarrow = optional("pyarrow", "data")
    try:
        for batch in batches:
            # bytes, because pyarrow does not check that strings are UTF-8
            cells = batch.column(text_field).cast(pyarrow.large_string())
            for cell in cells.cast(pyarrow.large_binary()):
                row += 1
                yield cell.as_py(), functools.partial("{}, row {:,}".format, entry.path, row)
    except (pyarrow.ArrowException, OSError) as error:
        raise damaged(entry, kind, error) from error


# ---- bytes that are no text ----------------------------------------------------------------------


def check_text(content: bytes, label: str) -> None:
    """Raise a UserError if the first bytes of a text or JSONL are those of another format.

    In UTF-16 without a byte order mark, half of the bytes of English are NUL.
    """
    head = content[:HEAD_BYTES]
    if head.startswith(MAGICS):
        fix = "unpack it, convert it to UTF-8, or let its name end as its format does"
        raise UserError(f"{label} is no text: {fix}")
    if 4 * head.count(0) >= len(head) > 0:
        raise UserError(f"{label} is no UTF-8, it has many NUL bytes: {RECODE}")


def not_utf8(content: bytes, error: UnicodeDecodeError, offset: int, fix: str) -> str:
    """Return which byte is not UTF-8, and what to do.

    Args:
        content: Bytes that were decoded.
        error: Error of the decoding.
        offset: Bytes of the file before them.
        fix: Advice of the message, unless the bytes look like UTF-16.
    """
    fix = f"it has NUL bytes: {RECODE}" if 0 in content else fix
    return f"byte 0x{content[error.start]:02x} at offset {offset + error.start:,}; {fix}"


def damaged(entry: Input, expected: str, error: Exception) -> UserError:
    """Return the error of an input that is not a whole file of its kind."""
    found = f"found damage ({one_line(error)})"
    return UserError(f"{entry.path}: expected {expected}, {found}; get it again")
