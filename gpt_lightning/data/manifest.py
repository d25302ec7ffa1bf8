"""Contents of a dataset: manifest.json, or what the files of another program say.

Other programs are nanoGPT, llm.c, modded-nanogpt and build-nanogpt.
"""

import contextlib
import dataclasses
import itertools
import json
import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_origin

import numpy as np

from gpt_lightning.data.formats import (
    FORMATS,
    HEAD_BYTES,
    META,
    Header,
    ShardError,
    checked_header,
    read_meta,
)
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, write_atomic

MANIFEST = "manifest.json"
VERSION = 1
# settings in prepare_command, with the values that it leaves out
USUAL = {"tokenizer": "", "val_fraction": 0.1, "test_fraction": 0.0, "text_field": "text"}
USUAL |= {"shuffle": None, "errors": "strict", "shard_tokens": 100_000_000}
USUAL |= {"format": "npy"}
CHECK_READ = "check its permissions and the disk"
GPT2_VOCAB_SIZE = 50257
DTYPE = "uint16"  # of all other programs
Sizes = dict[str, int | None]  # bytes of files by name; None: unknown
Heads = Callable[[Sequence[str]], Iterable[bytes]]  # names -> first HEAD_BYTES of each file
SPLITS = ("train", "val", "test")


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
        text_bytes: Split name -> bytes of its text in UTF-8; empty if they are unknown.
    """

    tokenizer: Fields
    vocab_size: int
    dtype: str
    source: TextOrigin
    settings: Fields
    splits: dict[str, tuple[Shard, ...]]
    format: str = "npy"
    version: int = VERSION
    text_bytes: dict[str, int] = field(default_factory=dict)

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
            return _checked(json.loads(content))
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else error
            fix = repair_hint(Path(where).parent)
            if "://" in where:
                fix = "make it with `gpt-lightning prepare` and upload it"
            raise UserError(f"{where}: {reason}; {fix}") from error

    def shards(self) -> list[Shard]:
        """Return the shards of all splits."""
        return [shard for shards in self.splits.values() for shard in shards]

    def n_bytes(self) -> int:
        """Return the bytes of all tokens."""
        return sum(map(self.tokens, self.splits)) * np.dtype(self.dtype).itemsize


def repair_hint(folder: Path) -> str:
    """Return the repair hint at the end of an error message about a dataset."""
    if not (folder / MANIFEST).is_file():
        return "download the file again, or make it again with the program that made it"
    made = {"tokenizer": "NAME"}  # it is not known if the manifest is damaged
    with contextlib.suppress(OSError, LookupError, TypeError, ValueError):
        raw = json.loads((folder / MANIFEST).read_bytes())
        made = raw["settings"] | {"format": raw["format"]}
        if "json" in raw["tokenizer"] and not made["tokenizer"].startswith("bpe:"):
            made["tokenizer"] = str(folder)
    return f"make it again: {prepare_command('SOURCE', made, str(folder))}"


def prepare_command(source: str, settings: Fields, out: str) -> str:
    """Return the command that replaces a dataset by one of these settings."""
    known = {key: value for key, value in settings.items() if value != USUAL.get(key, value)}
    options = "".join(f" --{key} {shlex.quote(str(value))}" for key, value in known.items())
    return f"`gpt-lightning prepare {source}{options} --out {shlex.quote(out)} --overwrite true`"


# ---- manifest.json -----------------------------------------------------------------------------


def _checked(raw: Any) -> Manifest:
    """Return the manifest in a JSON object.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: It is something else.
    """
    if raw["version"] != VERSION:
        raise ValueError(f"format version {raw['version']}, this program reads {VERSION}")
    splits = {k: tuple(_made(Shard, row) for row in rows) for k, rows in raw["splits"].items()}
    made = {"source": _made(TextOrigin, raw["source"]), "splits": splits}
    found = _made(Manifest, raw | made)
    if not isinstance(found.tokenizer, dict):
        raise TypeError(f"tokenizer is {found.tokenizer}, expected its name and settings")
    if not all(isinstance(n, int) and n >= 0 for n in found.text_bytes.values()):
        raise ValueError(f"text_bytes is {found.text_bytes}, expected numbers from 0")
    if not splits or found.format not in FORMATS:
        raise ValueError(f"splits {list(splits)} of format {found.format!r}")
    for shard in found.shards():
        # a manifest must not reach outside its folder; a digest names a file of the cache
        if Path(shard.file).name != shard.file or not re.fullmatch("([0-9a-f]{64})?", shard.sha256):
            raise ValueError(f"{shard}: expected a file name and a SHA-256")
    expected = token_dtype(found.vocab_size).name
    if found.dtype != expected:
        raise ValueError(
            f"dtype is {found.dtype}, but a vocabulary of {found.vocab_size:,} takes {expected}"
        )
    return found


def _made(kind: type, raw: Fields) -> Any:
    """Return a dataclass of the values in a JSON object, each of its field's type."""
    types: Fields = {field.name: field.type for field in dataclasses.fields(kind)}
    for name, declared in types.items():
        expected: Any = get_origin(declared) or declared
        if not isinstance(raw[name], expected):
            raise TypeError(f"{name} is {raw[name]!r}, expected {expected.__name__}")
    return kind(**{name: raw[name] for name in types})


# ---- files of other programs ---------------------------------------------------------------------


