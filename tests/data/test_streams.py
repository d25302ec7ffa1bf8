"""Token shards of other programs behind an address: found by a listing, without our manifest."""

import hashlib
import re
import subprocess
from pathlib import Path
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from served import Server, serving

from gpt_lightning.data.dataset import TokenDataset, load_manifest
from gpt_lightning.data.formats import file_header
from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256
from gpt_lightning.remote import attempts

N, TOKENS, T = 5, 208, 16


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)


def tokens() -> np.ndarray:
    return np.arange(N * TOKENS, dtype=np.uint16)


def write_llmc(folder: Path) -> Path:
    """Write shards of llm.c whose token i is i, and a file beside."""
    folder.mkdir()
    for index, part in enumerate(tokens().reshape(N, TOKENS), 1):
        path = folder / f"fineweb_train_{index:06d}.bin"
        path.write_bytes(file_header("llmc", "uint16", TOKENS) + part.tobytes())
    (folder / "README.md").write_text("shards")
    return folder


def fetched(server: Server) -> list[str]:
    return [name for name in server.requests if name.startswith("fineweb")]


def test_shards_of_llmc_by_address(tmp_path):
    folder = write_llmc(tmp_path / "fineweb")
    with serving(folder) as server:
        data = TokenDataset(server.url, tmp_path)
        assert data.manifest == load_manifest(folder)
        whole = data.stream("train", T).windows(np.array([0, 200]), 400)
        assert np.array_equal(whole, tokens()[np.array([[0], [200]]) + np.arange(400)])
        # headers alone were read, of all shards; then the first three shards
        assert fetched(server).count("fineweb_train_000002.bin") == 2
        assert fetched(server).count("fineweb_train_000005.bin") == 1


def test_a_wrong_token_names_the_address_and_the_copies(tmp_path):
    folder = write_llmc(tmp_path / "served")
    shard = folder / "fineweb_train_000002.bin"
    right = shard.read_bytes()
    shard.write_bytes(right[:-2] + b"\xff\xff")
    with serving(folder) as server:
        stream = TokenDataset(server.url, tmp_path).stream("train", T)
        with pytest.raises(UserError, match=f"{server.url} holds token 65535.*rm -r ") as caught:
            stream.windows(np.array([0]), 2 * TOKENS)
        shard.write_bytes(right)
        subprocess.run(re.findall("`(rm .*)`", str(caught.value))[0], shell=True, check=True)
        stream = TokenDataset(server.url, tmp_path).stream("train", T)
        assert np.array_equal(stream.windows(np.array([0]), 2 * TOKENS)[0], tokens()[: 2 * TOKENS])


def test_a_copy_of_another_size_never_appears(tmp_path):
    folder = write_llmc(tmp_path / "fineweb")
    with serving(folder) as server:
        stream = TokenDataset(server.url, tmp_path).stream("train", T)
        path = folder / "fineweb_train_000002.bin"
        whole = path.read_bytes()
        path.write_bytes(whole[:-100])
        server.requests.clear()
        with pytest.raises(
            UserError, match=r"000002\.bin: expected 208 tokens .*: check the file there"
        ):
            stream.windows(np.array([TOKENS]), 9)
        assert len(fetched(server)) == 1
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
    data = TokenDataset("likehub://set", tmp_path)
    assert data.manifest.splits["train"][3].sha256 == Hub.digests["fineweb_train_000004.bin"]
    stream = data.stream("train", T)
    assert stream.windows(np.array([207]), 3).tolist() == [[207, 208, 209]]
    content = bytearray(hub.cat_file("/set/fineweb_train_000004.bin"))
    content[-1] ^= 1
    hub.pipe_file("/set/fineweb_train_000004.bin", bytes(content))
    with pytest.raises(UserError, match=r"000004\.bin: expected SHA-256 \w{64}, found \w{64}"):
        stream.windows(np.array([3 * TOKENS]), 3)


@pytest.mark.parametrize("digest", [True, False])
def test_shards_that_are_published_again_are_another_dataset(digest, hub, tmp_path):
    """Without digests, if their sizes differ."""
    first = TokenDataset("likehub://set", tmp_path).stream("train", T)
    assert first.windows(np.array([0]), 2).tolist() == [[0, 1]]
    path = "/set/fineweb_train_000001.bin"
    content = bytearray(hub.cat_file(path))
    content[1024] = 7
    if digest:
        Hub.digests["fineweb_train_000001.bin"] = hashlib.sha256(content).hexdigest()
    else:
        Hub.digests.clear()
        content = file_header("llmc", "uint16", 1) + b"\7\0"
    hub.pipe_file(path, bytes(content))
    again = TokenDataset("likehub://set", tmp_path).stream("train", T)
    assert again.windows(np.array([0]), 1).tolist() == [[7]]
    assert again.digest != first.digest


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
        TokenDataset("likehub://set", tmp_path)
