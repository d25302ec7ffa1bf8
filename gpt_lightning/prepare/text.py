"""One text of any length: read in pieces, and cut into splits by characters."""

import codecs
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from gpt_lightning.data.manifest import Manifest, TextOrigin
from gpt_lightning.data.tokenizers import Tokenizer, train_bpe
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256
from gpt_lightning.output import progress_bar
from gpt_lightning.prepare.documents import Piece
from gpt_lightning.prepare.readers import check_begin
from gpt_lightning.prepare.settings import Settings, split_borders
from gpt_lightning.prepare.sources import ARRAY, OBJECT, Input, head_of
from gpt_lightning.prepare.target import Made, Target, write_extras, write_shards

CHUNK_BYTES = 2**22
PIECE_CHARACTERS = 2**24  # a text of up to 16 Mi characters is tokenized as a whole
TRAINING_CHARACTERS = 2**18  # a tokenizer is trained on pieces of this length
FOR_DOCUMENTS = ("errors", "text_field", "shuffle", "executor")


def prepare_one_text(entry: Input, target: Target, settings: Settings) -> Made:
    """Tokenize a text file into a folder that appears complete or not at all.

    The text is kept as it is: no newline is translated, text that looks like a special token is
    text, and only a byte order mark at its beginning is dropped. It is tokenized in pieces of at
    most 16 Mi characters that end at a newline, so that memory stays below 400 MB besides the
    interpreter for a text of any length.

    Borders of the splits are counted in characters, as nanoGPT does: training text first, then
    validation, then test. A folder that was made from the same text with the same settings is left
    as it is.

    Args:
        entry: Text file, UTF-8.
        target: Output folder.
        settings: Tokenizer, splits and format.

    Returns:
        The manifest, and whether the dataset was made now.

    Raises:
        UserError: The text or the settings make no dataset, the folder holds something else, or
            the disk is full.
    """
    for field in fields(settings):
        if field.name in FOR_DOCUMENTS and getattr(settings, field.name) != field.default:
            fix = "leave it out, or give JSONL, Parquet or a folder of texts"
            raise UserError(f"{entry.label} is one text, and {field.name} is for documents: {fix}")
    head = head_of(entry.path)
    check_begin(head, entry.label)
    is_json = OBJECT.match(head) or ARRAY.match(head)
    if is_json and not entry.label.lower().endswith(".txt"):
        fix = "let its name end in .jsonl (jq -c '.[]' converts an array), or in .txt if it is text"
        raise UserError(f"{entry.label} is not text, it begins as JSON: {fix}")
    with explained("read", entry.label, "give the path of a text file"):
        sha256 = file_sha256(Path(entry.path))
    wanted = settings.of_text() | {"SHA-256 of the text": sha256, "format": settings.format}
    make = partial(_make, entry, sha256, settings)
    return target.make_once(settings, wanted, make)


def _make(entry: Input, sha256: str, settings: Settings, folder: Path) -> Manifest:
    """Write the shards of a text to a folder, and return the manifest."""
    n_characters = 0
    characters: set[str] = set()
    for chunk in _chunks(entry):
        n_characters += len(chunk)
        if settings.tokenizer == "char":
            characters.update(chunk)
    borders = split_borders(n_characters, settings.val_fraction, settings.test_fraction)
    lengths = {split: last - first for split, (first, last) in borders.items()}
    if settings.trains:
        print(f"training {settings.tokenizer} on {lengths['train']:,} characters", flush=True)
        training = pieces(_chunks(entry), {"train": lengths["train"]}, TRAINING_CHARACTERS)
        texts = (piece for _, piece in training)
        tokenizer: Tokenizer = train_bpe(settings.tokenizer, texts)
    else:
        tokenizer = settings.build_tokenizer("".join(characters))
    write_extras(folder, tokenizer, settings)
    longest = min(PIECE_CHARACTERS, tokenizer.max_characters)

    with progress_bar(entry.size) as bar:

        def tokenized(cut: tuple[str, str]) -> Piece:  # a piece of up to 64 MB ends with the call
            split, piece = cut
            n_bytes = len(piece.encode())
            bar.update(n_bytes)
            return split, n_bytes, tokenizer.encode(piece)

        cuts = pieces(_chunks(entry), lengths, longest)
        manifest = write_shards(folder, tokenizer, settings, map(tokenized, cuts))
    if file_sha256(Path(entry.path)) != sha256:
        raise UserError(f"{entry.label}: the file changed while it was read: run prepare again")
    origin = TextOrigin(entry.name, Path(entry.path).stat().st_size, sha256)
    return replace(manifest, source=origin, settings=settings.of_text())


def pieces(chunks: Iterator[str], lengths: dict[str, int], limit: int) -> Iterator[tuple[str, str]]:
    """Cut each split after the last newline of each `limit` characters, else before a space.

    The borders do not depend on the chunks. No token crosses a border; a split of up to `limit`
    characters has no border.

    Args:
        chunks: Text, front to back.
        lengths: Splits in the order of the text, and their numbers of characters.
        limit: Maximum number of characters.
    """
    held = ""
    for split, left in lengths.items():
        while left:
            while len(held) < min(left, limit + 1):
                held += next(chunks)
            end = left
            if left > limit:
                end = held.rfind("\n", 0, limit) + 1 or max(held.rfind(" ", 1, limit), 0) or limit
            piece = held[:end]
            held = held[end:]
            left -= end
            yield split, piece


def _chunks(entry: Input) -> Iterator[str]:
    """Yield the whole text.

    Raises:
        UserError: It is not UTF-8.
    """
    try:
        with open(entry.path, "rb") as file:
            yield from codecs.iterdecode(iter(partial(file.read, CHUNK_BYTES), b""), "utf-8-sig")
    except UnicodeDecodeError as error:
        fix = "convert it with iconv -t utf-8, or drop the bytes with iconv -c -f utf-8 -t utf-8"
        raise UserError(f"{entry.label}, line {_bad_line(entry):,} is not UTF-8: {fix}") from error


def _bad_line(entry: Input) -> int:
    """Return the number of the first line that is not UTF-8."""
    with open(entry.path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0
