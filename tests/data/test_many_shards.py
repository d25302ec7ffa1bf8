"""Folders of many shards: file descriptors, pages read ahead, and shards that were copied."""

import errno
import os
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
from prepared import write_dataset

from gpt_lightning.cli import main
from gpt_lightning.data import manifest as manifests
from gpt_lightning.data import shards
from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import DatasetWindows, TokenStream
from gpt_lightning.errors import UserError

N, TOKENS = 120, 50


def write(folder: Path, n: int = N) -> Path:
    return write_dataset(folder, np.arange(n * TOKENS, dtype=np.uint16).reshape(n, TOKENS))


def stream_of(folder: Path) -> TokenStream:
    return TokenStream(folder, load_manifest(folder), "train")


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
def test_more_shards_than_descriptors(tmp_path, soft_limit):
    write(tmp_path)
    before = descriptors()
    soft_limit(before + 64)
    one, two = stream_of(tmp_path), stream_of(tmp_path)  # as in a mixture: one bound for both
    starts = np.random.default_rng(0).permutation(N * TOKENS - 60)[:600]
    for stream in (one, two):
        assert np.array_equal(stream.windows(starts, 60)[:, 0], starts)
    assert descriptors() - before <= shards.max_maps() <= (before + 64) // 4


@needs_proc
def test_descriptors_that_are_used_up_are_no_damage(tmp_path, soft_limit):
    write(tmp_path)
    stream = stream_of(tmp_path)
    shards._MAPS.clear()
    soft_limit(free_descriptor())
    for work in (lambda: load_manifest(tmp_path), lambda: stream.windows(np.array([0]), 5)):
        with pytest.raises(UserError, match=r"Too many open files; .*`ulimit -n \d+`") as caught:
            work()
        assert "prepare" not in str(caught.value)


@needs_proc
def test_maps_are_closed_where_others_have_used_up_the_descriptors(
    tmp_path, soft_limit, monkeypatch
):
    write(tmp_path)
    stream = stream_of(tmp_path)
    monkeypatch.setattr(shards, "max_maps", lambda: N)  # more than are left
    soft_limit(free_descriptor() + 20)
    starts = np.arange(0, N * TOKENS, TOKENS)
    assert np.array_equal(stream.windows(starts, 2)[:, 0], starts)


def test_a_disk_that_fails_is_no_damage(tmp_path, monkeypatch, capsys):
    write(tmp_path, 2)

    def fail(path, *args):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(manifests, "open", fail, raising=False)
    with pytest.raises(UserError, match="Input/output error; check its permissions and the disk"):
        load_manifest(tmp_path)
    assert main(["data", "verify", str(tmp_path)]) == 2
    line = capsys.readouterr().err
    assert "train-00000.npy cannot be read: Input/output error; " in line
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
    with pytest.raises(UserError, match=r"train-00070\.npy has been replaced since the checkpoint"):
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
    with pytest.raises(UserError, match=r"train-00070\.npy has been replaced"):
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
