"""`gpt-lightning bench overhead` on a tiny model."""

import time

import lightning as L
import pytest
import torch

from gpt_lightning.bench import overhead
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import call
from gpt_lightning.training.process import quiet_lightning

CPU = torch.device("cpu")
SHAPE = [1, 1, 16]
CONFIG = GPTConfig(*SHAPE, block_size=8, vocab_size=10_000)


@pytest.fixture(scope="module")
def work():
    """A module and its batch, as measure_overhead makes them."""
    quiet_lightning()
    torch.manual_seed(0)
    module = overhead.make_module(CONFIG, "fp32", False, CPU)
    x, y = (torch.randint(10_000, (2, 8)) for _ in range(2))
    return module, (x, y)


def test_all_loops_do_the_same_work(work):
    module, batch = work
    with torch.no_grad():
        untrained = float(module(*batch))
    losses = {}
    for name in overhead.LOOPS:
        loop = overhead.Loop(name, module, batch, "fp32")
        module.load_state_dict(loop._initial)
        assert len(loop.block(warmup=1, steps=3)) == 3
        losses[name] = loop.loss
        module.load_state_dict(loop._initial)
    assert len(set(losses.values())) == 1, losses  # the same sums in the same order: bit for bit
    assert losses["raw"] < untrained - 1e-4  # five steps were made


def test_blocks_begin_from_the_same_weights(work):
    loop = overhead.Loop("raw", *work, "fp32")
    losses = [loop.block(warmup=1, steps=1) and loop.loss for _ in range(2)]
    assert losses[0] == losses[1]
    loop.block(warmup=1, steps=4)
    assert loop.loss < losses[0]
    work[0].load_state_dict(loop._initial)


def test_a_slow_callback_is_measured(monkeypatch):
    class Slow(L.Callback):
        def on_train_batch_end(self, *args, **kwargs):
            time.sleep(0.05)

    fit_callbacks = overhead.fit_callbacks
    monkeypatch.setattr(overhead, "fit_callbacks", lambda: [*fit_callbacks(), Slow()])
    row = {"device": "cpu", "dtype": "bf16", "compile": False, "batch": 2, "context": 8}
    row |= {"a": "raw", "b": "callbacks", "shape": SHAPE, "vocab_size": 65}
    found = call(overhead.measure_overhead, row | {"steps": 2, "warmup": 1, "rounds": 2})
    assert found["b_ms"] > 50
    assert found["difference_ms"] > 25
    assert found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert found["graphs"] == 0 or torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert found["a_loss"] == pytest.approx(found["b_loss"], rel=1e-6)
    assert found["a_loss"] < 5  # ln 65 is 4.2


def test_no_file_is_left(work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overhead.Loop("callbacks", *work, "fp32").block(warmup=1, steps=1)
    assert not list(tmp_path.iterdir())


def test_a_size_brings_its_own_batch_and_vocabulary():
    _, found = sweep.read_options(overhead.BENCH, ["--device", "cpu", "--sizes", "char,small"])
    assert {(r["size"], r["batch"], r["context"], r["vocab_size"]) for r in found} == {
        ("char", 64, 256, 65),
        ("small", 4, 64, 10_000),
    }
    options = ["--sizes", "char", "--batches", "2,4", "--contexts", "8"]
    _, found = sweep.read_options(overhead.BENCH, ["--device", "cpu", *options])
    assert {(r["batch"], r["context"]) for r in found} == {(2, 8), (4, 8)}
    assert {(r["steps"], r["rounds"]) for r in found} == {(3, 5)}
