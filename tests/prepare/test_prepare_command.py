import itertools
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from prepared import contents, prepare_text, tokens_of

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.tokenizers import tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.files import temporary_path
from gpt_lightning.prepare.command import dataset_folder, prepare, prepare_source
from gpt_lightning.prepare.settings import split_borders

TEXT = (
    "The quick brown fox jumps over the lazy dog.\r\n<|endoftext|>\ufeff\x00 \u00e9t\u00e9\n" * 40
)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_bytes(TEXT.encode())
    return path


def decoded(folder: Path, split: str) -> str:
    tokens = np.array(tokens_of(folder, split))
    return tokenizer_from_spec(load_manifest(folder).tokenizer).decode(tokens)


# ---- what comes out ----------------------------------------------------------------------------


def test_nanogpts_split_of_tiny_shakespeare(tinyshakespeare: Path, tmp_path: Path) -> None:
    manifest = prepare_text(tinyshakespeare, tmp_path / "out", "char")
    assert manifest.vocab_size == 65
    assert {split: manifest.tokens(split) for split in manifest.splits} == {
        "train": 1_003_854,
        "val": 111_540,
    }
    text = tinyshakespeare.read_bytes().decode()
    assert decoded(tmp_path / "out", "train") + decoded(tmp_path / "out", "val") == text


def test_borders_are_nanogpts_for_every_length() -> None:
    for n in range(1, 5000):
        assert split_borders(n, 0.1, 0.0)["train"] == (0, int(n * 0.9))


@pytest.mark.parametrize("val", [0.0, 0.1, 0.3, 0.9, 1 / 3, 1e-9])
@pytest.mark.parametrize("test", [0.0, 0.05, 0.1])
def test_splits_tile_the_text(val: float, test: float) -> None:
    for n in (10, 1000, 1_115_394):
        borders = list(split_borders(n, val, test).values())
        assert borders[0][0] == 0
        assert borders[-1][1] == n
        assert all(left[1] == right[0] for left, right in itertools.pairwise(borders))


def test_fractions_are_the_decimals_that_were_written() -> None:
    assert split_borders(10, 0.9, 0.0)["train"] == (0, 1)  # 1 - 0.9 is 0.09999999999999998
    assert split_borders(10, 0.2, 0.1)["train"] == (0, 7)  # 1 - 0.2 - 0.1 is 0.7000000000000001


@pytest.mark.parametrize("tokenizer", ["char", "byte", "gpt2"])
@pytest.mark.parametrize("shard_tokens", [1, 64, 10**9])
def test_splits_decode_to_the_text(source, tmp_path, tokenizer, shard_tokens):
    text = TEXT[:100]  # a token a shard makes many files
    source.write_bytes(text.encode())
    out = tmp_path / "out"
    made = prepare_text(source, out, tokenizer, 0.2, 0.2, shard_tokens)
    assert made == load_manifest(out)
    assert "".join(decoded(out, split) for split in ("train", "val", "test")) == text
    assert 50256 not in tokens_of(out)  # GPT-2's end of text: its name in a text is text
    for shards in made.splits.values():
        assert all(shard.tokens == shard_tokens for shard in shards[:-1])
        assert 0 < shards[-1].tokens <= shard_tokens


# ---- a folder that is there already ------------------------------------------------------------


def test_again_does_nothing(source, tmp_path, capsys):
    out = tmp_path / "out"
    first = prepare_text(source, out, "char")
    times = {path: path.stat().st_mtime_ns for path in out.iterdir()}
    assert prepare_text(source, out, "char") == first
    assert not capsys.readouterr().out  # training prepares at every start
    prepare(str(source), "char", str(out))
    assert "is already prepared" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} == times
    prepare_text(source, out, "char", overwrite=True)
    assert {path: path.stat().st_mtime_ns for path in out.iterdir()} != times


