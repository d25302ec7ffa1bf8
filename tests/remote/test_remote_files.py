"""Whole files: downloads that are wrong, and uploads that are torn or interrupted."""

import errno
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gpt_lightning.errors import UserError
from gpt_lightning.remote import attempts, files


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.5)
    MemoryFileSystem.store.clear()
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


def test_a_torn_upload_is_tried_again(monkeypatch, tmp_path):
    path, torn = tmp_path / "x", [2]
    path.write_bytes(b"content")
    real = MemoryFileSystem.pipe_file

    def put_file(self, local, remote, **kwargs):
        torn[0] -= 1
        content = path.read_bytes()
        real(self, remote, content[:-1] if torn[0] >= 0 else content)

    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    files.upload(path, "memory://a/x")
    assert torn == [-1]
    assert files.read("memory://a/x") == b"content"
    torn[0] = 10**6
    with pytest.raises(UserError, match=r"cannot write memory://a/x \(sent 7 bytes, found 6\)"):
        files.upload(path, "memory://a/x")


def test_an_upload_to_a_disk_is_whole_or_not_there(monkeypatch, tmp_path):
    path, there = tmp_path / "x", tmp_path / "shared" / "run" / "x"
    path.write_bytes(b"content")
    files.upload(path, str(there))

    def full(source, target):
        Path(target).write_bytes(b"con")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files.shutil, "copyfile", full)
    path.write_bytes(b"other content")
    with pytest.raises(UserError, match=r"cannot write .*shared/run/x: No space left"):
        files.upload(path, str(there))
    assert there.read_bytes() == b"content"
    assert list(there.parent.iterdir()) == [there]


def test_what_is_not_there(memory):
    assert files.listed("memory://nowhere") == {}
    assert files.read_if_there("memory://nowhere/x") is None
    files.delete("memory://nowhere/x")
    with pytest.raises(UserError, match="cannot fetch memory://nowhere/x: no such file"):
        files.read("memory://nowhere/x")


def test_a_file_that_stays_wrong_never_appears(memory, tmp_path):
    memory.pipe_file("/a/x", b"content")
    with pytest.raises(UserError, match=r"memory://a/x: expected SHA-256 0{64}, .*check the file"):
        files.fetch_file("memory://a/x", tmp_path / "x", "0" * 64)
    assert list(tmp_path.iterdir()) == []
    files.fetch_file("memory://a/x", tmp_path / "x", "")
    assert (tmp_path / "x").read_bytes() == b"content"


def test_a_full_disk_is_not_waited_for(memory, monkeypatch, tmp_path):
    monkeypatch.setattr(attempts, "PATIENCE_S", 600.0)
    memory.pipe_file("/a/x", b"content")

    def full(self, there, path, **kwargs):
        Path(path).write_bytes(b"con")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MemoryFileSystem, "get_file", full)
    with pytest.raises(UserError, match=r"cannot write .*/x: No space left on device; check the "):
        files.fetch_file("memory://a/x", tmp_path / "x", "")
    assert list(tmp_path.iterdir()) == []
