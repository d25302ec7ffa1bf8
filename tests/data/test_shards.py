import dataclasses
import errno
import functools
import json
import os
import pickle
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from prepared import write_dataset

from gpt_lightning.cli import main
from gpt_lightning.data import shards
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.formats import file_header
from gpt_lightning.data.manifest import MANIFEST, Manifest, Shard, TextOrigin
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.windows import DatasetWindows
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
def test_windows_across_borders_equal_the_concatenation(dataset, tokens, length):
    stream = stream_of(dataset)
    starts = np.random.default_rng(1).permutation(len(tokens) - length + 1)
    windows = stream.windows(starts, length)
    assert windows.dtype == np.int64
    expected = np.lib.stride_tricks.sliding_window_view(tokens, length)[starts]
    np.testing.assert_array_equal(windows, expected)


@pytest.mark.parametrize(("start", "length"), [(100, 1), (90, 11), (0, 101)])
def test_out_of_range(dataset: Path, start: int, length: int) -> None:
    with pytest.raises(IndexError):
        stream_of(dataset).windows(np.array([0, start]), length)


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
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "no regular file"),
    "odd truncation": (truncate(1), "found"),
    "empty": (lambda path: path.write_bytes(b""), "found"),
    "grown": (lambda path: path.write_bytes(path.read_bytes() + b"00"), "bytes for"),
    "pickle": (lambda path: path.write_bytes(pickle.dumps(Marker())), "found"),
    "archive": (lambda path: np.savez(path.open("wb"), a=np.arange(3)), "magic string"),
    "objects": (save(np.array([Marker()] * 30, dtype=object)), "found"),
    "wrong dtype": (save(np.zeros(30, np.uint32)), "uint32"),
    "signed": (save(np.zeros(30, np.int16)), "int16"),
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


def test_truncation_while_reading_is_an_error_and_no_signal(tmp_path: Path) -> None:
    stream = stream_of(write_dataset(tmp_path, [np.zeros(50_000, np.uint16)]))
    stream.windows(np.array([0]), 8)
    with open(tmp_path / "train-00000.npy", "r+b") as file:
        file.truncate(1000)
    with pytest.raises(UserError, match=r"train-00000\.npy changed while it was read"):
        stream.windows(np.array([40_000]), 8)


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
        f"no {field.name}": (edit(field.name), f"'{field.name}' is missing")
        for field in dataclasses.fields(Manifest)
    },
    "format unknown": (edit("format", to="parquet"), "format 'parquet'"),
    "bytes below 0": (edit("text_bytes", to={"train": -1}), "text_bytes is {'train': -1}"),
    "no splits": (edit("splits", to={}), "splits"),
    "a digest that leads elsewhere": (edit("splits", "train", 0, "sha256", to="../x"), "SHA-256"),
    "newer version": (edit("version", to=99), "format version 99"),
    "dtype too small": (edit("vocab_size", to=100_277), "100,277 takes uint32"),
    "no tokenizer at all": (edit("tokenizer", to=5), "tokenizer is 5, expected dict"),
    "dtype unknown": (edit("dtype", to="float16"), "dtype is float16"),
    "shard without count": (edit("splits", "train", 0, "tokens"), "'tokens' is missing"),
    "count as text": (edit("splits", "train", 0, "tokens", to="7"), "tokens is '7', expected int"),
    "split of the wrong kind": (edit("splits", "train", to=5), "not iterable"),
    "a way out": (edit("splits", "train", 0, "file", to="../x.npy"), "expected a file name"),
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


# ---- folders of many shards ----------------------------------------------------------------------

N, TOKENS = 120, 50


def write(folder: Path, n: int = N) -> Path:
    return write_dataset(folder, np.arange(n * TOKENS, dtype=np.uint16).reshape(n, TOKENS))


