"""`gpt-lightning bench data` on a short dataset."""

import itertools
import json

import numpy as np
import pytest

from gpt_lightning.bench import data
from gpt_lightning.cli import main
from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import call

SMALL = {"device": "cpu", "block_size": 32, "batch_size": 4, "n_tokens": 5_000, "workers": 0}


def measured(tmp_path, **settings):
    more = {"batches": 10, "warmup": 2, "data_dir": str(tmp_path)}
    return call(data.measure_data, SMALL | more | settings)


@pytest.mark.parametrize("order", data.ORDERS)
def test_rates_agree_with_each_other(order, tmp_path):
    row = measured(tmp_path, order=order)
    tokens = 4 * 32
    assert row["tokens_per_sec"] > 0
    # at most ten batches are a part of one each, and the rate is the median's
    assert row["tokens_per_sec"] >= tokens / row["batch_max_ms"] * 1e3 * (1 - 1e-9)
    # 33 tokens in a window, 32 inputs, 32 targets
    assert row["bytes_written_per_token"] == 8 * (33 + 32 + 32) / 32
    assert row["written_gb_per_sec"] * 1e9 == pytest.approx(
        row["tokens_per_sec"] * row["bytes_written_per_token"]
    )
    assert row["floor_tokens_per_sec"] == pytest.approx(tokens / row["floor_ms"] * 1e3)
    assert row["floor_share"] == pytest.approx(row["tokens_per_sec"] / row["floor_tokens_per_sec"])
    assert row["copy_ms"] is None  # batches are there already


def test_one_stall_changes_neither_the_rate_nor_the_share(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "floor_ms", lambda *args: [0.5] * 30)
    steady = {"batch": [1.0] * 29 + [1000.0], "total": [1.0] * 29 + [1000.0]}
    monkeypatch.setattr(data.timing, "record", lambda *args: (steady, {"total": 1.0}))
    row = measured(tmp_path, order="sequential")
    assert row["tokens_per_sec"] == 4 * 32 / 1.0 * 1e3
    assert row["floor_share"] == 0.5


def test_a_slow_source_is_seen(tmp_path, monkeypatch):
    import time

    from gpt_lightning.data.shards import DatasetWindows

    read = DatasetWindows.read
    monkeypatch.setattr(
        DatasetWindows, "read", lambda self, *args: time.sleep(0.005) or read(self, *args)
    )
    assert measured(tmp_path, order="sequential")["tokens_per_sec"] < 4 * 32 / 0.005


def test_datasets_of_two_lengths_are_two_datasets(tmp_path):
    lengths = [
        len(data.corpus(0, "sequential", 32, n_tokens, tmp_path).stream) for n_tokens in (500, 900)
    ]
    assert lengths == [500, 900]


def test_the_mixture_has_its_weights(tmp_path):
    source = data.make_source("mixture", 32, 5_000, tmp_path)
    assert (source.counts(10_000) / 10_000).tolist() == list(data.WEIGHTS)


def test_batches_do_not_end(tmp_path):
    loader = TrainLoader(data.make_source("sequential", 32, 500, tmp_path), batch_size=4)
    first = list(itertools.islice(data.forever(loader), 2 * len(loader)))
    np.testing.assert_array_equal(first[0][0], first[len(loader)][0])


@pytest.mark.slow
def test_the_command_writes_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    argv = "bench data --device cpu --orders shuffled --workers 1 --batch-sizes 2 --block_sizes 16"
    assert main([*argv.split(), "--n-tokens", "2000", "--batches", "5", "--warmup", "1"]) == 0
    (path,) = sweep.ROOT.glob("data/*/results.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["status"], row["workers"], row["order"]) == ("ok", 1, "shuffled")
    assert "shuffled" in capsys.readouterr().out