def test_a_flipped_bit_is_repaired_by_overwrite(source, tmp_path):
    out = tmp_path / "out"
    prepare_text(source, out, "char")
    shard = next(out.glob("train-*"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    prepare(str(source), "char", str(out), overwrite=True)
    assert shard.read_bytes() == content


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        ({"tokenizer": "byte"}, "tokenizer char, not byte"),
        ({"shard_tokens": 700}, "shard_tokens 100000000, not 700"),
    ],
)
def test_other_settings(source, tmp_path, changed, difference):
    out = tmp_path / "out"
    settings = {"tokenizer": "char"}
    prepare_text(source, out, "char")
    before = contents(out)
    with pytest.raises(UserError, match=f"{difference}.*--out .*--overwrite true"):
        prepare_text(source, out, **settings | changed)  # type: ignore[arg-type]
    assert contents(out) == before
    prepare_text(source, out, **settings | changed, overwrite=True)  # type: ignore[arg-type]
    prepare_text(source, tmp_path / "fresh", **settings | changed)  # type: ignore[arg-type]
    assert contents(out) == contents(tmp_path / "fresh")
    assert not list(tmp_path.glob(".*"))


def test_damaged_dataset_is_mended_on_request(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare_text(source, out, "char")
    before = contents(out)
    (out / "val-00000.npy").unlink()
    with pytest.raises(UserError, match="--overwrite true"):
        prepare_text(source, out, "char")
    prepare_text(source, out, "char", overwrite=True)
    assert contents(out) == before


def test_foreign_files_are_never_deleted(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"thesis\.tex"):
            prepare_text(source, out, "char", overwrite=overwrite)
    (out / "thesis.tex").rename(tmp_path / "thesis.tex")
    prepare_text(source, out, "char")  # an empty folder is as good as none
    (tmp_path / "thesis.tex").rename(out / "thesis.tex")
    prepare_text(source, out, "char")  # does no harm beside the same dataset
    with pytest.raises(UserError, match=r"thesis\.tex is not part of a dataset"):
        prepare_text(source, out, "byte", overwrite=True)
    assert (out / "thesis.tex").read_text() == "years of work"


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "the train split has 0 tokens"),
        (b"ab", "train split has 1 tokens"),
        (b"abc", "val split has 1 tokens"),
        (b"good \xff bad", "bad.txt, line 1 is not UTF-8"),
        ("utf-16".encode("utf-16"), "is not UTF-8 text"),
    ],
)
def test_text_that_makes_no_dataset(tmp_path: Path, content: bytes, said: str) -> None:
    source = tmp_path / "bad.txt"
    source.write_bytes(content)
    with pytest.raises(UserError, match=said) as caught:
        prepare_text(source, tmp_path / "out", "char")
    assert "SOURCE" in str(caught.value) or str(source) in str(caught.value)
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("test_fraction", [0.0, 3e-4])
def test_a_fraction_that_makes_no_dataset(source, tmp_path, test_fraction):
    with pytest.raises(UserError, match=r"the val split has \d tokens"):
        prepare_text(source, tmp_path / "out", "byte", 1e-9, test_fraction)
    assert list(tmp_path.iterdir()) == [source]


# ---- the command -------------------------------------------------------------------------------


def test_command(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(str(source), tokenizer="byte", data_dir=str(tmp_path / "data"))
    table = capsys.readouterr().out
    folder = tmp_path / "data" / "fox-byte"
    assert folder == dataset_folder(str(source), "byte", tmp_path / "data")
    manifest = load_manifest(folder)
    assert manifest.source.name == "fox.txt"
    for part in (str(folder), f"{manifest.tokens('train'):,} tokens", "1.00 bytes per token"):
        assert part in table
    assert prepare_source(str(source), "byte", tmp_path / "data") == manifest


def test_import_is_light() -> None:
    heavy = "{'torch', 'tiktoken', 'lightning', 'tqdm', 'requests', 'fsspec', 'pyarrow', 'ray'}"
    code = f"import sys, gpt_lightning.prepare.command; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# ---- accidents ---------------------------------------------------------------------------------


@pytest.mark.parametrize("foreign", [False, True])
def test_temporaries_of_living_processes_stay(tmp_path, monkeypatch, foreign):
    def not_ours(pid: int, signal: int) -> None:
        raise PermissionError  # what the system says of another user's process

    if foreign:
        monkeypatch.setattr("os.kill", not_ours)
    mark = f".out.tmp.{socket.gethostname()}."
    kept = [tmp_path / f"{mark}{os.getppid()}", tmp_path / ".out.tmp.another-machine.1"]
    for folder in (*kept, tmp_path / f"{mark}{os.getpid()}"):
        folder.mkdir()
    temporary_path(tmp_path / "out")
    assert set(tmp_path.iterdir()) == set(kept)
