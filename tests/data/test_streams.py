"""Streams of many shards: the cache's limit, shuffles that fit it, nodes, and shards of others."""

import contextlib
import gc
import hashlib
import math
import os
import re
import subprocess
import threading
import time
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from prepared import write_dataset
from served import Server, serving

from gpt_lightning.data import streaming
from gpt_lightning.data.dataset import TokenDataset, load_manifest
from gpt_lightning.data.formats import file_header
from gpt_lightning.data.loader import Place, TrainLoader
from gpt_lightning.data.readers import Reader
from gpt_lightning.data.settings import DataSettings
from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256
from gpt_lightning.remote import attempts

N, TOKENS, T = 24, 208, 16
SHARD_BYTES = 128 + 2 * TOKENS


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)
    monkeypatch.setattr(streaming, "BLOCK_SHARDS", 6)
    monkeypatch.setattr(streaming, "BLOCK_WINDOWS", 50)


def tokens() -> np.ndarray:
    return np.arange(N * TOKENS, dtype=np.uint16)


@pytest.fixture
def ours(tmp_path) -> Path:
    """Dataset with a manifest whose token i is i."""
    return write_dataset(tmp_path / "served", tokens().reshape(N, TOKENS))


@pytest.fixture
def server(ours):
    with serving(ours) as server:
        yield server


def write_llmc(folder: Path, ids: np.ndarray | None = None, n_shards: int = 5) -> Path:
    folder.mkdir()
    ids = tokens() if ids is None else ids
    for index, part in enumerate(ids.reshape(N, TOKENS)[:n_shards], 1):
        path = folder / f"fineweb_train_{index:06d}.bin"
        path.write_bytes(file_header("llmc", "uint16", TOKENS) + part.tobytes())
    (folder / "README.md").write_text("shards")
    return folder


def reader(
    address: str, data: Path, shards: float = 100, place: Place | None = None, **settings
) -> Reader:
    """Reader of an address with a cache of some shards."""
    limit = shards * SHARD_BYTES / 1e9
    chosen = {"dataset": address, "block_size": T, "batch_size": 4, "seed": 1, **settings}
    dataset = TokenDataset(address, data, limit)
    return Reader(dataset, DataSettings(**chosen), place or Place())


def fetched(server: Server) -> list[str]:
    return [name for name in server.requests if name.startswith(("train", "fineweb"))]


def kept_bytes(data: Path) -> int:
    sizes = {}
    for path in (data / "cache").iterdir():  # a file may be renamed meanwhile
        with contextlib.suppress(FileNotFoundError):
            name = path.name.lstrip(".").partition(".")[0]
            sizes[name] = max(sizes.get(name, 0), os.stat(path).st_size)
    return sum(sizes.values())


def epoch(loader: TrainLoader) -> np.ndarray:
    return np.concatenate([x.numpy() for x, _ in loader])


def read_epoch(server: Server, tmp_path: Path, **settings) -> np.ndarray:
    return epoch(reader(server.url, tmp_path / "data", **settings).train_loader)


# ---- one limit ---------------------------------------------------------------------------------


def test_a_shuffle_fits_its_cache_and_fetches_each_shard_once(server, tmp_path, capsys):
    limit = 14  # two blocks of six, a shard on its way, and room
    made = reader(server.url, tmp_path, limit)
    order = made.train_loader.source.order
    assert (order.blocks, order.lanes) == (4, 1)
    assert capsys.readouterr().out == ""
    windows = []
    for x, _ in made.train_loader:
        windows.append(x)
        assert kept_bytes(tmp_path) <= limit * SHARD_BYTES
    assert sorted(set(fetched(server))) == sorted(p.name for p in server.folder.glob("*.npy"))
    # the next epoch's first shards are fetched ahead
    assert len(fetched(server)) <= N + 8  # what the limit holds beside the last block
    starts = np.concatenate(windows)[:, 0]
    assert len(set(starts.tolist())) == len(starts)


def test_a_smaller_cache_shuffles_fewer_shards_and_says_so(server, tmp_path, capsys):
    made = reader(server.url, tmp_path, 7)
    assert made.train_loader.source.order.blocks == 8
    said = capsys.readouterr().out
    # a thread of a test before may print that its server has gone
    found = re.search(
        r"shuffle     windows of 3 of the 24 shards of \S+ at a time; "
        r"for 6 set data.cache_limit_gb (\S+)\n",
        said,
    )
    assert found, said
    raised = reader(server.url, tmp_path, float(found[1]) * 1e9 / SHARD_BYTES)
    assert raised.train_loader.source.order.blocks == 4
    assert "shuffle" not in capsys.readouterr().out


