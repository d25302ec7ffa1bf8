"""Datasets behind a real HTTP server on loopback that is slow, cuts connections, and lies."""

import multiprocessing
import threading
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
from gpt_lightning.data.loader import Place, TrainLoader
from gpt_lightning.data.readers import Reader
from gpt_lightning.data.settings import DataSettings
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.errors import OutageError, UserError
from gpt_lightning.remote import attempts
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.training.fit import default_callbacks, run_cli

SHARD, T = 1_000, 16  # tokens; a shard has 2,128 bytes


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


def reader(address: str, data: Path, place: Place | None = None, **settings) -> Reader:
    chosen = {"dataset": address, "block_size": T, "batch_size": 4, "seed": 1337, **settings}
    return Reader(TokenDataset(address, data, 0.5), DataSettings(**chosen), place or Place())


def loader(server: Server, tmp_path: Path, **more) -> TrainLoader:
    return reader(server.url, tmp_path / "data", **more).train_loader


def epoch(loader: TrainLoader) -> np.ndarray:
    """The windows of the rest of an epoch, (n, B, T)."""
    return np.stack([x.numpy() for x, _ in loader])


def cached(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "data" / "cache").rglob("*.npy"))


def fetched(server: Server) -> list[str]:
    return [name for name in server.requests if name.endswith(".npy")]


# ---- the order -----------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["sequential", "random"])
def test_the_windows_are_those_of_the_folder(order, server, dataset, tmp_path):
    local = reader(str(dataset), tmp_path, order=order).train_loader
    away = loader(server, tmp_path, order=order)
    assert np.array_equal(epoch(away), epoch(local))
    assert away.identity() == local.identity()
    assert len(fetched(server)) == len(set(fetched(server)))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_shuffled_reads_shard_after_shard_whoever_reads(workers, server, tmp_path):
    alone = loader(server, tmp_path)
    epochs = [epoch(alone) for _ in range(2)]
    assert not np.array_equal(*epochs)
    assert len(fetched(server)) == len(set(fetched(server)))
    server.requests.clear()
    (tmp_path / "data").rename(tmp_path / "old")
    workers_read = loader(server, tmp_path, num_workers=workers)
    assert np.array_equal([epoch(workers_read) for _ in range(2)], epochs)
    assert len(fetched(server)) == len(set(fetched(server)))  # once each, whoever asked
    ranks = [
        epoch(loader(server, tmp_path, batch_size=2, place=Place(rank=rank, world=2)))
        for rank in range(2)
    ]
    together = np.stack(ranks, axis=2).reshape(epochs[0].shape)
    assert np.array_equal(together, epochs[0])
    for position in (1, 61, 62, 63, 150):  # 62.4 windows a shard
        resumed = loader(server, tmp_path, batch_size=1)
        resumed.load_state_dict({"epoch": 1, "window": position})
        rest = epochs[1].reshape(-1, T)[position:]
        assert np.array_equal(epoch(resumed)[: len(rest), 0], rest)


def test_a_resume_where_the_shuffle_is_another_is_refused(server, dataset, tmp_path):
    """The local dataset has the same digest, and permutes all windows together."""
    local = reader(str(dataset), tmp_path).train_loader.identity()
    away = loader(server, tmp_path).identity()
    assert {key for key in away if away[key] != local[key]} == {"shard by shard"}


# ---- shards that come --------------------------------------------------------------------------


def test_training_starts_when_the_first_shard_is_there_and_the_next_one_comes(server, tmp_path):
    slow = sorted(path.name for path in server.folder.glob("train-*.npy"))[1:]
    server.delay_s = dict.fromkeys(slow, 0.5)
    batches = iter(loader(server, tmp_path, order="sequential"))
    begin = time.monotonic()
    next(batches)
    assert time.monotonic() - begin < 0.4
    time.sleep(0.8)
    assert [path.name for path in cached(tmp_path)] == ["train-00000.npy", "train-00001.npy"]


def test_the_last_shard_expects_the_first_of_the_next_epoch(server, tmp_path):
    away = loader(server, tmp_path)
    count = away.source.n_windows
    (first,) = away.source.order.starts(1, 0, 1)
    away.load_state_dict({"epoch": 0, "window": count - 8})
    expected = []
    away.source.stream.expect = expected.append
    next(iter(away))
    stream = away.source.stream
    assert [stream.shard_at(start) for start in expected] == [stream.shard_at(first)]


def test_the_shards_of_a_step_are_there_before_it_begins(server, tmp_path):
    place = Place(accumulate=25, world=2, rank=1)  # 200 windows of 16 tokens: 3.2 shards
    away = loader(server, tmp_path, place=place, order="sequential")
    stream = away.source.stream
    stream.expect = lambda start: None  # what is fetched ahead may come later
    batches = iter(away)
    for following in (3, 6, 9, 0):  # an epoch has four steps
        away.fetch_step()
        server.busy = dict.fromkeys([path.name for path in server.folder.glob("*")], 1000)
        for _ in range(25):
            next(batches)
        for path in cached(tmp_path):
            path.unlink()
        stream._fetched.clear()
        with pytest.raises(OutageError, match=f"train-{following:05}"):
            away.fetch_step()
        server.busy = {}


