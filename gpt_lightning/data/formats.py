"""File formats of tokens: .npy, bare .bin of nanoGPT, llm.c's with a header.

npy: our own and build-nanogpt's, one dimension of uint16 or uint32. nanogpt: uint16 without a
header, one file a split, with the characters of the vocabulary in meta.pkl. llmc: llm.c's and
modded-nanogpt's, 256 int32 (magic, version, number of tokens, zeros), then uint16. All are
little-endian. Sources: data/*/prepare.py in https://github.com/karpathy/nanoGPT,
dev/data/data_common.py in https://github.com/karpathy/llm.c, fineweb.py in
https://github.com/karpathy/build-nanogpt.

A new format changes this file alone: its name in Format, a row of FORMATS, and the pattern of its
files' names in SHARD_FILE.
"""

import functools
import io
import mmap
import os
import pickle
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gpt_lightning.data.tokenizers import Tokenizer
from gpt_lightning.errors import UserError, one_line
from gpt_lightning.files import Fields, check_regular, explained

Format = Literal["npy", "nanogpt", "llmc"]
LLMC_MAGIC, LLMC_VERSION = 20240520, 1
LLMC_MAX_TOKENS = 2**31 - 1  # the header counts in int32
HEAD_BYTES = 1024  # more than any header, and llm.c's own
META = "meta.pkl"


class ShardError(Exception):
    """A file does not hold the expected tokens; the message names what was found."""


class Header(NamedTuple):
    """Content of a file as its header promises it: number of tokens, their type, header bytes."""

    tokens: int
    dtype: np.dtype
    n_bytes: int


@dataclass(frozen=True)
class TokenFormat:
    """One format of files.

    Attributes:
        name: Format string of a file's name, with its split and index.
        foreign: Pattern of the names in other programs, with groups for prefix, split and index;
            a prefix or index may be None.
        write: Function that returns the header of a number of tokens of a type.
        read: Function that returns the header in the first HEAD_BYTES of a file of some size, or
            raises a ShardError; the third argument is the expected type.
        is_one_file: True if a split is one file.
    """

    name: str
    foreign: str
    write: Callable[[str, int], bytes]
    read: Callable[[bytes, int | None, np.dtype], Header]
    is_one_file: bool = False


# ---- headers -----------------------------------------------------------------------------------


def _write_npy(dtype: str, n_tokens: int) -> bytes:
    header = io.BytesIO()
    descr = np.dtype(dtype).newbyteorder("<").str
    fields = {"descr": descr, "fortran_order": False, "shape": (n_tokens,)}
    np.lib.format.write_array_header_1_0(header, fields)
    return header.getvalue()


def _read_npy(head: bytes, size: int | None, expected: np.dtype) -> Header:
    return _parsed_npy(head[: 10 + int.from_bytes(head[8:10], "little")])


@functools.lru_cache(maxsize=64)  # most shards have one length
def _parsed_npy(header: bytes) -> Header:
    stream = io.BytesIO(header)
    try:
        if (version := np.lib.format.read_magic(stream)) != (1, 0):
            raise ValueError(f"version {version} of npy")
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    # Another format or a short header raises ValueError. But numpy parses the header as Python
    # source, and a flipped bit in it raises the errors of tokenize, and others.
    except Exception as error:
        raise ShardError(one_line(error) or type(error).__name__) from error
    if len(shape) != 1:
        raise ShardError(f"an array of shape {shape} of {dtype.name}")
    return Header(shape[0], dtype, stream.tell())