@pytest.fixture
def soft_limit():
    """Set the soft limit of file descriptors, until the end of the test."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda n: resource.setrlimit(resource.RLIMIT_NOFILE, (n, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def free_descriptor() -> int:
    """Return the lowest descriptor that is not in use: a limit at which no file can be opened."""
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs /proc")


@needs_proc
def test_more_shards_than_descriptors(tmp_path, monkeypatch):
    write(tmp_path)
    before = descriptors()
    few = functools.lru_cache(16)(TokenStream._map.__wrapped__)
    monkeypatch.setattr(TokenStream, "_map", few)
    one, two = stream_of(tmp_path), stream_of(tmp_path)  # one bound for all streams
    starts = np.random.default_rng(0).permutation(N * TOKENS - 60)[:600]
    for stream in (one, two):
        assert np.array_equal(stream.windows(starts, 60)[:, 0], starts)
    assert descriptors() - before <= 16 <= shards.MAX_MAPS <= 2**14 // 4


@needs_proc
def test_descriptors_that_are_used_up_are_no_damage(tmp_path, soft_limit):
    write(tmp_path)
    stream = stream_of(tmp_path)
    TokenStream._map.cache_clear()
    soft_limit(free_descriptor())
    for work in (lambda: load_manifest(tmp_path), lambda: stream.windows(np.array([0]), 5)):
        with pytest.raises(UserError, match=r"Too many open files; .*`ulimit -n \d+`") as caught:
            work()
        assert "prepare" not in str(caught.value)


@needs_proc
def test_maps_are_closed_where_others_have_used_up_the_descriptors(tmp_path, soft_limit):
    write(tmp_path)
    stream = stream_of(tmp_path)
    assert shards.MAX_MAPS > 20  # more than are left
    soft_limit(free_descriptor() + 20)
    starts = np.arange(0, N * TOKENS, TOKENS)
    assert np.array_equal(stream.windows(starts, 2)[:, 0], starts)


def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch, capsys):
    write(tmp_path, 2)

    def fail(path, *args):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(shards, "open", fail, raising=False)
    with pytest.raises(UserError, match="Input/output error; check its permissions and the disk"):
        load_manifest(tmp_path)
    assert main(["data", "verify", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert "train-00000.npy: [Errno 5] Input/output error" in line
    assert "prepare" not in line


@needs_proc
@pytest.mark.parametrize(("order", "expected"), [("shuffled", True), ("sequential", False)])
def test_pages_are_read_ahead_for_sequential_reads_alone(tmp_path, order, expected):
    stream = stream_of(write(tmp_path, 1))
    source = DatasetWindows(stream, WindowOrder(order, len(stream), 8, 1))
    source.read(0, 0, 2, 0, 1)
    smaps = Path("/proc/self/smaps").read_text().partition(f"{tmp_path}/train-00000.npy")[2]
    flags = smaps.partition("VmFlags:")[2].splitlines()[0].split()
    assert ("rr" in flags) == expected  # VM_RAND_READ


def test_copied_shards_are_compared(tmp_path, monkeypatch):
    stream = stream_of(write(tmp_path / "a"))
    saved = stream.stamp
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    stream_of(tmp_path / "a").check_stamp(saved)
    stream_of(tmp_path / "b").check_stamp(saved)
    path = tmp_path / "b" / "train-00070.npy"
    np.save(path, np.zeros(TOKENS, np.uint16))
    with pytest.raises(UserError, match=r"train-00070\.npy: it was replaced since the checkpoint"):
        stream_of(tmp_path / "b").check_stamp(saved)

    monkeypatch.setattr(shards, "SCAN_BYTES", 1_000)  # larger ones are read when they are opened
    stream = stream_of(tmp_path / "b")
    read = []
    digest = shards.file_sha256
    monkeypatch.setattr(shards, "file_sha256", lambda path: read.append(path.name) or digest(path))
    stream.check_stamp(saved)
    assert read == []
    stream.windows(np.array([0, 10, 60]), 20)
    stream.windows(np.array([0]), 20)
    assert read == ["train-00000.npy", "train-00001.npy"]
    with pytest.raises(UserError, match=r"train-00070\.npy: it was replaced"):
        stream.windows(np.array([70 * TOKENS]), 20)


def test_shards_without_digests_have_to_stay(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        np.arange(100, dtype=np.uint16).tofile(tmp_path / name / "train.bin")
    saved = stream_of(tmp_path / "a").stamp
    stream_of(tmp_path / "a").check_stamp(saved)
    with pytest.raises(UserError, match="have changed since the checkpoint"):
        stream_of(tmp_path / "b").check_stamp(saved)


def test_big_endian_tokens_are_named(tmp_path):
    np.save(write(tmp_path, 1) / "train-00000.npy", np.zeros(TOKENS, ">u2"))
    with pytest.raises(UserError, match="of big-endian uint16"):
        load_manifest(tmp_path)
