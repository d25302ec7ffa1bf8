"""Documents out of files: each with its text, and a way to say where it stood."""

import functools
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from gpt_lightning.errors import UserError
from gpt_lightning.prepare.columns import bytes_of, open_parquet
from gpt_lightning.prepare.compressed import decompressed, intact
from gpt_lightning.prepare.inputs import Input, open_input
from gpt_lightning.prepare.settings import Errors

BOM = b"\xef\xbb\xbf"
REPLACEMENT = "\ufffd"
CHUNK_BYTES = 2**20
BATCH_ROWS = 64  # of Parquet, held at a time


class BadDocument(Exception):
    """A document that is none; the message is what was expected and found."""


@dataclass(frozen=True)
class Document:
    """A text, and where it stood: a function, as finding a line's number may take a while."""

    text: str
    where: Callable[[], str]


class Documents:
    """Reads documents and counts what it had to leave out or mend.

    Memory: the longest document a few times, and of a Parquet file the pages of a row group.

    Args:
        text_field: field of a JSON object, column of a Parquet file.
        errors: strict: a damaged document ends the reading. skip: it is left out and counted.
            replace: bytes that are not UTF-8 and halves of surrogate pairs become U+FFFD, counted.
    """

    def __init__(self, text_field: str, errors: Errors) -> None:
        self._field = text_field
        self._errors = errors
        self.skipped = 0
        self.replaced = 0

    def read(self, entry: Input, start: int, stop: int | None) -> Iterator[Document]:
        """The documents of a part of a file, in order.

        Args:
            entry: the file.
            start: jsonl: first byte, parquet: first row group, whose documents are wanted.
            stop: the first that is not; None: the end.

        Raises:
            UserError: the file cannot be read, or a document is damaged and errors is strict.
        """
        if entry.kind == "text":
            yield from self._whole(entry)
        elif entry.kind == "parquet":
            yield from self._rows(entry, start, stop)
        elif entry.compression:
            yield from self._compressed_lines(entry)
        else:
            yield from self._lines(entry, start, stop)

    def refuse(self, where: Callable[[], str], reason: str) -> None:
        """Counts a damaged document, or ends the reading.

        Raises:
            UserError: errors is not skip.
        """
        if self._errors != "skip":
            hint = "" if self._errors == "replace" else ", or leave such out with --errors skip"
            raise UserError(f"{where()}: {reason}; mend it{hint}")
        self.skipped += 1

    # ---- one text a file -------------------------------------------------------------------------

    def _whole(self, entry: Input) -> Iterator[Document]:
        with open_input(entry) as file:
            content = file.read()
        where = functools.partial(str, entry.label)
        try:
            yield Document(self._decoded(content), where)
        except BadDocument as error:
            self.refuse(where, str(error))

    def _decoded(self, content: bytes) -> str:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            if self._errors != "replace":
                raise BadDocument(
                    f"expected UTF-8, found byte 0x{content[error.start]:02x} at offset "
                    f"{error.start:,} (--errors replace puts U+FFFD there)"
                ) from error
        text = content.decode(errors="replace")
        self.replaced += text.count(REPLACEMENT) - content.count(REPLACEMENT.encode())
        return text

    # ---- JSONL -----------------------------------------------------------------------------------

    def _lines(self, entry: Input, start: int, stop: int | None) -> Iterator[Document]:
        with open_input(entry) as file:
            offset = _first_line(file, start, stop) if start else 0
            while stop is None or offset < stop:
                line = file.readline()
                if not line:
                    break
                where = functools.partial(_line_at, entry, offset)
                yield from self._document(line if offset else line.removeprefix(BOM), where)
                offset += len(line)

    def _compressed_lines(self, entry: Input) -> Iterator[Document]:
        with open_input(entry) as file:
            reader = io.BufferedReader(decompressed(file, entry), CHUNK_BYTES)
            for number, line in enumerate(intact(reader, entry), 1):
                where = functools.partial("{}, line {:,}".format, entry.label, number)
                yield from self._document(line if number > 1 else line.removeprefix(BOM), where)

    def _document(self, line: bytes, where: Callable[[], str]) -> Iterator[Document]:
        if not line.strip():
            return
        try:
            text = self._text_of(line)
        except BadDocument as error:
            self.refuse(where, str(error))
        else:
            yield Document(text, where)

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

    # ---- Parquet ---------------------------------------------------------------------------------

    def _rows(self, entry: Input, start: int, stop: int | None) -> Iterator[Document]:
        import pyarrow as pa

        with open_input(entry) as file:
            table = open_parquet(file, entry)
            groups = range(start, table.num_row_groups if stop is None else stop)
            row = sum(table.metadata.row_group(group).num_rows for group in range(start))
            try:
                batches = table.iter_batches(BATCH_ROWS, list(groups), [self._field])
                for batch in batches:
                    for content in bytes_of(batch.column(0)):
                        row += 1
                        where = functools.partial("{}, row {:,}".format, entry.label, row)
                        yield from self._row(content.as_py(), where)
            except (pa.ArrowException, OSError) as error:
                reason = " ".join(str(error).split())
                raise UserError(
                    f"{entry.label}: expected Parquet, found damage ({reason}); get the file again"
                ) from error

    def _row(self, content: bytes | None, where: Callable[[], str]) -> Iterator[Document]:
        try:
            if content is None:
                raise BadDocument(f"expected a string in the column {self._field!r}, found null")
            text = self._decoded(content)
        except BadDocument as error:
            self.refuse(where, str(error))
        else:
            yield Document(text, where)


def _called(found: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", type(None): "null"}
    return names.get(type(found)) or f"{json.dumps(found)[:40]}"


# ---- lines ---------------------------------------------------------------------------------------


def _first_line(file: BinaryIO, start: int, stop: int | None) -> int:
    """Goes to the first line that begins at or after `start`; returns where that is.

    Gives up at `stop`: within a line of many gigabytes it would read for nothing.
    """
    offset = start - 1  # if that byte is a newline, a line begins at `start`
    file.seek(offset)
    while stop is None or offset < stop:
        part = file.readline(CHUNK_BYTES)
        offset += len(part)
        if not part or part.endswith(b"\n"):
            return offset
    return offset


def _line_at(entry: Input, offset: int) -> str:
    """File and number of the line that begins at an offset; reads all before it."""
    number = 1
    with open_input(entry) as file:
        while offset > 0 and (chunk := file.read(min(CHUNK_BYTES, offset))):
            number += chunk.count(b"\n")
            offset -= len(chunk)
    return f"{entry.label}, line {number:,}"
