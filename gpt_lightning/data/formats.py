"""File formats of tokens: .npy, nanoGPT's bare .bin, and llm.c's .bin with a header.

npy: our own and build-nanogpt's, one dimension of uint16 or uint32. nanogpt: uint16 without a
header, one file a split, with the characters of the vocabulary in meta.pkl. llmc: llm.c's and
modded-nanogpt's, 256 int32 (magic, version, number of tokens, zeros), then uint16. All are
little-endian. Sources: data/*/prepare.py in https://github.com/karpathy/nanoGPT,
dev/data/data_common.py in https://github.com/karpathy/llm.c, fineweb.py in
https://github.com/karpathy/build-nanogpt.

A new format changes this file alone: its name in Format, the names and headers of its files, a
function that maps one, and the files besides the shards. external.py recognizes the folders of
other programs, which have no manifest.
"""

import functools
import io
import mmap
import pickle
import re
import struct
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from gpt_lightning.data.tokenizers import Tokenizer
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, write_atomic

Format = Literal["npy", "nanogpt", "llmc"]
FORMATS: tuple[Format, ...] = get_args(Format)
# names from file_name, and of the files besides the shards
SHARD_FILE = re.compile(r".*\.npy|meta\.pkl|(train|val|test)\.bin|shard_(train|val|test)_\d+\.bin")
LLMC_MAGIC, LLMC_VERSION = 20240520, 1
LLMC_HEADER_BYTES = 1024
LLMC_MAX_TOKENS = 2**31 - 1  # the header counts in int32
# llm.c's other files; as bare tokens their magic is 308 after a token outside GPT-2's 50,257.
OTHER_MAGICS = {
    20240326: "a model of llm.c",
    20240328: "a tokenizer of llm.c",
    20240522: "an evaluation of llm.c",
    20240801: "tokens of Llama 3 in uint32, which this program does not read",
}
META = "meta.pkl"
META_MAX_BYTES = 2**26  # more than Unicode's 1.1 million characters take


class ShardError(Exception):
    """A file does not hold the expected tokens; the message names what was found."""


# ---- names and headers -------------------------------------------------------------------------


def file_name(file_format: str, split: str, index: int) -> str:
    """Return the name of a split's shard, as the programs of that format name it.

    Raises:
        UserError: A second file of a split, of which nanoGPT has one.
    """
    if file_format == "nanogpt":
        if index:
            raise UserError(
                f"nanoGPT reads one file per split, {split}.bin, and the {split} split would fill "
                f"{index + 1}: raise shard_tokens, or choose the format npy or llmc"
            )
        return f"{split}.bin"
    return f"{split}-{index:05d}.npy" if file_format == "npy" else f"shard_{split}_{index:06d}.bin"


def capacity(file_format: str, shard_tokens: int) -> int:
    """Return the maximum number of tokens per file; nanogpt has one unbounded file per split."""
    return 2**62 if file_format == "nanogpt" else shard_tokens


