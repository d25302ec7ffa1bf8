"""Datasets of other programs: nanoGPT, llm.c, modded-nanogpt, build-nanogpt."""

import contextlib
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

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
from gpt_lightning.data.manifest import (
    CHECK_READ,
    MANIFEST,
    Manifest,
    Shard,
    TextOrigin,
    repair_hint,
)
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained

GPT2_VOCAB_SIZE = 50257
DTYPE = "uint16"  # all these programs have it
SPLITS = ("train", "val", "test")


def detect_dataset(folder: Path) -> Manifest:
    """Return a manifest for a folder that has none; its shards have no digests.

    nanoGPT's train.bin and val.bin, with meta.pkl for characters; llm.c's and modded-nanogpt's
    *_train_*.bin and *_val_*.bin; build-nanogpt's *_train_*.npy and *_val_*.npy. Without meta.pkl
    the tokens are GPT-2's. Headers, sizes and counts are checked, tokens are not.

    Raises:
        UserError: There are no such files, files of two kinds, a gap in the shards' numbers, or a
            damaged file.
    """
    if folder.is_file():
        raise UserError(f"{folder} is a file; give the folder of a dataset")
    with explained("read", folder, "check its permissions"):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
    sizes: dict[str, int | None] = {path.name: path.stat().st_size for path in entries}
    names = sorted(filter(_match, sizes))
    if not names:
        raise UserError(
            f"{folder} is not a prepared dataset, it has no {MANIFEST} and no shards of nanoGPT, "
            f"llm.c or build-nanogpt: make it with `gpt-lightning prepare SOURCE --out {folder}`"
        )
    suffixes = {Path(row.name).suffix for row in FORMATS.values()}
    for path in entries:
        if path.suffix in suffixes and path.name not in names:
            raise UserError(
                f"{path}: expected shards such as {names[0]}, found this file, whose name is not "
                "that of a shard: move it away"
            )

    def heads(names: Sequence[str]) -> Iterable[bytes]:
        for name in names:
            with explained("read", folder / name, CHECK_READ), open(folder / name, "rb") as file:
                yield file.read(HEAD_BYTES)

    characters = None
    if (folder / META).exists() and not any(map(_numbered, names)):
        characters = read_meta(folder / META)
    return _manifest(str(folder), names, names, sizes, heads, characters, repair_hint(folder))


def remote_dataset(
    url: str, sizes: dict[str, int | None], heads: Callable[[Sequence[str]], Iterable[bytes]]
) -> Manifest:
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
    names = list(filter(_numbered, sorted(filter(_match, sizes))))
    if not names:
        raise UserError(
            f"{url}/{MANIFEST} does not exist, and {url} lists no shards of llm.c, modded-nanogpt "
            "or build-nanogpt (NAME_train_000001.bin, NAME_train_000001.npy): check the address"
        )
    unknown = any(sizes[name] is None for name in names)
    asked = names if unknown else [names[0], names[-1]]
    return _manifest(url, names, asked, sizes, heads, None, "check the address")


# ---- names -------------------------------------------------------------------------------------


def _match(name: str) -> re.Match[str] | None:
    """Return prefix, split and index in a shard's name; None for the name of something else."""
    found = (row.foreign.fullmatch(name) for row in FORMATS.values())
    return next(filter(None, found), None)


def _prefix(name: str) -> str:
    match = _match(name)
    return match[1] or "" if match else ""


def _numbered(name: str) -> bool:
    match = _match(name)
    return match is not None and bool(match[3])


def _in_order(where: str, names: Sequence[str], split: str) -> list[str]:
    """Return a split's files by number; no number between the first and the last may be missing."""
    found = sorted((int(m[3] or -1), m[0]) for m in map(_match, names) if m and m[2] == split)
    for (index, before), (following, after) in itertools.pairwise(found):
        if following != index + 1 or index < 0:
            raise UserError(
                f"{where}: expected the shard after {before}, found {after}; download the missing "
                "shard, or move the others away"
            )
    return [name for _, name in found]


# ---- contents ----------------------------------------------------------------------------------


def _format(name: str, head: bytes, size: int | None) -> str:
    """Return the format of a file: the first of those with such names that reads its header."""
    named = [key for key, row in FORMATS.items() if row.foreign.fullmatch(name)]
    for file_format in named:
        with contextlib.suppress(ShardError):
            checked_header(file_format, DTYPE, head, size)
            return file_format
    return named[-1]


def _manifest(
    where: str,
    names: Sequence[str],
    asked: Sequence[str],
    sizes: dict[str, int | None],
    heads: Callable[[Sequence[str]], Iterable[bytes]],
    characters: str | None,
    hint: str,
) -> Manifest:
    """Return the manifest of files, of which the headers of `asked` are read."""
    prefix, file_format = _prefix(names[0]), ""
    header = Header(0, np.dtype(DTYPE), 0)
    shards, faults = {}, []
    found = dict(zip(asked, heads(asked), strict=True))
    for name in names:
        size = sizes[name]
        try:
            if (_prefix(name), Path(name).suffix) != (prefix, Path(names[0]).suffix):
                raise ShardError(f"another data set or format than in {names[0]}: move one away")
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
        tokenizer, vocab_size = {"name": "char", "characters": characters}, len(characters)
    ordered = {split: _in_order(where, names, split) for split in SPLITS}
    splits = {split: tuple(shards[n] for n in files) for split, files in ordered.items() if files}
    # The folder's name is left out: a moved dataset is still the checkpoint's.
    n_bytes = sum(header.n_bytes + 2 * shard.tokens for shard in shards.values())
    source = TextOrigin(prefix or file_format, n_bytes, "")
    return Manifest(tokenizer, vocab_size, DTYPE, source, {}, splits, file_format)
