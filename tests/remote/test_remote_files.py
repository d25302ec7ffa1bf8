"""Whole files: uploads that are torn or interrupted, and files that are there once."""

import re

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256
from gpt_lightning.remote import attempts, files


@pytest.fixture(autouse=True)
def memory(monkeypatch):
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    MemoryFileSystem.store.clear()
    yield fsspec.filesystem("memory")
    MemoryFileSystem.store.clear()


@pytest.mark.parametrize("digest", [True, False])
def test_a_torn_upload_is_tried_again_and_never_has_the_files_name(digest, monkeypatch, tmp_path):
    path, torn, seen = tmp_path / "x", [2], []
    path.write_bytes(b"content")
    real = MemoryFileSystem.pipe_file

    def pipe_file(self, remote, value, mode="overwrite", **kwargs):
        seen.append(remote)
        torn[0] -= 1
        real(self, remote, value[:-1] if torn[0] >= 0 else value, mode)

    def put_file(self, local, remote, **kwargs):
        self.pipe_file(remote, path.read_bytes())

    monkeypatch.setattr(MemoryFileSystem, "pipe_file", pipe_file)
    monkeypatch.setattr(MemoryFileSystem, "put_file", put_file)
    files.upload(path, "memory://a/x", file_sha256(path) if digest else None)
    assert len(seen) == 3
    assert all(re.fullmatch(r"\..+\.tmp\..+\.\d+", name.rpartition("/")[2]) for name in seen)
    assert list(files.listed("memory://a")) == ["x"]
    assert files.read("memory://a/x") == b"content"
    torn[0] = 10**6
    with pytest.raises(UserError, match="cannot write memory://a/y after 6 attempts"):
        files.upload(b"other", "memory://a/y")
    assert list(files.listed("memory://a")) == ["x"]


@pytest.mark.parametrize("exclusive", [True, False])
def test_a_file_is_created_once(exclusive, monkeypatch):
    real = MemoryFileSystem.open

    def opened(self, path, mode="rb", **kwargs):
        if mode == "xb" and not exclusive:
            raise NotImplementedError
        return real(self, path, mode, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "open", opened)
    assert files.create("memory://runs/run.json", b"one")
    assert not files.create("memory://runs/run.json", b"two")
    assert files.create("memory://runs/run.json", b"one")


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
