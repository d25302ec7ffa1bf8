"""Copies of texts that can be read only once, from standard input or a URL."""

import contextlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from gpt_lightning.files import file_sha256
from gpt_lightning.prepare.inputs import (
    Input,
    Kind,
    begins_with_object,
    explained_url,
    is_url,
    kind_of,
    source_name,
)

COPY_BYTES = 2**20


def is_one_text(source: str) -> bool:
    """Return whether a URL is that of one text."""
    found = kind_of(source)
    plain = not any(character in source for character in "*[")
    return is_url(source) and plain and found is not None and found[0] == "text"


def spool(source: str, folder: Path) -> Input:
    """Copy standard input, or a text behind a URL, to a file; distinguish JSONL from one text.

    Args:
        source: - or a URL.
        folder: Folder of the copy.

    Raises:
        UserError: The URL cannot be read.
        OSError: The disk is full.
    """
    path = folder / "text"
    with open(path, "wb") as file, _stream(source) as stream:
        shutil.copyfileobj(stream, file, COPY_BYTES)
    jsonl = source == "-" and begins_with_object(path)
    kind: Kind = "jsonl" if jsonl else "text"
    return Input(str(path), source_name(source), kind, "", path.stat().st_size, file_sha256(path))


@contextlib.contextmanager
def _stream(source: str) -> Iterator[BinaryIO]:
    if source == "-":
        yield sys.stdin.buffer
        return
    with explained_url(source):
        import fsspec

        with fsspec.open(source, "rb") as stream:
            yield stream
