import dataclasses
import json
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import write_dataset

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import MANIFEST, Manifest, Shard, TextOrigin
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import UserError

LENGTHS = (7, 1, 30, 2, 60)  # windows cross one, two and three borders
VOCAB = 500


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, VOCAB, sum(LENGTHS)).astype(np.uint16)


@pytest.fixture
def dataset(tmp_path: Path, tokens: np.ndarray) -> Path:
    return write_dataset(tmp_path, np.split(tokens, np.cumsum(LENGTHS)[:-1]), VOCAB)


def stream_of(folder: Path) -> TokenStream:
    return TokenStream(folder, load_manifest(folder), "train")


@pytest.mark.parametrize("length", [1, 3, 11, 50, 100])
def test_windows_across_borders_equal_the_concatenation(
    dataset: Path, tokens: np.ndarray, length: int
) -> None:
    stream = stream_of(dataset)
    starts = np.random.default_rng(1).permutation(len(tokens) - length + 1)
    windows = stream.windows(starts, length)
    assert windows.dtype == np.int64
    expected = np.lib.stride_tricks.sliding_window_view(tokens, length)[starts]
    np.testing.assert_array_equal(windows, expected)


@pytest.mark.parametrize(("start", "length"), [(-1, 3), (100, 1), (90, 11), (0, 101)])
def test_out_of_range(dataset: Path, start: int, length: int) -> None:
    with pytest.raises(IndexError, match="100 tokens"):
        stream_of(dataset).windows(np.array([0, start]), length)


def test_no_windows(dataset: Path) -> None:
    assert stream_of(dataset).windows(np.array([], dtype=np.int64), 8).shape == (0, 8)


def test_pickling_carries_no_tokens(tmp_path: Path) -> None:
    stream = stream_of(write_dataset(tmp_path, [np.arange(100_000, dtype=np.uint32)], 100_277))
    stream.windows(np.array([5]), 3)  # maps the shard
    pickled = pickle.dumps(stream)
    assert len(pickled) < 2000
    assert pickle.loads(pickled).windows(np.array([99_997]), 3).tolist() == [
        [99_997, 99_998, 99_999]
    ]


def test_manifest_comes_back(dataset: Path) -> None:
    manifest = load_manifest(dataset)
    assert [shard.tokens for shard in manifest.splits["train"]] == list(LENGTHS)
    before = (dataset / MANIFEST).read_bytes()
    manifest.save(dataset)
    assert (dataset / MANIFEST).read_bytes() == before
    assert not list(dataset.glob(".*"))


# ---- damage ------------------------------------------------------------------------------------


def save(array: np.ndarray) -> Callable[[Path], None]:
    return lambda path: np.save(path, array)


def truncate(n_bytes: int) -> Callable[[Path], int]:
    return lambda path: path.write_bytes(path.read_bytes()[:-n_bytes])


