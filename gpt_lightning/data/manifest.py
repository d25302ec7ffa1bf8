"""manifest.json: contents of a prepared folder, and checks of the files that it lists."""

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_origin, get_type_hints

import numpy as np

from gpt_lightning.data.formats import FORMATS, ShardError, file_name, mapped
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, write_atomic

if TYPE_CHECKING:
    from gpt_lightning.data.progress import Progress

MANIFEST = "manifest.json"
VERSION = 1
PIECE_BYTES = 2**22  # a whole number of tokens of either type
CHECK_READ = "check its permissions and the disk"
SCAN_BYTES = 2**30  # up to this size every token is checked before training
T = TypeVar("T")
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")


@dataclass(frozen=True)
class Shard:
    """One file of tokens: its name in the folder, its number of tokens, its digest.

    The digest is "" if another program made the dataset.
    """

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class TextOrigin:
    """Text that a dataset was made from: file or corpus name, size, digest."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Contents of a prepared folder; manifest.json is its only form on disk.

    Attributes:
        tokenizer: Spec for tokenizer_from_spec.
        vocab_size: Number of token ids; every token is below it.
        dtype: Type of the tokens in all shards, uint16 or uint32.
        source: Text that the dataset was made from.
        settings: Further settings that decided the bytes, such as val_fraction.
        splits: Split name -> its shards in the order of the text.
        format: Format of all shard files: npy, nanogpt or llmc.
        version: Version of the manifest's format.
    """

    tokenizer: dict[str, Any]
    vocab_size: int
    dtype: str
    source: TextOrigin
    settings: dict[str, Any]
    splits: dict[str, tuple[Shard, ...]]
    format: str = "npy"
    version: int = VERSION

    def tokens(self, split: str) -> int:
        """Return the number of tokens of a split."""
        return sum(shard.tokens for shard in self.splits[split])

    def save(self, folder: Path) -> None:
        """Write manifest.json atomically, without a time stamp: equal data give equal bytes."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_atomic(folder / MANIFEST, text.encode())

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Manifest":
        """Return the manifest in the bytes of a manifest.json.

        Args:
            content: Bytes of the file.
            where: Path or address of the file, for error messages.

        Raises:
            UserError: The file is broken, or its dtype is not that of its vocabulary.
        """
        try:
            raw = json.loads(content)
        except ValueError as error:
            raise _bad(where, f"not valid JSON ({error})") from error
        version = _take(raw, "version", int, where)
        if version != VERSION:
            raise _bad(where, f"format version {version}, this program reads {VERSION}")
        values = _fields(cls, raw, where)
        if not values["splits"]:
            raise _bad(where, "splits is empty, expected at least one")
        if values["format"] not in FORMATS:
            known = ", ".join(FORMATS)
            raise _bad(where, f"format is {values['format']!r}, expected one of {known}")
        dtype, vocab_size = values["dtype"], values["vocab_size"]
        expected = token_dtype(vocab_size).name
        if dtype != expected:
            found = f"dtype is {dtype}, but a vocabulary of {vocab_size:,} takes {expected}"
            raise _bad(where, found)
        values["source"] = TextOrigin(**_fields(TextOrigin, values["source"], where))
        splits = values["splits"]
        values["splits"] = {split: _parsed_shards(splits, split, where) for split in splits}
        return cls(**values)

    def shards(self) -> list[Shard]:
        """Return the shards of all splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    def n_bytes(self) -> int:
        """Return the bytes of all tokens."""
        return sum(shard.tokens for shard in self.shards()) * np.dtype(self.dtype).itemsize


# ---- the shards --------------------------------------------------------------------------------


def open_shard(folder: Path, shard: Shard, dtype: str, file_format: str) -> np.ndarray:
    """Map the tokens of a shard read-only, (shard.tokens,).

    Raises:
        UserError: The file is missing, cannot be read, has another format, or differs in type,
            count or size.
    """
    try:
        with explained("read", folder / shard.file, CHECK_READ):
            return checked_shard(folder, shard, dtype, file_format)
    except ShardError as fault:
        raise UserError(f"{folder / shard.file}: {fault}; {repair_hint(folder)}") from fault


def checked_shard(folder: Path, shard: Shard, dtype: str, file_format: str) -> np.ndarray:
    """Map a shard as open_shard does, for callers that collect the faults of all shards.

    Raises:
        OSError: The file cannot be read.
        ShardError: The file is not the shard; the message names what was expected and found.
    """
    expected = f"expected {shard.tokens:,} tokens of {dtype}"
    try:
        tokens = mapped(folder / shard.file, dtype, file_format)
    except ShardError as fault:
        raise ShardError(f"{expected}, found: {fault}") from fault
    if len(tokens) != shard.tokens:
        raise ShardError(f"{expected}, found an array of shape {tokens.shape} of {dtype}")
    return tokens


def unlisted_files(folder: Path, manifest: Manifest) -> list[str]:
    """Return files that are named as shards of the dataset but are not in its manifest."""
    listed = {shard.file for shard in manifest.shards()}
    suffix = Path(file_name(manifest.format, "train", 0)).suffix
    return sorted({path.name for path in folder.glob(f"*{suffix}")} - listed)


