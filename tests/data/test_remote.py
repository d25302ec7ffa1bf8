"""Streaming from a real HTTP server on loopback that is slow, cuts connections, and lies."""

import hashlib
import time
from pathlib import Path

import numpy as np
import pytest
from lightning import Callback
from prepared import prepare_text
from served import Server, serving
from tiny_fit import TINY_MODEL

from gpt_lightning.cli import main
from gpt_lightning.data.dataset import TokenDataset, is_remote
from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.windows import DatasetWindows
from gpt_lightning.errors import OutageError, UserError
from gpt_lightning.remote import attempts
from gpt_lightning.remote.files import PART_BYTES, fetch_file
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.training.fit import default_callbacks, run_cli

SHARD = 1_000  # tokens: 2,128 bytes
RUNS = "whole", "away"


@pytest.fixture
def dataset(tmp_path, text_file) -> Path:
    """Shards of 1,000 byte tokens: some 14 for training."""
    prepare_text(text_file, tmp_path / "served", "byte", shard_tokens=SHARD)
    return tmp_path / "served"


@pytest.fixture
def server(dataset, monkeypatch):
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.001)
    with serving(dataset) as server:
        yield server


def opened(server: Server, tmp_path: Path, limit_gb: float = 1.0) -> TokenDataset:
    return TokenDataset(server.url, tmp_path / "data", limit_gb)


def loader(dataset: TokenDataset, name: str = "shuffled", **kwargs) -> TrainLoader:
    stream = dataset.stream("train", 16)
    order = WindowOrder(name, len(stream), 16, 1337, stream.shard_tokens)
    return TrainLoader(DatasetWindows(stream, order), batch_size=4, **kwargs)


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data" / "cache").rglob("*.npy"))


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("sequential", 0),
        ("shuffled", 0),
        ("random", 0),
        pytest.param("shuffled", 2, marks=pytest.mark.slow),
    ],
)
def test_the_windows_are_those_of_the_folder(name, workers, server, dataset, tmp_path):
    local = loader(TokenDataset(str(dataset), tmp_path, 1.0), name)
    away = loader(opened(server, tmp_path), name, num_workers=workers)
    for (x, y), (u, v) in zip(local, away, strict=True):
        assert np.array_equal(x, u)
        assert np.array_equal(y, v)
    fetched = [name for name in server.requests if name.endswith(".npy")]
    assert len(fetched) == len(set(fetched))  # once each, whoever asked


def test_training_starts_when_the_first_shard_is_there(server, tmp_path):
    slow = sorted(path.name for path in server.folder.glob("train-*.npy"))[1:]
    server.delay_s = dict.fromkeys(slow, 0.5)
    batches = iter(loader(opened(server, tmp_path), "sequential"))
    begin = time.monotonic()
    next(batches)
    assert time.monotonic() - begin < 0.4
    time.sleep(0.8)  # meanwhile the next ones are fetched: that is asked for ahead of need
    assert len(cached(tmp_path)) >= 2


def test_the_shards_of_a_step_are_there_before_it_begins(server, tmp_path):
    step = {"accumulate": 25, "world": 2, "rank": 1}  # 200 windows of 16 tokens: 3.2 shards
    away = loader(opened(server, tmp_path), "sequential", **step)
    away.source.look_ahead = lambda *args: None  # what is fetched ahead may come later
    batches = iter(away)
    for following in (3, 6, 9, 0):  # an epoch has four steps
        away.fetch_step()
        server.busy = dict.fromkeys([path.name for path in server.folder.glob("*")], 1000)
        for _ in range(25):
            next(batches)
        for path in cached(tmp_path):
            path.unlink()
        with pytest.raises(OutageError, match=f"train-{following:05}"):
            away.fetch_step()
        server.busy = {}


def test_a_corrupted_shard_is_never_used_and_a_lost_one_fetched_again(server, dataset, tmp_path):
    server.wrong, server.cut = {"train-00000.npy": 1}, {"train-00001.npy": 3, "manifest.json": 2}
    away = loader(opened(server, tmp_path), "sequential")
    local = loader(TokenDataset(str(dataset), tmp_path, 1.0), "sequential")
    for _, (x, u) in zip(range(20), zip(local, away, strict=False), strict=False):
        assert np.array_equal(x[0], u[0])
    server.wrong = {"val-00000.npy": 1000}
    stream = opened(server, tmp_path).stream("val", 16)
    with pytest.raises(UserError, match=r"val-00000\.npy .*expected SHA-256 \w{64}, found \w{64}"):
        stream.windows(np.array([0]), 16)


