import builtins
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import llmc_bytes, random_tokens

from gpt_lightning.data import manifest as manifest_module
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.formats import FORMATS, extras, file_header, file_name, mapped, read_meta
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.tokenizers import (
    ByteTokenizer,
    CharTokenizer,
    build_tokenizer,
    tokenizer_from_spec,
)
from gpt_lightning.errors import UserError

VOCAB = 50257
TEXT = "to be, or not to be: that is the question"


def meta_of(characters: str) -> dict[str, Any]:
    itos = dict(enumerate(characters))
    return {"vocab_size": len(itos), "itos": itos, "stoi": {c: i for i, c in itos.items()}}


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


def test_meta_is_nanogpts(tmp_path: Path) -> None:
    characters = "".join(sorted(set(TEXT + "\n\u00e9\U0001f600")))
    (tmp_path / "meta.pkl").write_bytes(extras("nanogpt", CharTokenizer(characters))["meta.pkl"])
    with open(tmp_path / "meta.pkl", "rb") as file:
        assert pickle.load(file) == meta_of(characters)
    assert read_meta(tmp_path / "meta.pkl") == characters
    with pytest.raises(UserError, match="char and gpt2, not byte"):
        extras("nanogpt", ByteTokenizer())
    for file_format in FORMATS:  # GPT-2's vocabulary needs no file beside the shards
        assert not extras(file_format, build_tokenizer("gpt2"))


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


def test_the_package_trusts_no_pickle() -> None:
    package = Path(manifest_module.__file__).parents[1]
    for path in package.rglob("*.py"):
        source = path.read_text()
        assert "allow_pickle=True" not in source, path
        assert "pickle.load" not in source, path


# ---- datasets of other programs ------------------------------------------------------------------

# ---- the other programs, by hand ---------------------------------------------------------------


def nanogpt(folder: Path, splits: dict[str, np.ndarray]) -> None:
    for split, tokens in splits.items():
        tokens.astype(np.uint16).tofile(folder / f"{split}.bin")


def llmc(folder: Path, splits: dict[str, np.ndarray]) -> None:
    for split, tokens in splits.items():
        (folder / f"tiny_shakespeare_{split}.bin").write_bytes(llmc_bytes(tokens))


def modded(folder: Path, splits: dict[str, np.ndarray]) -> None:
    (folder / "fineweb_val_000000.bin").write_bytes(llmc_bytes(splits["val"]))
    for index, part in enumerate(np.array_split(splits["train"], 12), start=1):
        (folder / f"fineweb_train_{index:06d}.bin").write_bytes(llmc_bytes(part))


def build_nanogpt(folder: Path, splits: dict[str, np.ndarray]) -> None:
    np.save(folder / "edufineweb_val_000000", splits["val"])
    for index, part in enumerate(np.array_split(splits["train"], 12), start=1):
        np.save(folder / f"edufineweb_train_{index:06d}", part)


PROGRAMS = {"nanogpt": nanogpt, "llmc": llmc, "modded": modded, "build-nanogpt": build_nanogpt}


def read_back(folder: Path) -> dict[str, np.ndarray]:
    manifest = load_manifest(folder)
    streams = {split: TokenStream(folder, manifest, split) for split in manifest.splits}
    return {split: s.windows(np.array([0]), len(s))[0] for split, s in streams.items()}


@pytest.mark.parametrize("program", PROGRAMS)
def test_what_another_program_wrote_comes_back(program: str, tmp_path: Path) -> None:
    splits = {"train": random_tokens(5000), "val": random_tokens(700, seed=1)}
    PROGRAMS[program](tmp_path, splits)
    (tmp_path / "readme.md").write_text("files of other kinds do not matter")
    found = read_back(tmp_path)
    assert list(found) == ["train", "val"]
    for split, tokens in splits.items():
        np.testing.assert_array_equal(found[split], tokens)
    manifest = load_manifest(tmp_path)
    assert (manifest.tokenizer, manifest.vocab_size) == ({"name": "gpt2"}, VOCAB)
    assert {shard.sha256 for shard in manifest.shards()} == {""}