def detect_dataset(folder: Path) -> Manifest:
    """Return a manifest for a folder that has none; its shards have no digests.

    nanoGPT's train.bin and val.bin, with meta.pkl for characters; llm.c's and modded-nanogpt's
    *_train_*.bin and *_val_*.bin; build-nanogpt's *_train_*.npy and *_val_*.npy. Without
    meta.pkl the tokens are GPT-2's. Headers, sizes and counts are checked, tokens are not.

    Raises:
        UserError: There are no such files, files of two kinds, a gap in the shards' numbers, or a
            damaged file.
    """
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a dataset")
    with explained("read", folder, "check its permissions"):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    entries = [path for path in entries if path.is_file()]  # a pipe may never end
    sizes: Sizes = {path.name: path.stat().st_size for path in entries}
    names = list(filter(_match, sizes))
    if not names:
        out = "DIR" if folder.exists() else shlex.quote(str(folder))  # it may hold other files
        raise UserError(
            f"{folder} is not a prepared dataset, it has no {MANIFEST} and no shards of nanoGPT, "
            "llm.c or build-nanogpt: make one with "
            f"`gpt-lightning prepare SOURCE --out {out}`"
        )

    def heads(names: Sequence[str]) -> Iterable[bytes]:
        for name in names:
            with explained("read", folder / name, CHECK_READ), open(folder / name, "rb") as file:
                yield file.read(HEAD_BYTES)

    has_characters = META in sizes and not any(map(_numbered, names))
    characters = read_meta(folder / META) if has_characters else None
    return _detected(str(folder), names, names, sizes, heads, characters, repair_hint(folder))


def remote_dataset(url: str, sizes: Sizes, heads: Heads) -> Manifest:
    """Return a manifest for a URL that has none, as detect_dataset does for a folder.

    Sizes are the listing's, and the first and the last header are compared with them; where the
    listing has no sizes, they are those of all headers. nanoGPT's one file per split is no shard.

    Args:
        url: Address of the dataset.
        sizes: File name -> bytes; None if the listing does not say.
        heads: Function that returns the first HEAD_BYTES of files.

    Raises:
        UserError: There are no such files, files of two kinds, a gap in the shards' numbers, or a
            header of something else.
    """
    names = sorted(filter(_numbered, sizes))
    if not names:
        raise UserError(
            f"{url}/{MANIFEST} does not exist, and {url} lists no shards of llm.c, modded-nanogpt "
            "or build-nanogpt (NAME_train_000001.bin, NAME_train_000001.npy): check the address"
        )
    unknown = any(sizes[name] is None for name in names)
    asked = names if unknown else [names[0], names[-1]]
    return _detected(url, names, asked, sizes, heads, None, "check the address")


def _match(name: str) -> re.Match[str] | None:
    """Return prefix, split and index in a shard's name; None for the name of something else."""
    found = (re.fullmatch(row.foreign, name) for row in FORMATS.values())
    return next(filter(None, found), None)


def _numbered(name: str) -> bool:
    return bool((match := _match(name)) and match[3])


def _detected(
    where: str,
    names: Sequence[str],
    asked: Sequence[str],
    sizes: Sizes,
    heads: Heads,
    characters: str | None,
    hint: str,
) -> Manifest:
    """Return the manifest of files, of which the headers of `asked` are read."""
    matches = {name: match for name in names if (match := _match(name))}
    first, file_format, header = matches[names[0]], "", Header(0, np.dtype(DTYPE), 0)
    shards, faults = {}, []
    found = dict(zip(asked, heads(asked), strict=True))
    for name, match in matches.items():
        size = sizes[name]
        try:
            if (match[1], Path(name).suffix) != (first[1], Path(first[0]).suffix):
                raise ShardError(f"another data set or format than in {first[0]}: move one away")
            if name in found:
                file_format = file_format or _format(name, found[name], size)
                header = checked_header(file_format, DTYPE, found[name], size)
            elif size is not None:
                header = header._replace(tokens=(size - header.n_bytes) // 2)
            promised = header.n_bytes + 2 * header.tokens
            if size not in (None, promised) or header.tokens < 0:
                raise ShardError(f"{size:,} bytes, not {promised:,}")
            shards[name] = Shard(name, header.tokens, "")
        except ShardError as fault:
            faults.append(f"in {name} {fault}")
    if faults:
        raise UserError(
            f"{where}: expected tokens of {DTYPE} in the format {file_format}, found "
            f"{'; '.join(faults)}; {hint}"
        )
    tokenizer, vocab_size = {"name": "gpt2"}, GPT2_VOCAB_SIZE
    if characters is not None:
        tokenizer = {"name": "char", "characters": characters}
        vocab_size = len(characters)
    ordered = {split: _in_order(where, matches.values(), split) for split in SPLITS}
    splits = {split: tuple(shards[n] for n in files) for split, files in ordered.items() if files}
    # The folder's name is left out: a moved dataset is still the checkpoint's.
    n_bytes = sum(header.n_bytes + 2 * shard.tokens for shard in shards.values())
    source = TextOrigin(first[1] or file_format, n_bytes, "")
    return Manifest(tokenizer, vocab_size, DTYPE, source, {}, splits, file_format)


def _format(name: str, head: bytes, size: int | None) -> str:
    """Return the format of a file: the first of those with such names that reads its header."""
    named = [key for key, row in FORMATS.items() if re.fullmatch(row.foreign, name)]
    for file_format in named:
        with contextlib.suppress(ShardError):
            checked_header(file_format, DTYPE, head, size)
            return file_format
    return named[-1]


def _in_order(where: str, matches: Iterable[re.Match[str]], split: str) -> list[str]:
    """Return a split's files by number; no number between the first and the last may be missing."""
    found = sorted((int(match[3] or -1), match[0]) for match in matches if match[2] == split)
    for (index, before), (following, after) in itertools.pairwise(found):
        if following != index + 1 or index < 0:
            raise UserError(
                f"{where}: expected the shard after {before}, found {after}; download the missing "
                "shard, or move the others away"
            )
    return [name for _, name in found]
