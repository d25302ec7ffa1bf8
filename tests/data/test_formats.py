import builtins
import hashlib
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from prepared import llmc_bytes, random_tokens

from gpt_lightning.data import manifest as manifest_module
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.formats import (
    FORMATS,
    file_header,
    file_name,
    mapped,
    read_meta,
    write_extras,
)
from gpt_lightning.data.manifest import Manifest, Shard, TextOrigin
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.tokenizers import ByteTokenizer, CharTokenizer
from gpt_lightning.errors import UserError

VOCAB = 50257
TEXT = "to be, or not to be: that is the question"


def meta_of(characters: str) -> dict[str, Any]:
    return {
        "vocab_size": len(characters),
        "itos": dict(enumerate(characters)),
        "stoi": {c: i for i, c in enumerate(characters)},
    }


# ---- what we write -----------------------------------------------------------------------------


@pytest.mark.parametrize("file_format", FORMATS)
@pytest.mark.parametrize("n_tokens", [1, 511, 512, 70_000])
def test_header_and_tokens_come_back(file_format: str, n_tokens: int, tmp_path: Path) -> None:
    tokens = random_tokens(n_tokens)
    path = tmp_path / file_name(file_format, "train", 0)
    path.write_bytes(file_header(file_format, "uint16", n_tokens) + tokens.tobytes())
    found = mapped(path, "uint16", file_format)
    np.testing.assert_array_equal(found, tokens)
    assert not found.flags.writeable


def test_other_programs_read_what_we_write(tmp_path: Path) -> None:
    tokens = random_tokens(1000)
    assert file_header("llmc", "uint16", 1000) + tokens.tobytes() == llmc_bytes(tokens)
    assert file_header("nanogpt", "uint16", 1000) == b""
    for dtype in ("uint16", "uint32"):
        path = tmp_path / f"{dtype}.npy"
        path.write_bytes(file_header("npy", dtype, 1000) + tokens.astype(dtype).tobytes())
        np.testing.assert_array_equal(np.load(path), tokens.astype(dtype))
        np.save(tmp_path / "numpys", tokens.astype(dtype))
        assert path.read_bytes() == (tmp_path / "numpys.npy").read_bytes()


@pytest.mark.parametrize("file_format", ["nanogpt", "llmc"])
def test_formats_of_uint16_refuse_uint32(file_format: str) -> None:
    with pytest.raises(UserError, match=r"uint16.*uint32.*npy"):
        file_header(file_format, "uint32", 5)


def test_limits_of_the_formats() -> None:
    assert len(file_header("llmc", "uint16", 2**31 - 1)) == 1024
    with pytest.raises(UserError, match="2,147,483,648: lower shard_tokens"):
        file_header("llmc", "uint16", 2**31)
    with pytest.raises(UserError, match=r"train\.bin.*fill 2"):
        file_name("nanogpt", "train", 1)


def test_meta_is_nanogpts(tmp_path: Path) -> None:
    characters = "".join(sorted(set(TEXT + "\n\u00e9\U0001f600")))
    write_extras("nanogpt", tmp_path, CharTokenizer(characters))
    with open(tmp_path / "meta.pkl", "rb") as file:
        assert pickle.load(file) == meta_of(characters)
    assert read_meta(tmp_path / "meta.pkl") == characters
    with pytest.raises(UserError, match="char and gpt2, not byte"):
        write_extras("nanogpt", tmp_path, ByteTokenizer())


@pytest.mark.parametrize("file_format", FORMATS)
def test_gpt2s_vocabulary_needs_no_file_beside_the_shards(file_format: str, tmp_path: Path) -> None:
    write_extras(file_format, tmp_path, SimpleNamespace(name="gpt2"))  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


# ---- other formats with our manifest -----------------------------------------------------------

ALTERED: dict[str, Callable[[bytes], bytes]] = {
    "odd truncation": lambda content: content[:-1],
    "even truncation": lambda content: content[:-2],
    "grown": lambda content: content + b"00",
    "magic": lambda content: llmc_bytes(random_tokens(100), magic=1),
    "version": lambda content: llmc_bytes(random_tokens(100), version=2),
    "count": lambda content: llmc_bytes(random_tokens(99)),
    "empty": lambda content: b"",
}


