"""Tokens on disk: .npy shards, the manifest that vouches for them, and windows out of them."""

import dataclasses
import hashlib
import io
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gpt_lightning.data.files import write_atomic, write_durable
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError

MANIFEST = "manifest.json"
VERSION = 1
T = TypeVar("T")


@dataclass(frozen=True)
class Shard:
    """One .npy file of tokens: its name in the folder, number of tokens, digest of the file."""

    file: str
    tokens: int
    sha256: str


def write_shard(path: Path, tokens: np.ndarray) -> Shard:
    """Writes tokens, (n,) of uint16 or uint32, as a little-endian .npy file, synced to the disk.

    Raises:
        OSError: the disk is full; a part of the file may be left.
    """
    assert tokens.ndim == 1, tokens.shape
    assert tokens.dtype in (np.uint16, np.uint32), tokens.dtype
    tokens = np.ascontiguousarray(tokens, tokens.dtype.newbyteorder("<"))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(tokens))
    # Not np.save: it hides the reason of a failed write, and the digest would need a second pass.
    parts = header.getvalue(), tokens.view(np.uint8).data
    write_durable(path, *parts)
    digest = hashlib.sha256(parts[0])
    digest.update(parts[1])
    return Shard(path.name, len(tokens), digest.hexdigest())


