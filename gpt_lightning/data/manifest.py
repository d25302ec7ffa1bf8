"""What a prepared folder holds, and whether it does: manifest.json and the files it lists."""

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gpt_lightning.data.formats import FORMATS, ShardError, file_name, mapped
from gpt_lightning.data.scan import check_tokens
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import write_atomic

MANIFEST = "manifest.json"
VERSION = 1
SCAN_BYTES = 2**30  # up to here all tokens are looked at before training
T = TypeVar("T")
_DIGEST = re.compile(r"(?:[0-9a-f]{64})?")


@dataclass(frozen=True)
class Shard:
    """One file of tokens: its name in the folder, number of tokens, digest of the file.

    The digest is "" where another program made the dataset and gave none.
    """

    file: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class TextOrigin:
    """The text that a dataset was made from: file or corpus name, size, digest."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a prepared folder holds; manifest.json is its only form on disk.

    Attributes:
        tokenizer: spec that tokenizer_from_spec takes.
        vocab_size: number of token ids; every token is below it.
        dtype: of all shards, uint16 or uint32.
        source: the text.
        settings: what else decided the bytes, such as val_fraction.
        splits: split name -> its shards in the order of the text.
        format: of all shard files: npy, nanogpt or llmc.
        version: of the manifest.
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
        """Number of tokens of a split."""
        return sum(shard.tokens for shard in self.splits[split])

    def save(self, folder: Path) -> None:
        """Writes manifest.json atomically; no time stamp, so the same data gives the same bytes."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_atomic(folder / MANIFEST, text.encode())

    @classmethod
    def parse(cls, content: bytes, where: str) -> "Manifest":
        """The manifest in the bytes of a manifest.json.

        Args:
            content: of the file.
            where: its path or address, for complaints.

        Raises:
            UserError: it is broken, or its type is not the one that its vocabulary takes.
        """
        try:
            raw = json.loads(content)
        except ValueError as error:
            raise _bad(where, f"not valid JSON ({error})") from error
        manifest = _parsed(raw, where)
        expected = token_dtype(manifest.vocab_size).name
        if manifest.dtype != expected:
            raise _bad(
                where,
                f"dtype is {manifest.dtype}, but a vocabulary of {manifest.vocab_size:,} takes "
                f"{expected}",
            )
        return manifest

    def check_tokens(self, folder: Path) -> None:
        """Looks at every token.

        Raises:
            UserError: a token is beyond the vocabulary, or a shard cannot be read.
        """
        for shard in self.shards():
            path = folder / shard.file
            try:
                check_tokens(path, shard.tokens, self.dtype, self.vocab_size)
            except (OSError, ShardError) as error:
                raise UserError(f"{path}: {error}; {repair_hint(folder)}") from error

    def shards(self) -> list[Shard]:
        """The shards of all splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    def n_bytes(self) -> int:
        """Bytes of all tokens."""
        return sum(shard.tokens for shard in self.shards()) * np.dtype(self.dtype).itemsize


# ---- the shards --------------------------------------------------------------------------------


def open_shard(folder: Path, shard: Shard, dtype: str, file_format: str) -> np.ndarray:
    """The tokens of a shard, (shard.tokens,), memory-mapped read-only.

    Raises:
        UserError: the file is missing, is not of its format, or differs in type, count or size.
    """
    try:
        return checked_shard(folder, shard, dtype, file_format)
    except ShardError as fault:
        raise UserError(f"{folder / shard.file}: {fault}; {repair_hint(folder)}") from fault


def checked_shard(folder: Path, shard: Shard, dtype: str, file_format: str) -> np.ndarray:
    """As open_shard, for callers who look at all shards before they speak.

    Raises:
        ShardError: what was expected and what was found.
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
    """Names of files that look like shards of the dataset and are not listed in its manifest."""
    listed = {shard.file for shard in manifest.shards()}
    suffix = Path(file_name(manifest.format, "train", 0)).suffix
    return sorted({path.name for path in folder.glob(f"*{suffix}")} - listed)


def repair_hint(folder: Path) -> str:
    """The last words of a complaint: how a damaged dataset becomes a good one."""
    if not (folder / MANIFEST).is_file():
        return "get the file again from where it came, or make it again with the program that did"
    return f"make it again: `gpt-lightning prepare SOURCE --out {folder} --overwrite true`"


# ---- reading the manifest ----------------------------------------------------------------------


def _bad(where: str, found: str) -> UserError:
    if "://" in where:
        return UserError(f"{where}: {found}; make it with `gpt-lightning prepare` and upload it")
    return UserError(f"{where}: {found}; {repair_hint(Path(where).parent)}")


def _parsed(raw: Any, where: str) -> Manifest:
    version = _take(raw, "version", int, where)
    if version != VERSION:
        raise _bad(where, f"format version {version}, this program reads {VERSION}")
    source = _take(raw, "source", dict, where)
    splits = _take(raw, "splits", dict, where)
    if not splits:
        raise _bad(where, "splits is empty, expected at least one")
    return Manifest(
        tokenizer=_take(raw, "tokenizer", dict, where),
        vocab_size=_take(raw, "vocab_size", int, where),
        dtype=_take(raw, "dtype", str, where),
        source=TextOrigin(
            _take(source, "name", str, where),
            _take(source, "bytes", int, where),
            _take(source, "sha256", str, where),
        ),
        settings=_take(raw, "settings", dict, where),
        splits={split: _parsed_shards(splits, split, where) for split in splits},
        format=_parsed_format(raw, where),
    )


def _parsed_format(raw: dict[str, Any], where: str) -> str:
    if "format" not in raw:  # manifests of before there was another
        return "npy"
    found = _take(raw, "format", str, where)
    if found not in FORMATS:
        raise _bad(where, f"format is {found!r}, expected one of {', '.join(FORMATS)}")
    return found


def _parsed_shards(splits: dict[str, Any], split: str, where: str) -> tuple[Shard, ...]:
    shards = tuple(
        Shard(
            _take(entry, "file", str, where),
            _take(entry, "tokens", int, where),
            _take(entry, "sha256", str, where),
        )
        for entry in _take(splits, split, list, where)
    )
    for shard in shards:
        if Path(shard.file).name != shard.file:  # a manifest must not reach outside its folder
            raise _bad(where, f"{shard.file!r} is no plain file name")
        if not _DIGEST.fullmatch(shard.sha256):  # it names files in the cache of remote datasets
            raise _bad(where, f"sha256 of {shard.file} is {shard.sha256!r}, no SHA-256")
    return shards


def _take(raw: Any, key: str, kind: type[T], where: str) -> T:
    value = raw.get(key) if isinstance(raw, dict) else None
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is {value!r}"
        raise _bad(where, f"{key} {found}, expected {kind.__name__}")
    return value