def _read_bare(head: bytes, size: int | None, expected: np.dtype) -> Header:
    """Bare tokens have no magic number: a damaged header must not be taken for tokens."""
    if not size or size % 2:
        raise ShardError(f"{size:,} bytes, {'an odd number' if size else 'an empty file'}")
    if len(head) == HEAD_BYTES:
        magic, version, count = struct.unpack("<3i", head[:12])
        if (version, count) == (LLMC_VERSION, (size - HEAD_BYTES) // 2):
            raise ShardError(f"the magic number {magic} of a header")
    tokens = np.frombuffer(head, "<u2")
    if len(tokens) >= 64 and tokens[::2].any() and not tokens[1::2].any():
        raise ShardError("a 0 at every second place, as in a file of uint32")
    return Header(size // 2, np.dtype("<u2"), 0)


def _write_llmc(dtype: str, n_tokens: int) -> bytes:
    if n_tokens > LLMC_MAX_TOKENS:
        raise UserError(
            f"the format llmc has at most {LLMC_MAX_TOKENS:,} tokens per file, found {n_tokens:,}: "
            "lower shard_tokens"
        )
    return struct.pack("<3i", LLMC_MAGIC, LLMC_VERSION, n_tokens).ljust(HEAD_BYTES, b"\0")


def _read_llmc(head: bytes, size: int | None, expected: np.dtype) -> Header:
    if len(head) < HEAD_BYTES:
        raise ShardError(f"{len(head):,} bytes, fewer than the {HEAD_BYTES:,} of the header")
    magic, version, count = struct.unpack("<3i", head[:12])
    if magic != LLMC_MAGIC:
        bare = "tokens without a header are named train.bin and val.bin"
        raise ShardError(f"the magic number {magic}, not {LLMC_MAGIC} ({bare})")
    if version != LLMC_VERSION or count < 0:
        raise ShardError(f"version {version}, not {LLMC_VERSION}, or {count:,} tokens")
    return Header(count, np.dtype("<u2"), HEAD_BYTES)


FORMATS = {
    # train_00000.npy without a prefix is our own shard, whose manifest is lost
    "npy": TokenFormat(
        "{split}-{index:05d}.npy", r"(.+)_(train|val|test)_([0-9]+)\.npy", _write_npy, _read_npy
    ),
    "llmc": TokenFormat(
        "shard_{split}_{index:06d}.bin",
        r"(?:(.+)_)?(train|val|test)(?:_([0-9]+))?\.bin",
        _write_llmc,
        _read_llmc,
    ),
    "nanogpt": TokenFormat(
        "{split}.bin", r"()(train|val|test)()\.bin", lambda *_: b"", _read_bare, is_one_file=True
    ),
}
# names from file_name, and of the files besides the shards
SHARD_FILE = re.compile(
    r".*\.npy|meta\.pkl|tokenizer\.json|(train|val|test)\.bin|shard_(train|val|test)_\d+\.bin"
)


# ---- files -------------------------------------------------------------------------------------


def file_name(file_format: str, split: str, index: int) -> str:
    """Return the name of a split's shard, as the programs of that format name it."""
    return FORMATS[file_format].name.format(split=split, index=index)


def capacity(file_format: str, shard_tokens: int) -> int:
    """Return the maximum number of tokens per file; nanogpt has one unbounded file per split."""
    return 2**62 if FORMATS[file_format].is_one_file else shard_tokens


@functools.lru_cache(maxsize=64)
def file_header(file_format: str, dtype: str, n_tokens: int) -> bytes:
    """Return the header before n_tokens tokens: 128 bytes for npy, 0 for nanogpt, 1,024 for llmc.

    Raises:
        UserError: The format cannot hold this type or number of tokens.
    """
    if file_format != "npy" and dtype != "uint16":
        raise UserError(
            f"the format {file_format} holds tokens of uint16, but this vocabulary needs {dtype}: "
            "choose the format npy, or a vocabulary of at most 65,536"
        )
    return FORMATS[file_format].write(dtype, n_tokens)


def checked_header(file_format: str, dtype: str, head: bytes, size: int | None) -> Header:
    """Return the header in the first HEAD_BYTES of a file.

    Args:
        file_format: Format of the file.
        dtype: Expected type of the tokens.
        head: First bytes of the file.
        size: Bytes of the file; None if unknown.

    Raises:
        ShardError: The file has another type or size, or is something else.
    """
    expected = np.dtype(dtype).newbyteorder("<")
    header = FORMATS[file_format].read(head, size, expected)
    if header.dtype != expected:
        kind = f"{'big-endian ' * (header.dtype.str[0] == '>')}{header.dtype.name}"
        raise ShardError(f"an array of shape ({header.tokens},) of {kind}")
    promised = header.n_bytes + header.tokens * header.dtype.itemsize
    if size not in (None, promised):
        raise ShardError(f"{size:,} bytes for a header that promises {promised:,}")
    return header


def mapped(path: Path, dtype: str, file_format: str, is_random: bool = False) -> np.ndarray:
    """Map the tokens of a file read-only, (n,); header, size and count are checked.

    Args:
        path: Path of the file.
        dtype: Expected type of the tokens.
        file_format: Format of the file.
        is_random: True if tokens are read here and there: the kernel reads no page ahead.

    Raises:
        OSError: The file cannot be read, which says nothing about its content.
        ShardError: The file is missing or holds something else.
    """
    if path.exists() and not path.is_file():  # reading a pipe or a device may never end
        raise ShardError("no regular file")
    try:
        with open(path, "rb", 0) as file:
            size = os.fstat(file.fileno()).st_size
            header = checked_header(file_format, dtype, file.read(HEAD_BYTES), size)
            if not header.tokens:
                return np.empty(0, header.dtype)
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            if is_random:
                content.madvise(mmap.MADV_RANDOM)
    except FileNotFoundError as error:
        raise ShardError(error.strerror or str(error)) from error
    return np.frombuffer(content, header.dtype, offset=header.n_bytes)


# ---- nanoGPT's vocabulary of characters --------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler of numbers, strings and containers; a pickle that names a class raises an error."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(
            f"it names {module}.{name}, and a pickle that names a class or function can run code"
        )


def read_meta(path: Path) -> str:
    """Return the characters of nanoGPT's meta.pkl in the order of their ids; no code in it runs.

    Raises:
        UserError: The file names a class or function, is damaged, or its vocabulary is not one of
            sorted, distinct characters.
    """
    with explained("read", path):
        check_regular(path, "restore the file, or move it away")
        content = path.read_bytes()
    try:
        meta = _PlainUnpickler(io.BytesIO(content)).load()
        characters = "".join(sorted(meta["stoi"]))
        if meta | _meta(characters) != meta:
            raise ValueError("another vocabulary")
        return characters
    except Exception as error:  # a damaged pickle can raise anything (Python's manual)
        raise UserError(
            f"{path}: expected nanoGPT's vocabulary (vocab_size, stoi, itos of sorted, distinct "
            f"characters), found: {one_line(error) or type(error).__name__}; make it "
            "again with nanoGPT's prepare.py, or remove it if the tokens are GPT-2's"
        ) from error


def _meta(characters: str) -> Fields:
    """Return nanoGPT's meta.pkl of a vocabulary."""
    itos = dict(enumerate(characters))
    return {"vocab_size": len(itos), "itos": itos, "stoi": {c: n for n, c in itos.items()}}


def extras(file_format: str, tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files of a dataset besides the shards, by name: meta.pkl, tokenizer.json.

    nanogpt's meta.pkl holds the vocabulary of characters; the tokenizer gpt2 needs none.

    Raises:
        UserError: The format does not know the tokenizer.
    """
    if file_format == "nanogpt" and tokenizer.name == "gpt2":
        return {}
    spec = tokenizer.spec()
    if file_format != "nanogpt":
        return {"tokenizer.json": spec["json"].encode()} if "json" in spec else {}
    if tokenizer.name != "char":
        raise UserError(
            f"nanoGPT has the tokenizers char and gpt2, not {tokenizer.name}: choose one of "
            "them, or give another format"
        )
    return {META: pickle.dumps(_meta(spec["characters"]), protocol=4)}
