"""Copies of texts that can be read only once, from standard input or a URL."""

import contextlib
import shutil
import sys
from pathlib import Path

from gpt_lightning.files import file_sha256
from gpt_lightning.prepare.input_file import Input, Kind, is_url, kind_of
from gpt_lightning.prepare.inputs import (
    begins_with_object,
    check_unchanged,
    open_input,
    source_name,
)
from gpt_lightning.prepare.web import explained_url, remote_input

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
    stdin = contextlib.nullcontext(sys.stdin.buffer)
    entry = None
    if source != "-":
        with explained_url(source):
            entry = remote_input(source, "text", "", reached=False)
    with open(path, "wb") as file, open_input(entry) if entry else stdin as stream:
        shutil.copyfileobj(stream, file, COPY_BYTES)
    if entry:
        with explained_url(source):
            check_unchanged(entry)
    jsonl = source == "-" and begins_with_object(path)
    kind: Kind = "jsonl" if jsonl else "text"
    return Input(str(path), source_name(source), kind, "", path.stat().st_size, file_sha256(path))
