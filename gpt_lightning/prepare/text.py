"""One text of any length: read twice, in pieces, and cut into splits by characters."""

import codecs
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gpt_lightning.data.formats import capacity, file_name
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.shards import write_stream
from gpt_lightning.data.tokenizers import Tokenizer, token_dtype, train_bpe
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, workspace
from gpt_lightning.output import progress_bar
from gpt_lightning.prepare.documents import begin_dataset, check_size
from gpt_lightning.prepare.readers import REPLACEMENT, check_text, not_utf8
from gpt_lightning.prepare.settings import Errors, Settings, split_borders
from gpt_lightning.prepare.sources import BOM, is_object
from gpt_lightning.prepare.target import Made, Target

CHUNK_BYTES = 2**22
PIECE_CHARACTERS = 2**24  # a text of up to 16 Mi characters is tokenized as a whole
TRAINING_CHARACTERS = 2**18  # a tokenizer is trained on pieces of this length


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
                check_text(chunk, str(path))
            digest.update(chunk)
            final, data = not chunk, rest + chunk
            try:
                text, used = codecs.utf_8_decode(data, errors, final)
            except UnicodeDecodeError as error:
                fix = "convert it with iconv -t utf-8, or run prepare with --errors replace"
                found = not_utf8(data, error, survey.n_bytes - len(rest), fix)
                raise UserError(f"{path} is not UTF-8: {found}") from error
            text = text if survey.n_characters else text.removeprefix("\ufeff")  # byte order mark
            survey.replaced += text.count(REPLACEMENT) - data[:used].count(REPLACEMENT.encode())
            survey.n_bytes += len(chunk)
            survey.n_characters += len(text)
            survey.blank &= not text.strip()
            rest = data[used:]
            yield text
    survey.sha256 = digest.hexdigest()


def _check_not_json(path: Path) -> None:
    """Raise a UserError if the first lines of a text are those of JSONL or of an array."""
    with path.open("rb") as file:
        lines = file.read(CHUNK_BYTES).removeprefix(BOM).split(b"\n", 2)[:2]
    if re.match(rb"\s*\[\s*{", b"".join(lines)) or any(map(is_object, lines)):
        fix = "let its name end in .jsonl (jq -c '.[]' converts an array), or in .txt if it is text"
        raise UserError(f"{path} is no text, it begins as JSON: {fix}")


def survey_text(path: Path, settings: Settings) -> Survey:
    """Read a text once, in chunks.

    Raises:
        UserError: The file cannot be read, is not UTF-8, or is empty or blank.
    """
    survey = Survey()
    for text in decoded(path, settings.errors, survey):
        if settings.tokenizer == "char":
            survey.characters.update(text)
    if survey.blank:
        raise UserError(f"{path} is empty or only white space: give it some text")
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


@dataclass
class Stream:
    """Text or tokens in chunks, handed out by their number.

    Args:
        chunks: Strings, or arrays of one dimension.
    """

    chunks: Iterator[Any]
    _rest: Any = ""

    def more(self) -> bool:
        """Return whether something is left."""
        while self._rest is not None and not len(self._rest):
            self._rest = next(self.chunks, None)
        return self._rest is not None

    def take(self, n: int) -> Iterator[Any]:
        """Yield the next n characters or tokens in chunks; fewer at the end."""
        while n and self.more():
            head, self._rest = self._rest[:n], self._rest[n:]
            n -= len(head)
            yield head


# ---- from text to shards -------------------------------------------------------------------------


def prepare_one_text(source: Path, name: str, target: Target, settings: Settings) -> Made:
    """Tokenize a text file into a folder that appears complete or not at all.

    The text is read as bytes and kept as it is: no newline is translated, text that looks like a
    special token is text, and only a byte order mark at its beginning is dropped. It is read twice,
    in pieces of at most 16 Mi characters that end at a newline, so that memory stays below 400 MB
    besides the interpreter for a text of any length.

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
    for_documents = {
        "split_by": settings.split_by == "hash",
        "errors skip": settings.errors == "skip",
        "text_field": settings.text_field != "text",
        "shuffle": settings.shuffle is not None,
        "executor": settings.executor != "process",
    }
    for setting, given in for_documents.items():
        if given:
            fix = "leave it out, or give JSONL, Parquet or a folder of texts"
            raise UserError(f"{source} is one text, and {setting} is for documents: {fix}")
    survey = survey_text(source, settings)
    if not name.lower().endswith(".txt"):
        _check_not_json(source)
    origin = TextOrigin(name, survey.n_bytes, survey.sha256)
    target.wanted.update({"SHA-256 of the text": survey.sha256, "format": settings.format})
    target.wanted.update(settings.of_text())

    def make() -> Made:
        with workspace(target.out.resolve()) as folder:
            return target.deliver(folder, _write(source, survey, origin, settings, folder / "new"))

    manifest, made = target.make_once(make)
    if made and survey.replaced:
        print(f"{source}: {survey.replaced:,} times bytes that are not UTF-8 became U+FFFD")
    return manifest, made


def _write(
    source: Path, survey: Survey, origin: TextOrigin, settings: Settings, folder: Path
) -> Manifest:
    borders = split_borders(survey.n_characters, settings.val_fraction, settings.test_fraction)
    tokenizer = _tokenizer(source, survey, settings, borders["train"][1])
    if tokenizer.vocab_size < 2:
        raise UserError(f"{source} is made of one character, nothing to predict: give another text")
    begin_dataset(folder, tokenizer, settings)
    again, splits, dtype = Survey(), {}, token_dtype(tokenizer.vocab_size)
    text_bytes = Counter[str]()
    size = capacity(settings.format, settings.shard_tokens)
    chunks = decoded(source, settings.errors, again)
    text = Stream(chunks)

    def tokens(split: str, n_characters: int) -> Iterator[np.ndarray]:
        limit = min(PIECE_CHARACTERS, tokenizer.max_characters)
        with progress_bar(survey.n_bytes, again.n_bytes) as bar:
            for piece in pieces(text.take(n_characters), limit):
                text_bytes[split] += len(piece.encode())
                yield tokenizer.encode(piece)
                bar.update(again.n_bytes - bar.n)

    for split, (first, last) in borders.items():
        stream, shards = Stream(tokens(split, last - first)), list[Shard]()
        while stream.more():
            path = folder / file_name(settings.format, split, len(shards))
            shards.append(write_stream(path, stream.take(size), dtype, settings.format))
        n_tokens = sum(shard.tokens for shard in shards)
        check_size(str(source), split, n_tokens, f"{last - first} characters")
        splits[split] = tuple(shards)
    for _ in chunks:  # the last, empty chunk completes the digest
        pass
    if again.sha256 != survey.sha256:
        raise UserError(f"{source}: the file changed while it was read: run prepare again")
    return Manifest(
        tokenizer=tokenizer.spec(),
        vocab_size=tokenizer.vocab_size,
        dtype=dtype.name,
        source=origin,
        settings=settings.of_text(),
        splits=splits,
        format=settings.format,
        text_bytes=dict(text_bytes),
    )


def _tokenizer(source: Path, survey: Survey, settings: Settings, n_characters: int) -> Tokenizer:
    """Return the tokenizer; one of the text's own is trained on its first characters."""
    if not settings.trains:
        return settings.build_tokenizer("".join(survey.characters))
    print(f"training {settings.tokenizer} on {n_characters:,} characters", flush=True)
    text = Stream(decoded(source, settings.errors, Survey()))
    return train_bpe(settings.tokenizer, pieces(text.take(n_characters), TRAINING_CHARACTERS))