def test_a_window_needs_both_shards_that_it_crosses(server, tmp_path):
    loader(server, tmp_path).source.stream.fetch(np.array([SHARD - 10]), T + 1)
    assert [path.name for path in cached(tmp_path)] == ["train-00000.npy", "train-00001.npy"]


def read_all(stream: TokenStream, queue) -> None:
    queue.put(stream.windows(np.array([0]), len(stream)).sum())


def test_processes_share_the_copies(server, tmp_path):
    """A slow server: each of them finds the file of another while it is written."""
    server.delay_s = {path.name: 0.01 for path in server.folder.glob("*.npy")}
    context = multiprocessing.get_context("fork")
    stream = reader(server.url, tmp_path / "data").train_stream
    queue = context.Queue()
    processes = [context.Process(target=read_all, args=(stream, queue)) for _ in range(3)]
    for process in processes:
        process.start()
    sums = {queue.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert len(sums) == 1
    assert len(fetched(server)) == len(set(fetched(server)))
    assert not [path for path in cached(tmp_path) if path.name.startswith(".")]


def test_threads_share_the_copies(server, tmp_path):
    server.delay_s = {"train-00000.npy": 0.3}
    stream = reader(server.url, tmp_path / "data").train_stream
    for _ in range(3):
        threading.Thread(target=stream._fetch_ahead, args=(0,)).start()
    stream.windows(np.array([0]), 9)
    assert fetched(server) == ["train-00000.npy"]


# ---- what goes wrong ---------------------------------------------------------------------------


def test_a_corrupted_shard_is_never_used_and_a_lost_one_fetched_again(server, dataset, tmp_path):
    server.wrong, server.cut = {"train-00000.npy": 2}, {"train-00001.npy": 3, "manifest.json": 2}
    away = loader(server, tmp_path, order="sequential")
    local = reader(str(dataset), tmp_path, order="sequential").train_loader
    assert np.array_equal(epoch(away), epoch(local))
    server.wrong = {"val-00000.npy": 1000}
    stream = reader(server.url, tmp_path / "data").stream("val")
    with pytest.raises(UserError, match=r"val-00000\.npy: expected SHA-256 \w{64}, found \w{64}"):
        stream.windows(np.array([0]), 16)
    assert "val-00000.npy" not in [path.name for path in cached(tmp_path)]


@pytest.mark.parametrize("damage", ["bit", "half", "empty"])
def test_a_damaged_copy_is_fetched_again(damage, server, dataset, tmp_path):
    reader(server.url, tmp_path / "data").train_stream.windows(np.array([0]), 16)
    (kept,) = cached(tmp_path)
    content = bytearray(kept.read_bytes())
    content[-1] ^= 1
    kept.write_bytes({"bit": content, "half": content[:999], "empty": b""}[damage])
    server.requests.clear()
    again = reader(server.url, tmp_path / "data").train_stream
    local = reader(str(dataset), tmp_path).train_stream
    first = np.array([0])
    assert np.array_equal(again.windows(first, 999), local.windows(first, 999))
    assert fetched(server) == ["train-00000.npy"]


def test_another_dataset_at_the_same_address_has_other_copies(server, dataset, tmp_path):
    reader(server.url, tmp_path / "data").train_stream.windows(np.array([0]), 16)
    other = tmp_path / "other.txt"
    other.write_text("something else, " * 500)
    prepare_text(other, dataset, "byte", shard_tokens=SHARD, overwrite=True)
    again = reader(server.url, tmp_path / "data").train_stream.windows(np.array([0]), 15)
    assert bytes(again[0].tolist()) == b"something else,"
    assert len(cached(tmp_path)) == 2


def test_what_is_not_there_is_said_at_once(server, tmp_path):
    with pytest.raises(UserError, match=r"/nowhere/manifest\.json does not exist"):
        TokenDataset(f"{server.url}/nowhere", tmp_path)
    with pytest.raises(UserError, match="gcsfs"):
        TokenDataset("gs://bucket/name", tmp_path)  # needs a package that is not installed


def test_addresses():
    assert is_remote("https://example.org/data")
    assert is_remote("s3://bucket/data")
    assert not is_remote("file:///data/x")
    assert not is_remote("data/x")


def test_a_file_url_is_a_folder(dataset, tmp_path):
    local = TokenDataset(str(dataset), tmp_path)
    assert TokenDataset(f"file://{dataset}", tmp_path).manifest == local.manifest


# ---- fit ---------------------------------------------------------------------------------------


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
        "--data.batch_size=15",
        "--trainer.accumulate_grad_batches=2",
        "--data.patience=0",
        "--trainer.max_steps=20",
        "--trainer.val_check_interval=40",
        "--trainer.check_val_every_n_epoch=null",
    ]
    assert main(["fit", *options, "--run_name=whole", "--data.data_dir=a"]) == 0
    away = [*options, "--run_name=away", "--data.data_dir=b"]
    with pytest.raises(OutageError, match=r"cannot fetch http://127.0.0.1:.*503"):
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
