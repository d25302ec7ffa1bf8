"""Datasets of other programs: nanoGPT, llm.c, modded-nanogpt, build-nanogpt."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_lightning.data import formats
from gpt_lightning.data.manifest import (
    CHECK_READ,
    MANIFEST,
    Manifest,
    Shard,
    TextOrigin,
    repair_hint,
)
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained

GPT2_VOCAB_SIZE = 50257
SPLITS = ("train", "val", "test")
_BY_SUFFIX = {".npy": "npy", ".bin": "llmc"}  # formats of shards with a number
# train.bin, tiny_shakespeare_val.bin, fineweb_train_000001.bin, edufineweb_val_000000.npy
_NAME = re.compile(r"(?:(.+)_)?(train|val|test)(?:_(\d+))?\.(bin|npy)", re.ASCII)


@dataclass(frozen=True)
class _File:
    """File whose name is that of a shard.

    Attributes:
        path: Path of the file.
        prefix: Name of the data set, "" for none.
        split: train, val or test.
        index: Number of the shard; None for a split in one file.
    """

    path: Path
    prefix: str
    split: str
    index: int | None


def detect_dataset(folder: Path) -> Manifest:
    """Return a manifest for a folder that has none; its shards have no digests.

    nanoGPT's train.bin and val.bin, with meta.pkl for characters; llm.c's and modded-nanogpt's
    *_train_*.bin and *_val_*.bin; build-nanogpt's *_train_*.npy and *_val_*.npy. Without meta.pkl
    the tokens are GPT-2's. Headers, sizes and counts are checked, tokens are not.

    Raises:
        UserError: There are no such files, files of two kinds, a gap in the shards' numbers, or a
            damaged file.
    """
    files = _files(folder)
    file_format = _one_kind(folder, files, _format)
    tokenizer: dict[str, str] = {"name": "gpt2"}
    vocab_size = GPT2_VOCAB_SIZE
    if file_format == "nanogpt" and (folder / formats.META).exists():
        characters = formats.read_meta(folder / formats.META)
        tokenizer, vocab_size = {"name": "char", "characters": characters}, len(characters)
    dtype = token_dtype(vocab_size).name
    shards = _shards(folder, files, dtype, file_format)
    n_bytes = sum(file.path.stat().st_size for file in files)
    return _manifest(folder, files, shards, n_bytes, dtype, file_format, tokenizer, vocab_size)


def remote_dataset(
    url: str, sizes: dict[str, int | None], read_heads: Callable[[list[str]], list[bytes]]
) -> Manifest:
    """Return a manifest for a URL that has none, as detect_dataset does for a folder.

    Sizes are the listing's, and the first and the last header are compared with them; where the
    listing has no sizes, they are those of all headers. nanoGPT's one file per split is no shard.

    Args:
        url: Address of the dataset.
        sizes: File name -> bytes; None if the listing does not say.
        read_heads: Function that returns the first 1,024 bytes of files.

    Raises:
        UserError: There are no such files, files of two kinds, a gap in the shards' numbers, or a
            header of something else.
    """
    paths = [Path(name) for name in sorted(sizes)]
    files = [file for path in paths if (file := _named(path)) and file.index is not None]
    if not files:
        raise UserError(
            f"{url}/{MANIFEST} does not exist, and {url} lists no shards of llm.c, modded-nanogpt "
            "or build-nanogpt (NAME_train_000001.bin, NAME_train_000001.npy): check the address"
        )
    file_format = _one_kind(Path(url), files, lambda file: _BY_SUFFIX[file.path.suffix])
    dtype = token_dtype(GPT2_VOCAB_SIZE).name
    names = [file.path.name for file in files]
    asked = names if any(sizes[name] is None for name in names) else [names[0], names[-1]]
    shards, n_bytes, header_bytes = {}, 0, 0
    heads = dict(zip(asked, read_heads(asked), strict=True))
    for name in names:
        size = sizes[name]
        try:
            if name in heads:
                count, found, header_bytes = formats.promised(heads[name], file_format)
                if found != dtype:
                    raise formats.ShardError(f"tokens of {found}")
            elif size is not None:
                count = (size - header_bytes) // 2
            if size not in (None, header_bytes + 2 * count) or count < 0:
                raise formats.ShardError(f"{size:,} bytes, a header promises {count:,} tokens")
        except formats.ShardError as fault:
            raise UserError(
                f"{url}/{name}: expected tokens of {dtype} in the format {file_format}, found "
                f"{fault}; check the address"
            ) from fault
        shards[name] = Shard(name, count, "")
        n_bytes += header_bytes + 2 * count
    tokenizer = {"name": "gpt2"}
    return _manifest(
        Path(url), files, shards, n_bytes, dtype, file_format, tokenizer, GPT2_VOCAB_SIZE
    )


def _manifest(
    where: Path,
    files: Sequence[_File],
    shards: dict[str, Shard],
    n_bytes: int,
    dtype: str,
    file_format: str,
    tokenizer: dict[str, str],
    vocab_size: int,
) -> Manifest:
    splits = {
        split: tuple(shards[file.path.name] for file in _in_order(where, files, split))
        for split in SPLITS
        if any(file.split == split for file in files)
    }
    # without the folder's name: a moved dataset is still the one a checkpoint was trained on
    source = TextOrigin(files[0].prefix or file_format, n_bytes, "")
    return Manifest(tokenizer, vocab_size, dtype, source, {}, splits, file_format)


def _named(path: Path) -> _File | None:
    """Return the parts of a shard's name; None if it is the name of something else."""
    match = _NAME.fullmatch(path.name)
    # train_00000.npy without a prefix is our own shard, whose manifest is lost
    if not match or not (match[4] == "bin" or (match[1] and match[3])):
        return None
    return _File(path, match[1] or "", match[2], None if match[3] is None else int(match[3]))