def test_a_dataset_that_was_moved_is_the_same(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        modded(tmp_path / name, {"train": random_tokens(600), "val": random_tokens(50)})
    assert load_manifest(tmp_path / "here") == load_manifest(tmp_path / "there")


def test_nanogpts_characters(tmp_path: Path) -> None:
    characters = "".join(sorted(set(TEXT)))
    nanogpt(tmp_path, {"train": np.array([characters.index(c) for c in TEXT])})
    (tmp_path / "meta.pkl").write_bytes(extras("nanogpt", CharTokenizer(characters))["meta.pkl"])
    manifest = load_manifest(tmp_path)
    assert manifest.vocab_size == len(characters)
    tokenizer = tokenizer_from_spec(manifest.tokenizer)
    assert tokenizer.decode(read_back(tmp_path)["train"]) == TEXT


# ---- what is refused ---------------------------------------------------------------------------


def swap(name: str, content: bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(content)


def rename(old: str, new: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / old).rename(folder / new)


T2, T3 = "fineweb_train_000002.bin", "fineweb_train_000003.bin"
GOOD = llmc_bytes(random_tokens(50))
LLMC_DAMAGE: dict[str, Callable[[Path], Any]] = {
    "odd truncation": swap(T2, GOOD[:-1]),
    "even truncation": swap(T2, GOOD[:-2]),
    "grown": swap(T2, GOOD + b"00"),
    "short header": swap(T2, GOOD[:1000]),
    "empty": swap(T2, b""),
    "wrong magic": swap(T2, llmc_bytes(random_tokens(50), magic=7)),
    "llama 3": swap(T2, llmc_bytes(random_tokens(50), magic=20240801)),
    "version": swap(T2, llmc_bytes(random_tokens(50), version=2)),
    "count": swap(T2, llmc_bytes(random_tokens(50), count=51)),
    "negative count": swap(T2, llmc_bytes(random_tokens(50), count=-1)),
    "missing": lambda folder: (folder / T2).unlink(),
    "twice": swap("fineweb_train_2.bin", GOOD),
    "raw": swap("train.bin", random_tokens(50).tobytes()),
    "npy": lambda folder: np.save(folder / "fineweb_train_000004", random_tokens(9)),
    "another set": rename(T3, "books_train_000003.bin"),
    "a token": swap(T2, llmc_bytes(np.array([1, 50256, 50257]))),
    "a folder": lambda f: ((f / T2).unlink(), (f / T2).mkdir()),
}


@pytest.mark.parametrize("kind", LLMC_DAMAGE)
def test_damage_of_llmcs_shards_is_found_at_start(kind: str, tmp_path: Path) -> None:
    modded(tmp_path, {"train": random_tokens(600), "val": random_tokens(50)})
    assert load_manifest(tmp_path).tokens("train") == 600
    LLMC_DAMAGE[kind](tmp_path)
    with pytest.raises(UserError, match=f"{tmp_path}.*(expected|Is a directory)") as caught:
        load_manifest(tmp_path)
    assert "\n" not in str(caught.value)


def test_all_damaged_files_are_named(tmp_path: Path) -> None:
    modded(tmp_path, {"train": random_tokens(600), "val": random_tokens(50)})
    for name in (T2, T3):
        swap(name, GOOD[:-1])(tmp_path)
    with pytest.raises(UserError, match=f"in {T2} 1,123 bytes.*in {T3} 1,123 bytes"):
        load_manifest(tmp_path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"123", "an odd number"),
        (b"", "an empty file"),
        (np.arange(100, 300, dtype=np.uint32).tobytes(), "as in a file of uint32"),
        (np.array([3, 50257, 5], np.uint16).tobytes(), "token 50,257 at position 1"),
        (llmc_bytes(random_tokens(9), magic=20240801), "the magic number 20240801"),  # Llama 3's
        (llmc_bytes(random_tokens(9), magic=5), "the magic number 5"),  # a damaged header
    ],
)
def test_bare_files_that_are_no_tokens(content: bytes, found: str, tmp_path: Path) -> None:
    random_tokens(9).tofile(tmp_path / "val.bin")
    (tmp_path / "train.bin").write_bytes(content)
    with pytest.raises(UserError, match=found) as caught:
        load_manifest(tmp_path)
    assert "train.bin" in str(caught.value)


@pytest.mark.parametrize(
    "array", [random_tokens(9).astype(np.uint32), random_tokens(8).reshape(2, 4)]
)
def test_build_nanogpts_shards_of_another_type(array: np.ndarray, tmp_path: Path) -> None:
    np.save(tmp_path / "edufineweb_train_000001", array)
    with pytest.raises(
        UserError, match=r"expected tokens of uint16.*found in \S*000001\.npy an array"
    ):
        load_manifest(tmp_path)


def test_our_shards_without_their_manifest_are_no_dataset(tmp_path: Path) -> None:
    for name in ("train-00000.npy", "train_00000.npy"):
        np.save(tmp_path / name, random_tokens(9))
        with pytest.raises(UserError, match=r"not a prepared dataset, it has no manifest\.json"):
            load_manifest(tmp_path)


@pytest.mark.parametrize("position", [49, 50])
def test_the_scan_at_start_names_the_position(tmp_path, monkeypatch, position):
    monkeypatch.setattr("gpt_lightning.data.shards.PIECE_TOKENS", 50)
    tokens = random_tokens(1000)
    tokens[position] = VOCAB
    nanogpt(tmp_path, {"train": tokens})
    with pytest.raises(UserError, match=f"token 50,257 at position {position}"):
        load_manifest(tmp_path)
