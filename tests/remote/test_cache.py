"""The cache of remote files: its bound, its users, and files that are damaged on their way."""

import multiprocessing
import os
import re
import socket
import time
from hashlib import sha256
from pathlib import Path

import pytest
from served import Server, serving

from gpt_lightning.errors import UserError
from gpt_lightning.files import temporary_path
from gpt_lightning.remote import attempts
from gpt_lightning.remote.cache import CachedFile, FileCache

SIZE = 1_000


@pytest.fixture
def server(tmp_path, monkeypatch):
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)
    (tmp_path / "served").mkdir()
    for index in range(6):
        (tmp_path / "served" / f"{index}.npy").write_bytes(bytes([index]) * SIZE)
    with serving(tmp_path / "served") as server:
        yield server


def files(server: Server, published: bool = True) -> list[CachedFile]:
    """The files of the server, with their digests or without."""
    found = []
    for path in sorted(server.folder.iterdir()):
        url, digest = f"{server.url}/{path.name}", sha256(path.read_bytes()).hexdigest()
        name = digest if published else sha256(url.encode()).hexdigest()
        found.append(CachedFile(url, f"{name}.npy", digest * published, SIZE))
    return found


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if re.fullmatch(r"\w{64}\.npy", path.name)}


def test_the_least_recently_used_are_deleted(server, tmp_path):
    cache, found = FileCache(tmp_path, 3 * SIZE), files(server)
    for file in [*found[:3], found[0], found[3], found[0], found[4]]:
        assert cache.get(file).stat().st_size == SIZE
        assert len(kept(tmp_path)) <= 3
    assert kept(tmp_path) == {found[n].name for n in (0, 3, 4)}


def test_a_file_in_flight_counts_as_the_largest(server, tmp_path):
    cache, found = FileCache(tmp_path, 4 * SIZE), files(server)
    cache.largest = 2 * SIZE
    for file in found[:2]:
        cache.get(file)
    temporary_path(cache.path(found[2])).touch()  # another thread has begun to fetch it
    cache.get(found[3])
    assert kept(tmp_path) == {found[1].name, found[3].name}


def test_no_file_is_fetched_ahead_of_a_reader_that_is_past_it(server, tmp_path, monkeypatch):
    monkeypatch.setattr("gpt_lightning.remote.cache.FETCHERS", 1)
    cache, (first, second, third, *_) = FileCache(tmp_path, SIZE), files(server)
    server.delay_s = {"1.npy": 0.5}
    cache.expect([second, first])  # in this order: the one thread waits for the second
    cache.get(first)
    cache.get(third)  # evicts the first
    while cache._coming:
        time.sleep(0.01)
    assert server.requests.count("0.npy") == 1


def fetch_all(cache: FileCache, found: list[CachedFile]) -> None:
    for file in found:
        cache.get(file)


def test_processes_share_the_cache(server, tmp_path):
    context = multiprocessing.get_context("fork")
    args = (FileCache(tmp_path / "cache", 10**9), files(server))
    processes = [context.Process(target=fetch_all, args=args) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert sorted(server.requests) == sorted(set(server.requests))


def test_without_a_published_digest_the_first_copy_decides(server, tmp_path):
    cache, (first, *_) = FileCache(tmp_path / "cache", 10**9), files(server, published=False)
    path = cache.get(first)
    assert cache.digest(first) == sha256(path.read_bytes()).hexdigest()
    path.unlink()
    (server.folder / "0.npy").write_bytes(b"another")
    with pytest.raises(UserError, match="forget it with `rm "):
        cache.get(first)
    assert not kept(tmp_path / "cache")


def test_temporaries_of_dead_processes_are_deleted(tmp_path):
    name, here = f".{'f' * 64}.npy.tmp", socket.gethostname()
    dead, left = tmp_path / f"{name}.{here}.{2**22 + 1}", tmp_path / f"{name}.deleted-pod.1"
    lives, slow = tmp_path / f"{name}.{here}.{os.getpid()}", tmp_path / f"{name}.another-host.1"
    for path in (dead, left, lives, slow, mine := tmp_path / "notes.npy"):
        path.touch()
    os.utime(left, (time.time() - 3_700,) * 2)
    FileCache(tmp_path, 10**9).make_room(0)
    assert set(tmp_path.iterdir()) == {lives, slow, mine}