def _files(folder: Path) -> list[_File]:
    with explained("read", folder, "check its permissions"):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a dataset")
    files = [file for path in entries if (file := _named(path))]
    known = {file.path for file in files}
    others = [path for path in entries if path.suffix in _BY_SUFFIX and path not in known]
    if not files:
        raise UserError(
            f"{folder} is not a prepared dataset, it has no {MANIFEST} and no shards of nanoGPT, "
            f"llm.c or build-nanogpt: make it with `gpt-lightning prepare SOURCE --out {folder}`"
        )
    if others:
        raise UserError(
            f"{others[0]}: expected shards such as {files[0].path.name}, found this file, "
            "whose name is not that of a shard: move it away"
        )
    return files


def _one_kind(folder: Path, files: Sequence[_File], kind_of: Callable[[_File], str]) -> str:
    """Return the format of the files, which must belong to one data set."""
    first = files[0]
    first_format = kind_of(first)
    for file in files[1:]:
        if (found := kind_of(file), file.prefix) != (first_format, first.prefix):
            raise UserError(
                f"{folder} holds {first.path.name} ({first_format}) and {file.path.name} "
                f"({found}), expected shards of one data set and one format: move the others away"
            )
    return first_format


def _format(file: _File) -> str:
    if file.path.suffix == ".npy":
        return "npy"
    # Bare tokens have no magic number: a damaged header must not be taken for tokens.
    is_bare = not file.prefix and file.index is None
    try:
        with explained("read", file.path):
            magic, version, count = formats.llmc_header(file.path)
            size = file.path.stat().st_size
    except formats.ShardError as fault:  # too short for a header
        if is_bare:
            return "nanogpt"
        found = str(fault)
    else:
        if magic == formats.LLMC_MAGIC:
            return "llmc"
        n_tokens = (size - formats.LLMC_HEADER_BYTES) // 2
        is_headed = (version, count) == (formats.LLMC_VERSION, n_tokens)
        if is_bare and not is_headed and magic not in formats.OTHER_MAGICS:
            return "nanogpt"
        found = f"{magic}, {formats.OTHER_MAGICS.get(magic, 'which is unknown')}"
    raise UserError(
        f"{file.path}: expected llm.c's magic number {formats.LLMC_MAGIC}, found {found}; download "
        f"the file again, or rename it to {file.split}.bin if it is nanoGPT's, tokens without a "
        "header"
    )


def _in_order(folder: Path, files: Sequence[_File], split: str) -> list[_File]:
    """Return a split's files by number; no number between the first and the last may be missing."""
    chosen = [file for file in files if file.split == split]
    ordered = sorted(chosen, key=lambda file: -1 if file.index is None else file.index)
    for before, after in itertools.pairwise(ordered):
        if before.index is None or after.index != before.index + 1:
            raise UserError(
                f"{folder}: expected the shard after {before.path.name}, found "
                f"{after.path.name}; download the missing shard, or move the others away"
            )
    return ordered


def _shards(folder: Path, files: Sequence[_File], dtype: str, file_format: str) -> dict[str, Shard]:
    """Return file name -> shard; an error names all damaged files, not only the first."""
    shards, faults = {}, []
    for name in (file.path.name for file in files):
        try:
            with explained("read", folder / name, CHECK_READ):
                tokens = formats.mapped(folder / name, dtype, file_format)
            if file_format == "nanogpt" and formats.is_uint32(tokens):
                raise formats.ShardError("a 0 at every second place, as in a file of uint32")
            shards[name] = Shard(name, len(tokens), "")
        except formats.ShardError as fault:
            faults.append(f"in {name} {fault}")
    if faults:
        raise UserError(
            f"{folder}: expected tokens of {dtype} in the format {file_format}, found "
            f"{'; '.join(faults)}; {repair_hint(folder)}"
        )
    return shards