@pytest.mark.parametrize("file_format", ["nanogpt", "llmc"])
@pytest.mark.parametrize("kind", ALTERED)
def test_damage_beside_our_manifest(file_format: str, kind: str, tmp_path: Path) -> None:
    name = file_name(file_format, "train", 0)
    content = file_header(file_format, "uint16", 100) + random_tokens(100).tobytes()
    (tmp_path / name).write_bytes(content)
    shard = Shard(name, 100, hashlib.sha256(content).hexdigest())
    splits = {"train": (shard,)}
    source = TextOrigin("s", 1, "0")
    Manifest({"name": "gpt2"}, VOCAB, "uint16", source, {}, splits, file_format).save(tmp_path)
    stream = TokenStream(tmp_path, load_manifest(tmp_path), "train")
    assert stream.windows(np.array([0]), 100).tolist() == [random_tokens(100).tolist()]
    (tmp_path / name).write_bytes(ALTERED[kind](content))
    with pytest.raises(UserError, match=r"expected 100 tokens of uint16, found.*prepare") as caught:
        load_manifest(tmp_path)
    assert name in str(caught.value)


# ---- pickles -----------------------------------------------------------------------------------


class Runs:
    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.args


PICKLES: dict[str, Callable[[Path], bytes]] = {
    "os.system": lambda p: pickle.dumps(Runs(os.system, f"touch {p}")),
    "eval": lambda p: pickle.dumps(
        meta_of("ab") | {"x": Runs(builtins.eval, f"open({str(p)!r},'w')")}
    ),
    "numpy": lambda p: pickle.dumps(meta_of("ab") | {"vocab_size": np.int64(2)}),
    "old protocol": lambda p: pickle.dumps(Runs(os.mkdir, str(p)), protocol=0),
    "empty": lambda p: b"",
    "cut": lambda p: pickle.dumps(meta_of(TEXT))[:30],
    "huge promise": lambda p: b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "list": lambda p: pickle.dumps([1, 2]),
    "no stoi": lambda p: pickle.dumps({"vocab_size": 1, "itos": {0: "a"}}),
    "gap": lambda p: pickle.dumps(meta_of("ab") | {"itos": {0: "a", 2: "b"}}),
    "size": lambda p: pickle.dumps(meta_of("ab") | {"vocab_size": 3}),
    "unsorted": lambda p: pickle.dumps(meta_of("ba")),
    "words": lambda p: pickle.dumps(meta_of(["be", "to"])),  # type: ignore[arg-type]
    "numbers": lambda p: pickle.dumps(meta_of([7])),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", PICKLES)
def test_a_pickle_runs_nothing_and_is_refused(kind: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    np.array([0, 1, 0], dtype=np.uint16).tofile(tmp_path / "train.bin")
    (tmp_path / "meta.pkl").write_bytes(PICKLES[kind](marker))
    with pytest.raises(UserError, match=r"meta\.pkl: expected") as caught:
        load_manifest(tmp_path)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.slow
def test_every_cut_and_flip_of_a_pickle_is_a_clear_line_or_the_same(tmp_path: Path) -> None:
    path = tmp_path / "meta.pkl"
    whole = pickle.dumps(meta_of("abc"))
    damaged = [whole[:n] for n in range(len(whole))]
    damaged += [
        whole[:n] + bytes([whole[n] ^ (1 << bit)]) + whole[n + 1 :]
        for n in range(len(whole))
        for bit in range(8)
    ]
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            assert len(read_meta(path)) == 3  # other characters, but a vocabulary
        except UserError:
            refused += 1
    assert refused > len(damaged) * 0.8


def test_the_package_trusts_no_pickle() -> None:
    package = Path(manifest_module.__file__).parents[1]
    for path in package.rglob("*.py"):
        source = path.read_text()
        assert "allow_pickle=True" not in source, path
        assert "pickle.load" not in source, path
