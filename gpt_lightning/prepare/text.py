"""One text of any length: read twice, in pieces, and cut into splits by characters."""

import codecs
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from gpt_lightning.data.manifest import Manifest, TextOrigin
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained
from gpt_lightning.prepare.input_file import HEAD_BYTES, check_not_json, check_text, not_utf8
from gpt_lightning.prepare.settings import Errors, Settings, split_borders
from gpt_lightning.prepare.shards import (
    Stream,
    begin_dataset,
    check_size,
    finish_dataset,
    write_split,
)
from gpt_lightning.prepare.target import Target

CHUNK_BYTES = 2**22
PIECE_CHARACTERS = 2**24  # a text of up to 16 Mi characters is tokenized as a whole
REPLACEMENT = "\ufffd"


@dataclass
class Survey:
    """Findings of one pass over a text.

    Attributes:
        n_bytes: Bytes of the file.
        n_characters: Characters of the text.
        replaced: Bytes, or runs of them, that were not UTF-8 and became U+FFFD.
        blank: True if there is only white space.
        characters: Distinct characters, for the tokenizer char.
        sha256: Digest of the file.
    """

    n_bytes: int = 0
    n_characters: int = 0
    replaced: int = 0
    blank: bool = True
    characters: set[str] = field(default_factory=set)
    sha256: str = ""


def decoded(path: Path, errors: Errors, survey: Survey) -> Iterator[str]:
    """Yield the text of a file in chunks, decoded from UTF-8; count them in `survey`.

    Raises:
        UserError: The file cannot be read, or is not UTF-8 and errors is not replace.
    """
    digest, rest, final = hashlib.sha256(), b"", False
    with explained("read", path, "give the path of a text file"), open(path, "rb") as file:
        while not final:
            chunk = file.read(CHUNK_BYTES)
            if not survey.n_bytes:
                check_text(chunk[:HEAD_BYTES], str(path))
            digest.update(chunk)
            final, data = not chunk, rest + chunk
            text, used = _decode(path, data, survey.n_bytes - len(rest), errors, final)
            survey.replaced += text.count(REPLACEMENT) - data[:used].count(REPLACEMENT.encode())
            survey.n_bytes += len(chunk)
            survey.n_characters += len(text)
            survey.blank = survey.blank and (not text or text.isspace())
            rest = data[used:]
            yield text
    survey.sha256 = digest.hexdigest()


def _decode(path: Path, data: bytes, offset: int, errors: Errors, final: bool) -> tuple[str, int]:
    try:
        return codecs.utf_8_decode(data, "replace" if errors == "replace" else "strict", final)
    except UnicodeDecodeError as error:
        fix = (
            "convert it, for example with iconv -t utf-8, or make a dataset of it with "
            f"`gpt-lightning prepare {path} --errors replace`"
        )
        raise UserError(f"{path} is not UTF-8: {not_utf8(data, error, offset, fix)}") from error


def survey_text(path: Path, settings: Settings) -> Survey:
    """Read a text once, in chunks.

    Raises:
        UserError: The file cannot be read, is not UTF-8, is empty or blank, or the settings are for
            documents.
    """
    wrong = {
        "split_by hash": settings.split_by == "hash",
        "errors skip": settings.errors == "skip",
        "shuffle": settings.shuffle is not None,
    }
    for setting in (name for name, given in wrong.items() if given):
        raise UserError(
            f"{path} is one text, and {setting} is for documents: leave it out, or give JSONL, "
            "Parquet or a folder of texts"
        )
    survey = Survey()
    for text in decoded(path, settings.errors, survey):
        if settings.tokenizer == "char":
            survey.characters.update(text)
    if survey.blank:
        found = "only white space" if survey.n_bytes else "empty"
        raise UserError(f"{path} is {found}: give it some text")
    return survey


def pieces(chunks: Iterator[str], limit: int = PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text after the last newline of each `limit` characters, else before a space.

    The borders depend on the text alone, not on its chunks. No token crosses a border; a text of up
    to `limit` characters has no border.
    """
    held = ""
    for chunk in chunks:
        held += chunk
        while len(held) > limit:
            end = held.rfind("\n", 0, limit) + 1 or max(held.rfind(" ", 1, limit), 0) or limit
            piece, held = held[:end], held[end:]
            yield piece
            piece = ""  # free up to 64 MB for the next one
    if held:
        yield held


# ---- from text to shards -------------------------------------------------------------------------


def prepare_one_text(
    source: Path, name: str, target: Target, settings: Settings
) -> tuple[Manifest, bool]:
    """Tokenize a text file into a folder that appears complete or not at all.

    The text is read as bytes and kept as it is: no newline is translated, a byte order mark is a
    character, and text that looks like a special token is text. It is read twice, in pieces of at
    most 16 Mi characters that end at a newline, so that memory stays below 400 MB besides the
    interpreter for a text of any length.

    Borders of the splits are counted in characters, as nanoGPT does: training text first, then
    validation, then test. A folder that was made from the same text with the same settings is left
    as it is.

    Args:
        source: Text file, UTF-8.
        name: Name of the text in the manifest.
        target: Output folder.
        settings: Tokenizer, splits and format.

    Returns:
        The manifest, and whether the dataset was made now.

    Raises:
        UserError: The text or the settings make no dataset, the folder holds something else, or
            the disk is full.
    """
    survey = survey_text(source, settings)
    if not name.lower().endswith(".txt"):
        with source.open("rb") as file:
            check_not_json(file.read(CHUNK_BYTES), str(source))
    origin = TextOrigin(name, survey.n_bytes, survey.sha256)
    target.wanted.update({"SHA-256 of the text": survey.sha256, "format": settings.format})
    target.wanted.update(settings.of_text())
    write = partial(_write, source, survey, origin, settings)
    manifest, made = target.make_once(partial(target.publish, write))
    if made and survey.replaced:
        print(f"{source}: {survey.replaced:,} times bytes that are not UTF-8 became U+FFFD")
    return manifest, made


def _write(
    source: Path, survey: Survey, origin: TextOrigin, settings: Settings, folder: Path
) -> Manifest:
    tokenizer = settings.build_tokenizer("".join(survey.characters))
    if tokenizer.vocab_size < 2:
        raise UserError(
            f"{source} is made of one character, {survey.characters.pop()!r}, which leaves nothing "
            "to predict: give another text"
        )
    begin_dataset(folder, tokenizer, settings)
    borders = split_borders(survey.n_characters, settings.val_fraction, settings.test_fraction)
    again, splits, dtype = Survey(), {}, token_dtype(tokenizer.vocab_size)
    chunks = decoded(source, settings.errors, again)
    text = Stream(chunks)

    def tokens(n_characters: int) -> Iterator[np.ndarray]:
        limit = min(PIECE_CHARACTERS, tokenizer.max_characters)
        with Progress(survey.n_bytes, again.n_bytes) as progress:
            for found in map(tokenizer.encode, pieces(text.take(n_characters), limit)):
                yield found
                progress.reach(again.n_bytes, len(found))

    for split, (first, last) in borders.items():
        shards = write_split(folder, split, dtype, settings, Stream(tokens(last - first)))
        n_tokens = sum(shard.tokens for shard in shards)
        check_size(str(source), split, n_tokens, f"{last - first} characters")
        splits[split] = shards
    for _ in chunks:  # the last, empty chunk completes the digest
        pass
    if again.sha256 != survey.sha256:
        raise UserError(f"{source}: the file changed while it was read: run prepare again")
    return finish_dataset(folder, tokenizer, settings, origin, settings.of_text(), splits)