def repair_hint(folder: Path) -> str:
    """Return the repair hint at the end of an error message about a dataset."""
    if not (folder / MANIFEST).is_file():
        return "download the file again, or make it again with the program that made it"
    return f"make it again: `gpt-lightning prepare SOURCE --out {folder} --overwrite true`"


# ---- reading a shard from front to back, in bounded memory ---------------------------------------


def pieces(path: Path, token_bytes: int) -> Iterator[memoryview]:
    """Yield a shard's bytes: first the header before the tokens, then the tokens in pieces.

    The pieces share one buffer of 4 MiB: each is valid until the next is requested. The file is
    read, not mapped, so that a truncation meanwhile raises an error instead of a signal.

    Args:
        path: Path of the shard.
        token_bytes: Bytes of its tokens, which are the end of the file.

    Raises:
        OSError: The file cannot be read.
        ShardError: The file became shorter.
    """
    buffer = memoryview(bytearray(PIECE_BYTES))
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        yield memoryview(file.read(max(0, size - token_bytes)))
        left = token_bytes
        while left:
            count = file.readinto(buffer[: min(left, PIECE_BYTES)])
            if not count or (count % 4 and count < left):
                raise ShardError(
                    f"{token_bytes - left + count:,} bytes of tokens: it was truncated"
                )
            yield buffer[:count]
            left -= count


def token_pieces(path: Path, n_tokens: int, dtype: str) -> Iterator[np.ndarray]:
    """Yield a shard's tokens in pieces, (n,) each; a piece is valid until the next is requested.

    Raises:
        OSError: The file cannot be read.
        ShardError: The file became shorter.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    stream = pieces(path, n_tokens * kind.itemsize)
    next(stream)
    for piece in stream:
        yield np.frombuffer(piece, kind)


def check_tokens(
    folder: Path, shard: Shard, manifest: Manifest, progress: "Progress | None" = None
) -> None:
    """Read a shard once, and check that every token is inside the vocabulary.

    Args:
        folder: Folder of the dataset.
        shard: Shard to read.
        manifest: Manifest of the dataset.
        progress: Display that counts the tokens of a full check, which also compares the digest of
            the file; None: the tokens alone are checked.

    Raises:
        OSError: The file cannot be read.
        ShardError: A token is not below vocab_size, the digest differs, or the file became shorter.
    """
    kind = np.dtype(manifest.dtype).newbyteorder("<")
    stream = pieces(folder / shard.file, shard.tokens * kind.itemsize)
    digest = hashlib.sha256(next(stream))
    position, wrong = 0, ""
    for piece in stream:
        tokens = np.frombuffer(piece, kind)
        if not wrong and int(tokens.max()) >= manifest.vocab_size:
            at = int(np.argmax(tokens >= manifest.vocab_size))
            wrong = (
                f"expected only tokens below the vocabulary of {manifest.vocab_size:,}, "
                f"found token {tokens[at]:,} at position {position + at:,}"
            )
        position += len(tokens)
        if progress:
            digest.update(piece)
            progress.add(len(piece), len(tokens))
    if wrong:
        raise ShardError(wrong)
    if progress and shard.sha256 and digest.hexdigest() != shard.sha256:
        raise ShardError(f"expected SHA-256 {shard.sha256}, found {digest.hexdigest()}")


# ---- reading the manifest ----------------------------------------------------------------------


def _bad(where: str, found: str) -> UserError:
    if "://" in where:
        return UserError(f"{where}: {found}; make it with `gpt-lightning prepare` and upload it")
    return UserError(f"{where}: {found}; {repair_hint(Path(where).parent)}")


def _fields(kind: type, raw: Any, where: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields in a JSON object, each of its field's type."""
    return {key: _take(raw, key, of, where) for key, of in _types(kind).items()}


@functools.cache
def _types(kind: type) -> dict[str, Any]:
    hints = {key: get_origin(hint) or hint for key, hint in get_type_hints(kind).items()}
    return {key: dict if is_dataclass(hint) else hint for key, hint in hints.items()}


def _parsed_shards(splits: dict[str, Any], split: str, where: str) -> tuple[Shard, ...]:
    shards = tuple(
        Shard(**_fields(Shard, entry, where)) for entry in _take(splits, split, list, where)
    )
    for shard in shards:
        if Path(shard.file).name != shard.file:  # a manifest must not reach outside its folder
            raise _bad(where, f"{shard.file!r} is not a plain file name")
        if not _DIGEST.fullmatch(shard.sha256):  # it names files in the cache of remote datasets
            raise _bad(where, f"sha256 of {shard.file} is {shard.sha256!r}, not a SHA-256")
    return shards


def _take(raw: Any, key: str, kind: type[T], where: str) -> T:
    value = raw.get(key) if isinstance(raw, dict) else None
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is {value!r}"
        raise _bad(where, f"{key} {found}, expected {kind.__name__}")
    return value
