"""Documents in files: the text of each, and its place for error messages."""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.input_file import (
    HEAD_BYTES,
    Input,
    check_text,
    damaged,
    no_lines,
    not_utf8,
)
from gpt_lightning.prepare.inputs import explained_input, open_input
from gpt_lightning.prepare.readers import bytes_of, compressed_lines, open_parquet
from gpt_lightning.prepare.settings import Errors

BOM = b"\xef\xbb\xbf"
REPLACEMENT = "\ufffd"
CHUNK_BYTES = 2**20
BATCH_ROWS = 64  # rows of Parquet in memory at a time


class BadDocument(Exception):
    """A document is damaged; the message names what was expected and found."""


@dataclass(frozen=True)
class Document:
    """Text and a function that returns its place, since finding a line's number takes time."""

    text: str
    where: Callable[[], str]


class Documents:
    """Reader of documents that counts skipped documents and replaced bytes.

    Memory: the longest document a few times, and of a Parquet file the pages of a row group.

    Args:
        text_field: Field of a JSON object, column of a Parquet file.
        errors: strict: a damaged document raises an error. skip: it is omitted and counted.
            replace: bytes that are not UTF-8 and halves of surrogate pairs become U+FFFD, counted.
    """

    def __init__(self, text_field: str, errors: Errors) -> None:
        self._field = text_field
        self._errors = errors
        self.skipped = 0
        self.replaced = 0
        self._digest = hashlib.sha256()

    @property
    def content(self) -> str:
        """Digest of all lines, cells and texts that were read, before they were decoded."""
        return self._digest.hexdigest()[:32]

    def read(self, entry: Input, start: int, stop: int | None) -> Iterator[Document]:
        """Yield the documents of a part of a file, in order.

        Args:
            entry: File to read.
            start: First byte (jsonl) or row group (parquet) of the part.
            stop: First byte or row group after the part; None: the end of the file.

        Raises:
            UserError: The file cannot be read, or a document is damaged and errors is strict.
        """
        parse = {"text": self._decoded, "parquet": self._cell, "jsonl": self._text_of}[entry.kind]
        first = not start
        for content, where in self.contents(entry, start, stop):
            if entry.kind == "jsonl" and not content.strip():
                continue
            if entry.kind == "jsonl" and first and re.match(rb"\s*(\[|{\s*$)", content):
                raise no_lines(entry.path, entry.compression)
            first = False
            try:
                text = parse(content)
            except BadDocument as error:
                self.count_damaged(where, str(error))
            else:
                yield Document(text, where)

    def contents(self, entry: Input, start: int, stop: int | None) -> "Contents":
        """Yield the bytes of each document of a part of a file, with its place, undecoded."""
        if entry.kind == "text":
            contents = _whole(entry)
        elif entry.kind == "parquet":
            contents = _rows(entry, start, stop, self._field)
        else:
            contents = _lines(entry, start, stop)
        with explained_input(entry):
            for content, where in contents:
                n_bytes = -1 if content is None else len(content)
                self._digest.update(n_bytes.to_bytes(8, "little", signed=True))
                self._digest.update(content or b"")
                yield content, where

    def count_damaged(self, where: Callable[[], str], reason: str) -> None:
        """Count a damaged document, or raise.

        Raises:
            UserError: The setting errors is not skip.
        """
        if self._errors != "skip":
            raise UserError(f"{where()}: {reason}; repair it, or omit it with --errors skip")
        self.skipped += 1

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            if self._errors != "replace":
                found = not_utf8(content, error, 0, "--errors replace puts U+FFFD there")
                raise BadDocument(f"expected UTF-8, found {found}") from error
        text = content.decode(errors="replace")
        self.replaced += text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
        return text

    def _text_of(self, line: bytes) -> str:
        try:
            found = json.loads(self._decoded(line.rstrip(b"\r\n")))
        except (ValueError, RecursionError) as error:
            reason = getattr(error, "msg", type(error).__name__).removesuffix(" at")
            column = f" at character {error.pos:,}" if hasattr(error, "pos") else ""
            raise BadDocument(
                f"expected a JSON object, found no JSON ({reason}{column})"
            ) from error
        if not isinstance(found, dict):
            raise BadDocument(f"expected a JSON object, found {_called(found)}")
        if self._field not in found:
            fields = ", ".join(map(repr, list(found)[:5])) or "none"
            raise BadDocument(
                f"expected the field {self._field!r}, found {fields} (--text_field names another)"
            )
        return self._checked(found[self._field])

    def _checked(self, found: Any) -> str:
        if not isinstance(found, str):
            raise BadDocument(
                f"expected a string in the field {self._field!r}, found {_called(found)}"
            )
        text: str = found
        try:
            text.encode()
        except UnicodeEncodeError as error:
            if self._errors != "replace":
                raise BadDocument(
                    f"character {text[error.start]!r} at position {error.start:,} is half of a "
                    "surrogate pair and has no UTF-8 form (--errors replace puts U+FFFD there)"
                ) from error
            before = text.count(REPLACEMENT)
            text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
            self.replaced += text.count(REPLACEMENT) - before
        return text

    def _cell(self, content: bytes | None) -> str:
        if content is None:
            raise BadDocument(f"expected a string in the column {self._field!r}, found null")
        return self._decoded(content)


def _called(found: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(found)) or f"{json.dumps(found)[:40]}"


# ---- contents of files: of each document, and the function that returns its place ---------------

Contents = Iterator[tuple[Any, Callable[[], str]]]


def _whole(entry: Input) -> Contents:
    with open_input(entry) as file:
        content = file.read()
        check_text(content[:HEAD_BYTES], entry.path)
        yield content, functools.partial(str, entry.path)


def _rows(entry: Input, start: int, stop: int | None, column: str) -> Contents:
    import pyarrow as pa

    with open_input(entry) as file:
        table = open_parquet(file, entry)
        groups = range(start, table.num_row_groups if stop is None else stop)
        row = sum(table.metadata.row_group(group).num_rows for group in range(start))
        try:
            for batch in table.iter_batches(BATCH_ROWS, list(groups), [column]):
                for content in bytes_of(batch.column(0)):
                    row += 1
                    where = functools.partial("{}, row {:,}".format, entry.path, row)
                    yield content.as_py(), where
        except (pa.ArrowException, OSError) as error:
            raise damaged(entry, "Parquet", error) from error


def _lines(entry: Input, start: int, stop: int | None) -> Contents:
    with open_input(entry) as file:
        offset = first = _first_line(file, start, stop) if start else 0
        lines = compressed_lines(file, entry) if entry.compression else iter(file.readline, b"")
        number = 0
        while (stop is None or offset < stop) and (line := next(lines, b"")):
            if not offset:
                check_text(line[:HEAD_BYTES], entry.path)
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