class Marker:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("the pickle was run",))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "missing": (Path.unlink, "No such file"),
    "odd truncation": (truncate(1), "found"),
    "empty": (lambda path: path.write_bytes(b""), "found"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"00"), "bytes for"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Marker())), "found"),
    "archive": (lambda path: np.savez(path.open("wb"), a=np.arange(3)), "magic string"),
    "objects": (save(np.array([Marker()] * 30, dtype=object)), "found"),
    "wrong dtype": (save(np.zeros(30, np.uint32)), "uint32"),
    "wrong count": (save(np.zeros(29, np.uint16)), r"\(29,\)"),
    "matrix": (save(np.zeros((30, 1), np.uint16)), r"\(30, 1\)"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_shard_is_refused_at_load(dataset: Path, kind: str) -> None:
    damage, found = DAMAGE[kind]
    damage(dataset / "train-00002.npy")
    with pytest.raises(UserError, match=found) as caught:
        load_manifest(dataset)
    line = str(caught.value)
    assert "train-00002.npy" in line
    assert "expected" in line
    assert "gpt-lightning prepare" in line
    assert "\n" not in line


def test_stranger_among_the_shards(dataset: Path) -> None:
    np.save(dataset / "train-00009.npy", np.zeros(3, np.uint16))
    with pytest.raises(UserError, match=r"train-00009\.npy"):
        load_manifest(dataset)


def test_truncation_while_reading_is_an_error_and_no_signal(tmp_path: Path) -> None:
    stream = stream_of(write_dataset(tmp_path, [np.zeros(50_000, np.uint16)]))
    stream.windows(np.array([0]), 8)
    with open(tmp_path / "train-00000.npy", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"train-00000\.npy changed while it was read"):
        stream.windows(np.array([40_000]), 8)


def test_token_beyond_the_vocabulary(tmp_path: Path) -> None:
    write_dataset(tmp_path, [np.array([1, 2, 65], np.uint16)], 65)
    with pytest.raises(UserError, match="token 65"):
        stream_of(tmp_path).windows(np.array([0]), 3)


def edit(*keys: str | int, to: Any = None) -> Callable[[dict[str, Any]], None]:
    def change(manifest: Any) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        if to is None:
            del manifest[keys[-1]]
        else:
            manifest[keys[-1]] = to

    return change


EDITS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    **{
        f"no {field.name}": (edit(field.name), f"{field.name} is missing")
        for field in dataclasses.fields(Manifest)
    },
    "format unknown": (edit("format", to="parquet"), "format is 'parquet', expected one of npy"),
    "no splits": (edit("splits", to={}), "splits is empty"),
    "a digest that leads elsewhere": (
        edit("splits", "train", 0, "sha256", to="../x"),
        "not a SHA-256",
    ),
    "newer version": (edit("version", to=99), "format version 99"),
    "dtype too small": (edit("vocab_size", to=100_277), "100,277 takes uint32"),
    "dtype unknown": (edit("dtype", to="float16"), "dtype is float16"),
    "shard without count": (edit("splits", "train", 0, "tokens"), "tokens is missing"),
    "count as text": (edit("splits", "train", 0, "tokens", to="7"), "tokens is '7', expected int"),
    "split of the wrong kind": (edit("splits", "train", to={}), "train is {}"),
    "a way out": (edit("splits", "train", 0, "file", to="../x.npy"), "not a plain file name"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_damaged_manifest(dataset: Path, kind: str) -> None:
    change, found = EDITS[kind]
    manifest = json.loads((dataset / MANIFEST).read_text())
    change(manifest)
    (dataset / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=found) as caught:
        load_manifest(dataset)
    assert "gpt-lightning prepare" in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\udcff"])
def test_broken_json(dataset: Path, content: str) -> None:
    (dataset / MANIFEST).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(UserError, match=r"manifest\.json"):
        load_manifest(dataset)


def test_no_manifest(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(UserError, match=r"is not a prepared dataset.*gpt-lightning prepare"):
            load_manifest(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Reading `.npy`")  # numpy's word for a header of Python 2
def test_every_flip_in_the_header_is_seen_or_harmless(dataset: Path, tokens: np.ndarray) -> None:
    path = dataset / "train-00002.npy"
    whole, refused = path.read_bytes(), 0
    for at in range(128):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                stream = stream_of(dataset)
            except UserError:
                refused += 1
            else:  # a space that became another
                assert stream.windows(np.array([0]), len(tokens)).tolist() == [tokens.tolist()]
    assert refused > 500  # of 1,024, half of which are in the padding


def test_start_is_fast_and_reads_no_tokens(tmp_path: Path) -> None:
    n_tokens = 5 * 10**9  # 10 GB that the disk does not have
    for index in range(3):
        with open(tmp_path / f"train-{index:05d}.npy", "wb") as file:
            file.write(file_header("npy", "uint16", n_tokens))
            file.truncate(file.tell() + 2 * n_tokens)
    shards = tuple(Shard(f"train-{i:05d}.npy", n_tokens, "0" * 64) for i in range(3))
    source = TextOrigin("s", 1, "0")
    Manifest({"name": "gpt2"}, 50257, "uint16", source, {}, {"train": shards}).save(tmp_path)
    begun_s = time.perf_counter()
    stream = stream_of(tmp_path)
    assert time.perf_counter() - begun_s < 1  # it takes 1 ms; reading 30 GB takes many seconds
    assert stream.windows(np.array([2 * n_tokens - 2]), 4).tolist() == [[0, 0, 0, 0]]
