"""`gpt-lightning bench overhead` on a tiny model."""

import time

import pytest
import torch

from gpt_lightning.bench import overhead
from gpt_lightning.tables.worker import call

ROW = {"device": "cpu", "dtype": "fp32", "compile": False, "batch": 2, "context": 8}
ROW |= {"size": "1/1/16", "steps": 2, "warmup": 1, "rounds": 2}


def measure(a: str, b: str, **settings) -> dict:
    return call(overhead.measure_overhead, ROW | {"pair": f"{a}:{b}"} | settings)


def test_all_loops_do_the_same_work_from_the_same_weights_and_leave_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [measure("raw", "norm"), measure("trainer", "callbacks", rounds=1)]
    losses = {row[name] for row in rows for name in ("a_loss", "b_loss")}
    assert len(losses) == 1, losses  # the same sums in the same order: bit for bit
    longer = measure("raw", "trainer", steps=8, rounds=1)
    assert longer["a_loss"] == longer["b_loss"] < losses.pop()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_slow_callback_is_measured(monkeypatch):
    class Slow(overhead.StepProgress):
        def on_train_batch_end(self, *args, **kwargs):
            super().on_train_batch_end(*args, **kwargs)
            time.sleep(0.05)

    monkeypatch.setattr(overhead, "StepProgress", Slow)
    found = measure("raw", "callbacks", dtype="bf16")
    assert found["b_ms"] > 50
    assert found["difference_ms"] > 25
    assert found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert found["graphs"] == 0 or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found["a_loss"] == pytest.approx(found["b_loss"], rel=1e-6)
    assert found["a_loss"] < 9.5  # ln 10,000 is 9.2