# ---- the manifest ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
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
        version: of this format.
    """

    tokenizer: dict[str, Any]
    vocab_size: int
    dtype: str
    source: Source
    settings: dict[str, Any]
    splits: dict[str, tuple[Shard, ...]]
    version: int = VERSION

    def tokens(self, split: str) -> int:
        """Number of tokens of a split."""
        return sum(shard.tokens for shard in self.splits[split])

    def save(self, folder: Path) -> None:
        """Writes manifest.json atomically; no time stamp, so the same data gives the same bytes."""
        text = json.dumps(dataclasses.asdict(self), indent=2) + "\n"
        write_atomic(folder / MANIFEST, text.encode())

    @classmethod
    def load(cls, folder: Path) -> "Manifest":
        """Reads and checks a prepared folder: all but the tokens themselves.

        Raises:
            UserError: no manifest, a broken one, or shards that are not what it promises; the line
                names the file, what was expected, what was found and the command that mends it.
        """
        path = folder / MANIFEST
        manifest = _parsed(_read_json(path), path)
        expected = token_dtype(manifest.vocab_size).name
        if manifest.dtype != expected:
            raise UserError(
                f"{path}: dtype is {manifest.dtype}, but a vocabulary of "
                f"{manifest.vocab_size:,} takes {expected}; {_mend(folder)}"
            )
        for shard in (shard for shards in manifest.splits.values() for shard in shards):
            open_shard(folder, shard, manifest.dtype)
        _refuse_strangers(folder, manifest)
        return manifest


def open_shard(folder: Path, shard: Shard, dtype: str) -> np.ndarray:
    """The tokens of a shard, (shard.tokens,), memory-mapped read-only.

    Raises:
        UserError: the file is missing, is no .npy file, or differs in type, count or size.
    """
    path = folder / shard.file
    expected = f"{shard.tokens:,} tokens of {dtype}"
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
        size = path.stat().st_size
    except (OSError, EOFError, ValueError) as error:  # the last: a pickle, objects, too short
        found = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise UserError(f"{path}: expected {expected}, found: {found}; {_mend(folder)}") from error
    if not isinstance(array, np.memmap):
        raise UserError(f"{path}: expected {expected}, found an archive; {_mend(folder)}")
    if array.shape != (shard.tokens,) or array.dtype != np.dtype(dtype).newbyteorder("<"):
        found = f"an array of shape {array.shape} of {array.dtype.name}"
        raise UserError(f"{path}: expected {expected}, found {found}; {_mend(folder)}")
    promised = array.offset + array.nbytes
    if size != promised:
        raise UserError(
            f"{path}: expected {promised:,} bytes for {expected}, found {size:,}; {_mend(folder)}"
        )
    return array.view(np.ndarray)  # slices of the plain type cost a quarter of a memmap's


def _refuse_strangers(folder: Path, manifest: Manifest) -> None:
    listed = {shard.file for shards in manifest.splits.values() for shard in shards}
    strangers = sorted({path.name for path in folder.glob("*.npy")} - listed)
    if strangers:
        raise UserError(
            f"{folder / strangers[0]}: expected {len(listed)} shards, found this one besides, "
            f"which the manifest does not list; remove it, or {_mend(folder)}"
        )


def _mend(folder: Path) -> str:
    return f"make it again: `gpt-lightning prepare SOURCE --out {folder} --overwrite true`"


# ---- reading the manifest ----------------------------------------------------------------------


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{path.parent} is no prepared dataset, it has no {MANIFEST}: "
            f"make it with `gpt-lightning prepare SOURCE --out {path.parent}`"
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; check its permissions") from error
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {_mend(path.parent)}") from error


def _parsed(raw: Any, path: Path) -> Manifest:
    version = _take(raw, "version", int, path)
    if version != VERSION:
        raise UserError(
            f"{path}: format version {version}, this program reads {VERSION}; {_mend(path.parent)}"
        )
    source = _take(raw, "source", dict, path)
    splits = _take(raw, "splits", dict, path)
    return Manifest(
        tokenizer=_take(raw, "tokenizer", dict, path),
        vocab_size=_take(raw, "vocab_size", int, path),
        dtype=_take(raw, "dtype", str, path),
        source=Source(
            _take(source, "name", str, path),
            _take(source, "bytes", int, path),
            _take(source, "sha256", str, path),
        ),
        settings=_take(raw, "settings", dict, path),
        splits={split: _parsed_shards(splits, split, path) for split in splits},
    )


def _parsed_shards(splits: dict[str, Any], split: str, path: Path) -> tuple[Shard, ...]:
    shards = tuple(
        Shard(
            _take(entry, "file", str, path),
            _take(entry, "tokens", int, path),
            _take(entry, "sha256", str, path),
        )
        for entry in _take(splits, split, list, path)
    )
    for shard in shards:
        if Path(shard.file).name != shard.file:  # a manifest must not reach outside its folder
            raise UserError(f"{path}: {shard.file!r} is no plain file name; {_mend(path.parent)}")
    return shards


def _take(raw: Any, key: str, kind: type[T], path: Path) -> T:
    value = raw.get(key) if isinstance(raw, dict) else None
    if not isinstance(value, kind):
        found = "is missing" if value is None else f"is {value!r}"
        raise UserError(f"{path}: {key} {found}, expected {kind.__name__}; {_mend(path.parent)}")
    return value


# ---- reading tokens ----------------------------------------------------------------------------


class TokenStream:
    """One split's shards as one sequence of tokens.

    Shards are mapped when they are first read, in the process that reads them: a pickled stream
    (a loader worker under spawn) carries names, not the mapped tokens.

    Args:
        folder: the prepared dataset.
        manifest: of that folder.
        split: train, val or test.
    """

    def __init__(self, folder: Path, manifest: Manifest, split: str) -> None:
        self._folder = folder
        self._dtype = manifest.dtype
        self._vocab_size = manifest.vocab_size
        self._shards = manifest.splits[split]
        counts = np.array([shard.tokens for shard in self._shards], dtype=np.int64)
        self._ends = np.cumsum(counts)  # shard i holds the tokens _ends[i] - counts[i] .. _ends[i]
        self._maps: dict[int, tuple[np.ndarray, int]] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """Windows of tokens, which may cross from one shard into the next.

        Args:
            starts: position of each window's first token in the split, integers, (n,).
            length: tokens a window.

        Returns:
            int64, (n, length).

        Raises:
            IndexError: a window reaches out of the split.
            UserError: a shard changed since it was opened, or holds a token beyond the vocabulary.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if len(starts) and (starts.min() < 0 or starts.max() + length > len(self)):
            raise IndexError(
                f"windows of {length} tokens from {starts.min()} to {starts.max()} "
                f"reach out of the {len(self)} tokens of the split"
            )
        out = np.empty((len(starts), length), dtype=np.int64)
        shards = np.searchsorted(self._ends, starts, side="right")
        for row, start, shard in zip(out, starts.tolist(), shards.tolist(), strict=True):
            self._fill(row, start, shard)
        # A flipped bit leaves type and size as they were, and would reach the embedding.
        if out.max(initial=0) >= self._vocab_size:
            raise UserError(
                f"{self._folder} holds token {out.max()}, expected only tokens below its "
                f"vocabulary of {self._vocab_size:,}; {_mend(self._folder)}"
            )
        return out

    def _fill(self, row: np.ndarray, start: int, shard: int) -> None:
        filled = 0
        while filled < len(row):
            tokens = self._tokens(shard)
            offset = start + filled - (int(self._ends[shard]) - len(tokens))
            part = tokens[offset : offset + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1

    def _tokens(self, index: int) -> np.ndarray:
        path = self._folder / self._shards[index].file
        if index not in self._maps:
            tokens = open_shard(self._folder, self._shards[index], self._dtype)
            self._maps[index] = tokens, path.stat().st_size
        tokens, size = self._maps[index]
        # Reading a mapped page that a truncation took away would kill the process (SIGBUS).
        if os.stat(path).st_size != size:
            raise UserError(f"{path} changed while it was read; {_mend(self._folder)}")
        return tokens