def test_a_shard_larger_than_the_cache_is_refused(server, tmp_path):
    with pytest.raises(UserError, match=r"data.cache_limit_gb is 1e-06, but train-00000\.npy"):
        opened(server, tmp_path, 1e-6).stream("train", 16)


def test_what_is_not_there_is_said_at_once(server, tmp_path):
    with pytest.raises(UserError, match=r"/nowhere/manifest\.json does not exist"):
        TokenDataset(f"{server.url}/nowhere", tmp_path, 1.0)
    with pytest.raises(UserError, match="s3"):
        TokenDataset("s3://bucket/name", tmp_path, 1.0)  # needs a package that is not installed


def test_addresses():
    assert is_remote("https://example.org/data")
    assert is_remote("s3://bucket/data")
    assert not is_remote("file:///data/x")
    assert not is_remote("data/x")


def test_a_file_url_is_a_folder(dataset, tmp_path):
    local = TokenDataset(str(dataset), tmp_path, 1.0)
    assert TokenDataset(f"file://{dataset}", tmp_path, 1.0).manifest == local.manifest


@pytest.mark.slow
def test_fit_from_an_address(server, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fit = ["fit", *TINY_MODEL, f"--data.dataset={server.url}", "--data.batch_size=2"]
    fit += ["--data.patience=0"]
    assert main([*fit, "--trainer.max_steps=3"]) == 0
    assert server.url in capsys.readouterr().out
    server.cut = {"train-00003.npy": 1000}
    (tmp_path / "data" / "cache").rename(tmp_path / "old")
    assert main([*fit, "--data.order=sequential", "--trainer.max_steps=500"]) == 75
    assert capsys.readouterr().err.startswith("error: cannot fetch http://127.0.0.1")


def test_a_damaged_file_of_the_cache_is_fetched_again(server, dataset, tmp_path):
    data = opened(server, tmp_path)
    whole = data.stream("train", 16).windows(np.array([0]), 16)
    (kept,) = [p for p in (tmp_path / "data").rglob("*.npy") if p.stat().st_size]
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes(content)
    server.requests.clear()
    again = opened(server, tmp_path).stream("train", 16).windows(np.array([0]), 16)
    assert np.array_equal(again, whole)
    assert len([name for name in server.requests if name.endswith(".npy")]) == 1


def test_a_download_goes_on_where_it_was_cut(server, dataset, tmp_path):
    content = np.random.default_rng(0).bytes(3_000_000)
    (dataset / "large.bin").write_bytes(content)
    server.headers["Accept-Ranges"] = "bytes"
    server.cut["large.bin"] = 1
    received = []
    server.sent = received.append
    digest = hashlib.sha256(content).hexdigest()
    fetch_file(f"{server.url}/large.bin", tmp_path / "copy.bin", digest)
    assert (tmp_path / "copy.bin").read_bytes() == content
    half, *parts = received
    assert half == 1_500_000
    assert max(parts) <= PART_BYTES
    assert 1_500_000 <= sum(parts) < 3_000_000


class Away(Callback):
    """Takes the server away in the fourth step, and back when the command has ended."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 4 and batch_idx % 2:  # in the middle of it
            names = [path.name for path in self.server.folder.glob("train-*")]
            self.server.busy = dict.fromkeys(names, 10**6)


@pytest.mark.slow
def test_a_run_whose_server_stays_away_saves_ends_with_75_and_continues(
    server, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    options = [
        *TINY_MODEL,
        f"--data.dataset={server.url}",
        "--data.order=sequential",
        "--data.batch_size=15",
        "--trainer.accumulate_grad_batches=2",
        "--data.patience=0",
        "--trainer.max_steps=20",
        "--trainer.val_check_interval=40",
        "--trainer.check_val_every_n_epoch=null",
    ]
    assert main(["fit", *options, "--run_name=whole", "--data.data_dir=a"]) == 0
    away = [*options, "--run_name=away", "--data.data_dir=b"]
    with pytest.raises(OutageError, match=r"cannot fetch http://127.0.0.1:.* after 6 attempts"):
        run_cli(["fit", *away], callbacks=[*default_callbacks("fit"), Away(server)])
    saved = sorted(Path("lightning_logs/away/version_0/checkpoints").glob("*.ckpt"))
    assert saved
    assert read_checkpoint(saved[-1]).step >= 4
    server.busy = {}
    assert main(["fit", *away, "--resume=auto"]) == 0
    ends = [
        Path(f"lightning_logs/{n}/version_0/checkpoints").glob("*20-*") for n in ("whole", "away")
    ]
    whole, other = (read_checkpoint(next(end)) for end in ends)
    for name, weight in whole.weights.items():
        assert weight.equal(other.weights[name]), name