def test_an_order_that_would_fetch_again_and_again_is_refused(server, tmp_path):
    with pytest.raises(
        UserError, match=r"data.cache_limit_gb is .*, or set data.order shuffled"
    ) as caught:
        len(reader(server.url, tmp_path, 5, order="random").train_loader)
    limit = re.search(r"raise it to (\S+), or", str(caught.value))
    made = reader(server.url, tmp_path, float(limit[1]) * 1e9 / SHARD_BYTES, order="random")
    epoch(made.train_loader)
    assert len(fetched(server)) <= N
    assert fetched(server)


@pytest.mark.slow
def test_no_file_stays_mapped(server, tmp_path):
    made = reader(server.url, tmp_path, 4, order="sequential")
    epoch(made.train_loader)
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("needs /proc")
    assert str(tmp_path / "cache") not in maps.read_text()


# ---- nodes -------------------------------------------------------------------------------------


def test_each_node_fetches_its_share(server, tmp_path):
    """Two ranks on each node; their union is the order of one process."""
    nodes = 3
    world, caches, batches = 2 * nodes, [], {}
    for node in range(nodes):
        server.requests.clear()
        for rank in (node, node + nodes):  # TokenDataModule counts: local rank x nodes + node
            place = Place(rank=rank, world=world, nodes=nodes)
            made = reader(server.url, tmp_path / str(node), place=place, batch_size=2)
            batches[rank] = [x.numpy() for x, _ in made.train_loader]
            order = made.train_loader.source.order
        caches.append(set(fetched(server)))
    assert (order.lanes, order.blocks) == (nodes, 2)
    share, rest = math.ceil(N / nodes), nodes  # the rest of the epoch, and the next epoch
    assert max(map(len, caches)) < N
    assert sum(map(len, caches)) >= N
    assert max(map(len, caches)) <= 2 * share + rest
    alone = reader(server.url, tmp_path / "alone", 100, batch_size=2 * world).train_loader
    alone.source.order = order
    for index, (x, _) in enumerate(alone):
        for rank in range(world):
            assert np.array_equal(x[rank::world], batches[rank][index])


def test_a_checkpoint_keeps_its_shuffle_wherever_it_goes_on(server, ours, tmp_path):
    saved = reader(server.url, tmp_path, 14).train_loader
    identity, expected = saved.identity(), epoch(saved)
    assert identity["shuffled blocks"] == 4
    local = reader(str(ours), tmp_path)
    assert local.train_loader.source.order.blocks == 1
    local.train_loader.source.keep_shuffle(identity)
    assert local.train_loader.identity() == identity
    assert np.array_equal(epoch(local.train_loader), expected)
    small = reader(server.url, tmp_path / "small", 5)
    with pytest.raises(UserError, match=r"data.cache_limit_gb is 2.72e-06: .* raise it to 1,"):
        small.train_loader.source.keep_shuffle(identity)
    other = reader(str(ours), tmp_path)
    other.train_loader.source.keep_shuffle(identity | {"dataset": "another"})
    assert other.train_loader.source.order.blocks == 1


# ---- shards without our manifest ---------------------------------------------------------------


def test_shards_of_llmc_by_address(tmp_path):
    folder = write_llmc(tmp_path / "fineweb")
    with serving(folder) as server:
        data = TokenDataset(server.url, tmp_path, 1.0)
        assert data.manifest == load_manifest(folder)
        whole = data.stream("train", T).windows(np.array([0, 200]), 400)
        assert np.array_equal(whole, tokens()[np.array([[0], [200]]) + np.arange(400)])
        # headers alone were read, of all shards; then the first three shards
        assert fetched(server).count("fineweb_train_000002.bin") == 2
        assert fetched(server).count("fineweb_train_000005.bin") == 1


def test_a_copy_with_wrong_tokens_is_forgotten_by_the_command_of_the_error(tmp_path):
    folder = write_llmc(tmp_path / "served")
    shard = folder / "fineweb_train_000002.bin"
    right = shard.read_bytes()
    shard.write_bytes(right[:-2] + b"\xff\xff")
    with serving(folder) as server:
        with pytest.raises(UserError, match=re.escape(f"{server.url} holds token 65535")) as caught:
            read_epoch(server, tmp_path)
        shard.write_bytes(right)
        while [t for t in threading.enumerate() if "_fetch_all" in t.name and fetched(server)]:
            server.requests.clear()  # threads that fetch ahead still write there
            time.sleep(0.3)
        subprocess.run(re.findall("`(rm .*)`", str(caught.value))[0], shell=True, check=True)
        assert len(read_epoch(server, tmp_path))