@functools.lru_cache(maxsize=64)  # most shards have one length
def file_header(file_format: str, dtype: str, n_tokens: int) -> bytes:
    """Return the header before n_tokens tokens: 128 bytes for npy, 0 for nanogpt, 1,024 for llmc.

    Raises:
        UserError: The format cannot hold this type or number of tokens.
    """
    if file_format == "npy":
        header = io.BytesIO()
        descr = np.dtype(dtype).newbyteorder("<").str
        fields = {"descr": descr, "fortran_order": False, "shape": (n_tokens,)}
        np.lib.format.write_array_header_1_0(header, fields)
        return header.getvalue()
    if dtype != "uint16":
        raise UserError(
            f"the format {file_format} holds tokens of uint16, but this vocabulary needs {dtype}: "
            "choose the format npy, or a vocabulary of at most 65,536"
        )
    if file_format == "nanogpt":
        return b""
    if n_tokens > LLMC_MAX_TOKENS:
        raise UserError(
            f"the format llmc has at most {LLMC_MAX_TOKENS:,} tokens per file, found {n_tokens:,}: "
            "lower shard_tokens"
        )
    fields_int32 = np.zeros(LLMC_HEADER_BYTES // 4, "<i4")
    fields_int32[:3] = LLMC_MAGIC, LLMC_VERSION, n_tokens
    return fields_int32.tobytes()


# ---- tokens ------------------------------------------------------------------------------------


def mapped(path: Path, dtype: str, file_format: str) -> np.ndarray:
    """Map the tokens of a file read-only, (n,); header, size and count are checked.

    Raises:
        OSError: The file cannot be read, which says nothing about its content.
        ShardError: The file is missing or holds something else.
    """
    reader = {"npy": _map_npy, "nanogpt": _map_bare, "llmc": _map_llmc}[file_format]
    try:
        array = reader(path)
        size, promised = path.stat().st_size, array.offset + array.nbytes
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ShardError(error.strerror or str(error)) from error
    if array.ndim != 1 or array.dtype != np.dtype(dtype).newbyteorder("<"):
        kind = f"{'big-endian ' * (array.dtype.str[0] == '>')}{array.dtype.name}"
        raise ShardError(f"an array of shape {array.shape} of {kind}")
    if size != promised:
        raise ShardError(f"{size:,} bytes for a header that promises {promised:,}")
    return array.view(np.ndarray)  # slicing an ndarray costs a quarter of slicing a memmap


def is_uint32(tokens: np.ndarray) -> bool:
    """Return whether bare tokens, read as uint16, are a file of uint32: every second one is 0."""
    first = tokens[: 2**16]
    return len(first) >= 64 and bool(first[::2].any()) and not first[1::2].any()


def advise_random(tokens: np.ndarray) -> None:
    """Tell the kernel that mapped tokens are read here and there: no page is read ahead."""
    source: Any = tokens
    while isinstance(source, np.ndarray | memoryview):
        source = source.base if isinstance(source, np.ndarray) else source.obj
    if isinstance(source, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):  # absent on Windows
        source.madvise(mmap.MADV_RANDOM)


def _map_npy(path: Path) -> np.memmap[Any, np.dtype[Any]]:
    try:
        return np.lib.format.open_memmap(path, mode="r")  # unlike np.load, it reads no pickles
    except OSError:
        raise
    # Another format, objects or a short header raise ValueError. But numpy parses the header as
    # Python source, and a flipped bit in it raises the errors of tokenize, and others.
    except Exception as error:
        raise ShardError(" ".join(str(error).split()) or type(error).__name__) from error


def _map_bare(path: Path) -> np.memmap[Any, np.dtype[Any]]:
    size = path.stat().st_size
    if not size or size % 2:
        raise ShardError(f"{size:,} bytes, {'an odd number' if size else 'an empty file'}")
    return np.memmap(path, "<u2", mode="r")


def _map_llmc(path: Path) -> np.memmap[Any, np.dtype[Any]]:
    magic, version, count = llmc_header(path)
    if magic != LLMC_MAGIC:
        meaning = f", {OTHER_MAGICS[magic]}" if magic in OTHER_MAGICS else ""
        raise ShardError(f"the magic number {magic}{meaning}, not {LLMC_MAGIC}")
    if version != LLMC_VERSION:
        raise ShardError(f"version {version}, not {LLMC_VERSION}")
    size, promised = path.stat().st_size, LLMC_HEADER_BYTES + 2 * count
    if count < 0 or size != promised:
        raise ShardError(f"{size:,} bytes for a header that promises {promised:,}")
    return np.memmap(path, "<u2", mode="r", offset=LLMC_HEADER_BYTES, shape=(count,))


def llmc_header(path: Path) -> tuple[int, int, int]:
    """Return the first three numbers of a file; in llm.c's: magic, version, number of tokens.

    Raises:
        OSError: The file cannot be read.
        ShardError: The file is shorter than llm.c's header.
    """
    with open(path, "rb") as file:
        return llmc_fields(file.read(LLMC_HEADER_BYTES))


def llmc_fields(header: bytes) -> tuple[int, int, int]:
    """Return the first three numbers of the first 1,024 bytes of a file, as llmc_header does."""
    if len(header) < LLMC_HEADER_BYTES:
        raise ShardError(
            f"{len(header):,} bytes, fewer than the {LLMC_HEADER_BYTES:,} of the header"
        )
    return struct.unpack("<3i", header[:12])


def promised(head: bytes, file_format: str) -> tuple[int, str, int]:
    """Return what the beginning of an npy or llmc file promises: tokens, their type, header bytes.

    Raises:
        ShardError: It is the beginning of something else.
    """
    if file_format == "llmc":
        magic, version, count = llmc_fields(head[:LLMC_HEADER_BYTES])
        if (magic, version) != (LLMC_MAGIC, LLMC_VERSION) or count < 0:
            meaning = f", {OTHER_MAGICS[magic]}" if magic in OTHER_MAGICS else ""
            raise ShardError(f"the magic number {magic}{meaning}, version {version}")
        return count, "uint16", LLMC_HEADER_BYTES
    stream = io.BytesIO(head)
    try:
        np.lib.format.read_magic(stream)
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
        (count,) = shape
    except Exception as error:  # as in _map_npy
        raise ShardError(" ".join(str(error).split()) or type(error).__name__) from error
    return count, dtype.name, stream.tell()


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
        content = path.read_bytes()
    try:
        if len(content) > META_MAX_BYTES:
            raise pickle.UnpicklingError(f"it has {len(content):,} bytes")
        return _characters(_PlainUnpickler(io.BytesIO(content)).load())
    except Exception as error:  # by Python's manual a damaged pickle can raise anything
        raise UserError(
            f"{path}: expected nanoGPT's vocabulary (vocab_size, stoi, itos of sorted, distinct "
            f"characters), found: {' '.join(str(error).split()) or type(error).__name__}; make it "
            "again with nanoGPT's prepare.py, or remove it if the tokens are GPT-2's"
        ) from error


def _characters(meta: Any) -> str:
    if not isinstance(meta, dict) or not isinstance(meta.get("itos"), dict):
        raise ValueError("no itos")
    itos, size = meta["itos"], meta.get("vocab_size")
    if size != len(itos) or sorted(itos) != list(range(len(itos))):
        raise ValueError(f"vocab_size {size} and an itos of {len(itos)} ids")
    characters = [itos[index] for index in range(len(itos))]
    if meta.get("stoi") != {character: index for index, character in enumerate(characters)}:
        raise ValueError("stoi is not the inverse of itos")
    if any(not isinstance(c, str) or len(c) != 1 for c in characters):
        raise ValueError("tokens that are no single characters")
    if characters != sorted(set(characters)):
        raise ValueError("characters that are not sorted")
    return "".join(characters)


def write_extras(file_format: str, folder: Path, tokenizer: Tokenizer) -> None:
    """Write the files that a format needs besides the shards: nanogpt's meta.pkl.

    It holds the vocabulary of characters; the tokenizer gpt2 needs none.

    Raises:
        UserError: The format does not know the tokenizer, or a file cannot be written.
    """
    if file_format != "nanogpt" or tokenizer.name == "gpt2":
        return
    if tokenizer.name != "char":
        raise UserError(
            f"nanoGPT has the tokenizers char and gpt2, not {tokenizer.name}: choose one of "
            "them, or the format npy"
        )
    itos = dict(enumerate(tokenizer.spec()["characters"]))
    stoi = {character: index for index, character in itos.items()}
    meta = {"vocab_size": len(itos), "itos": itos, "stoi": stoi}
    write_atomic(folder / META, pickle.dumps(meta, protocol=4))
