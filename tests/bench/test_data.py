"""`gpt-lightning bench data` on a short dataset."""

import contextlib

import pytest

from gpt_lightning.bench import data
from gpt_lightning.tables.worker import SkippedError, call

SMALL = {"device": "cpu", "block_size": 32, "batch_size": 4, "n_tokens": 5_000, "workers": 0}


def measured(tmp_path, **settings):
    with contextlib.chdir(tmp_path):
        return call(data.measure_data, SMALL | {"batches": 10, "warmup": 2} | settings)


@pytest.mark.parametrize("order", data.ORDERS)
def test_rates_agree_with_each_other(order, tmp_path):
    row = measured(tmp_path, order=order)
    tokens = 4 * 32
    assert row["tokens_per_sec"] > 0
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

    from gpt_lightning.data.windows import DatasetWindows

    read = DatasetWindows.read
    monkeypatch.setattr(
        DatasetWindows, "read", lambda self, *args: time.sleep(0.005) or read(self, *args)
    )
    assert measured(tmp_path, order="sequential")["tokens_per_sec"] < 4 * 32 / 0.005
    with pytest.raises(SkippedError, match="n_tokens is 129; a batch takes 130"):
        measured(tmp_path, order="sequential", n_tokens=129)