def test_a_first_copy_of_another_size_is_refused(tmp_path):
    folder = write_llmc(tmp_path / "fineweb")
    with serving(folder) as server:
        stream = TokenDataset(server.url, tmp_path, 1.0).stream("train", T)
        path = folder / "fineweb_train_000002.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:-100])
        server.requests.clear()
        with pytest.raises(UserError, match=r"expected 1,440 bytes, found 1,340, twice"):
            stream.windows(np.array([TOKENS]), 9)
        assert len(fetched(server)) == 2
        path.write_bytes(whole)
        assert stream.windows(np.array([TOKENS]), 1).item() == TOKENS


EMPTY = file_header("llmc", "uint16", 0)


class Hub(MemoryFileSystem):
    """File system with the digests of large files in its listings, as the hub has them."""

    protocol = "likehub"
    store: ClassVar[dict] = {}
    digests: ClassVar[dict[str, str]] = {}

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("likehub://", "memory://"))

    def ls(self, path, detail=True, **kwargs):
        entries = super().ls(path, detail=True, **kwargs)
        for entry in entries:
            name = entry["name"].rpartition("/")[2]
            entry["lfs"] = {"sha256": self.digests[name]} if name in self.digests else None
            entry["ETag"] = hashlib.md5(self.cat_file(entry["name"])).hexdigest()
        return entries


@pytest.fixture
def hub(tmp_path):
    folder = write_llmc(tmp_path / "fineweb")
    fsspec.register_implementation("likehub", Hub, clobber=True)
    system = Hub()
    for path in folder.iterdir():
        system.pipe_file(f"/set/{path.name}", path.read_bytes())
        if path.suffix == ".bin":
            Hub.digests[path.name] = file_sha256(path)
    yield system
    Hub.digests.clear()
    Hub.store.clear()


def test_the_hubs_digests_are_compared(hub, tmp_path):
    data = TokenDataset("likehub://set", tmp_path, 1.0)
    assert data.manifest == load_manifest(tmp_path / "fineweb")
    stream = data.stream("train", T)
    assert stream.windows(np.array([207]), 3).tolist() == [[207, 208, 209]]
    assert {p.stem for p in (tmp_path / "cache").glob("*.bin")} <= set(Hub.digests.values())
    content = bytearray(hub.cat_file("/set/fineweb_train_000004.bin"))
    content[-1] ^= 1
    hub.pipe_file("/set/fineweb_train_000004.bin", bytes(content))
    with pytest.raises(UserError, match=r"000004\.bin .*expected SHA-256 \w{64}, found \w{64}"):
        stream.windows(np.array([3 * TOKENS]), 3)


def test_a_shard_that_is_published_again_is_another_file(hub, tmp_path):
    Hub.digests.clear()
    first = TokenDataset("likehub://set", tmp_path, 1.0).stream("train", T)
    assert first.windows(np.array([0]), 2).tolist() == [[0, 1]]
    path = "/set/fineweb_train_000001.bin"
    content = bytearray(hub.cat_file(path))
    content[1024] = 7
    hub.pipe_file(path, bytes(content))
    again = TokenDataset("likehub://set", tmp_path, 1.0).stream("train", T)
    assert again.windows(np.array([0]), 2).tolist() == [[7, 1]]


def test_a_listing_that_has_changed_is_refused_on_resume(hub, tmp_path):
    saved = TokenDataset("likehub://set", tmp_path, 1.0).stream("train", T).stamp
    TokenDataset("likehub://set", tmp_path, 1.0).stream("train", T).check_stamp(saved)
    path = "/set/fineweb_train_000005.bin"
    half = file_header("llmc", "uint16", 100) + b"\0" * 200
    hub.pipe_file(path, half)
    changed = TokenDataset("likehub://set", tmp_path, 1.0).stream("train", T)
    with pytest.raises(UserError, match="have changed since the checkpoint was saved"):
        changed.check_stamp(saved)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"fineweb_train_000001.bin": b"x" * 2000}, "the magic number 2021161080"),
        ({"fineweb_train_000007.bin": EMPTY}, "expected the shard after"),
        ({"other_train_000001.bin": b"x" * 2000}, "another data set"),
        ({"fineweb_train_000005.bin": b""}, " 0 bytes, fewer than the 1,024"),
    ],
)
def test_shards_that_are_none(change, line, hub, tmp_path):
    for name, content in change.items():
        hub.pipe_file(f"/set/{name}", content)
    with pytest.raises(UserError, match=line):
        TokenDataset("likehub://set", tmp_path, 1.0)


@pytest.mark.slow
def test_the_fetching_threads_end_with_their_cache(server, tmp_path):
    others = threading.enumerate()

    def fetching() -> list[str]:
        threads = set(threading.enumerate()).difference(others)
        return [t.name for t in threads if "_fetch_all" in t.name]

    made = reader(server.url, tmp_path, 100)
    next(iter(made.train_loader))
    assert fetching()
    del made
    gc.collect()
    until = time.monotonic() + 5
    while fetching() and time.monotonic() < until:
        time.sleep(0.01)
    assert fetching() == []
