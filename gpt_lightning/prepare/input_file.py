"""One file of documents: its kind, and bytes that are no text."""

import json
import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Literal
from urllib.parse import urlsplit

from gpt_lightning.errors import UserError

Kind = Literal["text", "jsonl", "parquet"]
KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = (".gz", ".zst")
DATA_EXTRA = "pip install 'gpt-lightning[data]'"
# first bytes of files that no setting turns into text: name of the format, and what to do
UNPACK = "unpack it, or, if it holds JSONL, let its name end in "
RECODE = "convert it with iconv -f {} -t utf-8"
MAGICS = {
    b"\xff\xfe\x00\x00": ("UTF-32", RECODE.format("utf-32")),
    b"\x00\x00\xfe\xff": ("UTF-32", RECODE.format("utf-32")),
    b"\xff\xfe": ("UTF-16", RECODE.format("utf-16")),
    b"\xfe\xff": ("UTF-16", RECODE.format("utf-16")),
    b"\x1f\x8b": ("gzip", f"{UNPACK}.jsonl.gz"),
    b"\x28\xb5\x2f\xfd": ("zstd", f"{UNPACK}.jsonl.zst"),
    b"PAR1": ("Parquet", "let its name end in .parquet"),
    b"%PDF": ("PDF", "convert it, for example with pdftotext"),
    b"PK\x03\x04": ("zip", "unpack it"),
    b"BZh91AY": ("bzip2", "unpack it"),
    b"\xfd7zXZ\x00": ("xz", "unpack it"),
}
HEAD_BYTES = 4096  # bytes of a text that are examined


@dataclass(frozen=True)
class Input:
    """File of documents.

    Attributes:
        path: Local path or URL.
        name: Name in SOURCE, independent of the folder's place.
        kind: text (one document), jsonl or parquet.
        compression: .gz, .zst or "" (jsonl only).
        size: Bytes, None if the store does not return them.
        stamp: Time of the last change, or a digest; it changes with the content.
        seekable: True if the file can be read from the middle.
    """

    path: str
    name: str
    kind: Kind
    compression: str
    size: int | None
    stamp: str
    seekable: bool = True


def kind_of(path: str) -> tuple[Kind, str] | None:
    """Return kind and compression by a file's name; None for files without documents."""
    name = PurePosixPath(without_host(path)).name.lower()
    compression = next(filter(name.endswith, COMPRESSIONS), "")
    kind = KINDS.get(PurePosixPath(name.removesuffix(compression)).suffix)
    if kind is None or (compression and kind != "jsonl"):
        return None
    return kind, compression


def is_url(source: str) -> bool:
    """Return whether fsspec opens the source, not the operating system."""
    return "://" in source


def without_host(source: str) -> str:
    """Return the part of a URL that names a file. Only http has queries; else a ? is a glob's."""
    if source.startswith(("http://", "https://")):
        return urlsplit(source).path
    return source.split("://", 1)[-1]


def check_text(head: bytes, label: str) -> None:
    """Raise a UserError if the first bytes of a text or JSONL are those of another format.

    In UTF-16 without a byte order mark, half of the bytes of English are NUL.
    """
    for magic, (name, fix) in MAGICS.items():
        if head.startswith(magic):
            raise UserError(f"{label} is no text, it begins as {name}: {fix}")
    head = head[:HEAD_BYTES]
    if 4 * head.count(0) >= len(head) > 0:
        order = RECODE.format("utf-16be" if head.startswith(b"\0") else "utf-16le")
        raise UserError(f"{label} is no UTF-8, it has many NUL bytes: if it is UTF-16, {order}")


def not_utf8(content: bytes, error: UnicodeDecodeError, offset: int, fix: str) -> str:
    """Return which byte is not UTF-8, and what to do.

    Args:
        content: Bytes that were decoded.
        error: Error of the decoding.
        offset: Bytes of the file before them.
        fix: Advice of the message, unless the bytes look like UTF-16.
    """
    if 0 in content:
        fix = f"it has NUL bytes: if it is UTF-16, {RECODE.format('utf-16le')}"
    return f"byte 0x{content[error.start]:02x} at offset {offset + error.start:,}; {fix}"


def is_object(line: bytes) -> bool:
    """Return whether a line is a JSON object."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def check_not_json(head: bytes, label: str) -> None:
    """Raise a UserError if the first lines of a text are those of JSONL or of an array."""
    lines = head.removeprefix(b"\xef\xbb\xbf").split(b"\n", 2)[:2]
    if re.match(rb"\s*\[\s*{", b"".join(lines)) or any(map(is_object, lines)):
        raise UserError(
            f"{label} is no text, it begins as JSON: let the name of JSONL end in .jsonl (of an "
            "array, jq -c '.[]' makes JSONL), or in .txt to train on the JSON itself"
        )


def no_lines(label: str, compression: str) -> UserError:
    """Return the error of a .json that is one JSON value, with the command that converts it."""
    path, first = label.removesuffix(compression), "unpack it, and " if compression else ""
    if is_url(label):
        path, first = PurePosixPath(without_host(path)).name, f"download it, {first}"
    return UserError(
        f"{label}: expected a JSON object on each line, found other JSON: {first}convert it, for "
        f"example an array with jq -c '.[]' {shlex.quote(path)} > documents.jsonl"
    )


def damaged(entry: Input, expected: str, error: Exception) -> UserError:
    """Return the error of an input that is not a whole file of its kind."""
    reason = " ".join(str(error).split())
    return UserError(
        f"{entry.path}: expected {expected}, found damage ({reason}); get the file again"
    )
