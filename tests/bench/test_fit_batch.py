"""`gpt-lightning bench fit-batch`: the search, its report, and one trial."""

import json
import multiprocessing
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from gpt_lightning.bench import fit_batch, fits
from gpt_lightning.bench.memory_meter import limit_memory
from gpt_lightning.cli import main
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import call, failure

CPU = torch.device("cpu")

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 20
  accumulate_grad_batches: 4
  val_check_interval: 40
  limit_val_batches: 6
  check_val_every_n_epoch: null
  gradient_clip_val: 1.0
model:
  config: {n_layer: 1, n_head: 2, n_embd: 16, block_size: 32, vocab_size: 65, dropout: 0.1}
  compile: false
  warmup_steps: 1000
data: {dataset: nowhere, batch_size: 12}
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "machine_record", lambda argv, device: {"device": "a toy"})
    Path("run.yaml").write_text(CONFIG)


@pytest.fixture
def machine(monkeypatch):
    """A machine that some batch fits; keeps what it was asked."""
    asked: list[dict] = []

    def make(limit: int, status: str = "out of memory") -> list[dict]:
        def isolated(address, configuration, timeout_s):
            assert address == fit_batch.BENCH.measure
            json.dumps(configuration)  # goes through a command line
            asked.append(configuration)
            if configuration["batch"] > limit:
                return {"status": status, "note": "no room"}
            speed = {"tokens_per_sec": 1000.0 - configuration["batch"], "micro_batch_ms": 1.0}
            return {"status": "ok", "note": "", "peak_memory_gib": 1.0, **speed}

        monkeypatch.setattr(sweep, "isolated", isolated)
        return asked

    return make


ROW = {"context": 32, "steps": 2, "limit_gib": 1.5}


def bench(*args: str) -> int:
    return main(["bench", "fit-batch", "--config", "run.yaml", *args])


def proposed(printed: str) -> list[str]:
    return shlex.split(re.search(r"^settings +(.*)$", printed, re.M)[1])


# ---- the search ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [1, 12])
@pytest.mark.parametrize("most", [1, 12, 64, 1000])
def test_the_search_finds_the_largest_to_an_eighth(most, first):
    for limit in range(most + 3):
        asked = []

        def fits(batch, limit=limit, asked=asked):
            asked.append(batch)
            return batch <= limit

        largest, refused = fit_batch.search(fits, most, first)
        assert asked[0] == min(first, most)
        assert len(set(asked)) == len(asked)
        assert max(asked) <= most
        if limit >= most:
            assert (largest, refused) == (most, None)
        elif limit == 0:
            assert (largest, refused) == (0, 1)
            assert asked == ([12, 6, 3, 1] if min(first, most) == 12 else [1])
        else:
            assert largest <= limit < refused
            assert refused - largest <= max(1, largest // 8)


# ---- the command ---------------------------------------------------------------------------------


def test_the_settings_have_the_same_tokens_and_parse(machine, capsys):
    asked = machine(limit=29)
    assert bench() == 0
    assert [trial["batch"] for trial in asked] == [12, 24, 48, 36, 30, 27]  # configured: 12
    printed = capsys.readouterr().out
    assert "largest     27 sequences x 32 tokens per micro-batch fit; 30 does not" in printed
    # 12 x 4 = 48 sequences a step: 24 is the largest divisor that fits
    options = proposed(printed)
    assert options == [
        *("--data.batch_size", "24"),
        *("--trainer.accumulate_grad_batches", "2"),
        *("--trainer.val_check_interval", "20"),
        *("--trainer.limit_val_batches", "3"),
    ]
    assert "1,536 tokens = 24 sequences x 32 tokens x 2 accumulated x 1 ranks" in printed
    assert bench(*options) == 0  # nothing is left to change
    assert proposed(capsys.readouterr().out)[:2] == ["--data.batch_size", "24"]
    (first, second) = sorted(Path("lightning_logs/bench/fit-batch").iterdir())
    report = json.loads((first / "results.json").read_text())
    assert [row["status"] for row in report["rows"]][:6] == [
        *("ok", "ok"),
        *["out of memory"] * 3,
        "ok",
    ]
    assert any("--data.batch_size 24" in note for note in report["notes"])
    assert "| 27 |" in (second / "results.md").read_text()


@pytest.mark.parametrize(
    ("tokens", "line"),
    [("1536", "1,536 tokens = 16 sequences x 32 tokens x 3"), ("384", "384 tokens = 12 seq")],
)
def test_tokens_per_step_decide(machine, capsys, tokens, line):
    asked = machine(limit=17)
    options = ["--trainer.accumulate_grad_batches=1", "--trainer.val_check_interval=24"]
    assert bench(f"--data.tokens_per_step={tokens}", *options) == 0
    assert max(trial["batch"] for trial in asked) <= int(tokens) // 32  # more is of no use
    printed = capsys.readouterr().out
    assert line in printed
    assert "--trainer.accumulate_grad_batches" not in proposed(printed)


def test_where_nothing_fits_settings_that_need_less_are_proposed(machine, capsys):
    machine(limit=0)
    assert bench() == 1
    assert "not one sequence fits" in (printed := capsys.readouterr().out)
    assert "try --model.config.checkpointing true" in printed


@pytest.mark.parametrize(("status", "limit", "crashed"), [("error", 0, 12), ("crashed", 12, 24)])
def test_a_crash_says_nothing_about_memory(machine, capsys, status, limit, crashed):
    asked = machine(limit, status)
    assert bench() == 2
    assert asked[-1]["batch"] == crashed  # no search between a crash and a trial that fits
    printed, error = capsys.readouterr()
    assert f"the trial of {crashed} sequences failed ({status}: no room), not for lack" in error
    assert "largest" not in printed
    (rows,) = Path("lightning_logs/bench/fit-batch").glob("*/rows.jsonl")
    assert f'"batch": {crashed}' in rows.read_text()


def test_an_interrupted_search_goes_on(machine):
    asked = machine(limit=29)
    assert bench() == 0
    before = len(asked)
    assert bench("--resume") == 0
    assert len(asked) == before
    assert len(list(sweep.ROOT.glob("fit-batch/*"))) == 1


# ---- a trial -------------------------------------------------------------------------------------


def test_a_trial_trains(monkeypatch):
    monkeypatch.setattr(fit_batch, "limit_memory", lambda device, gib, share: gib)
    config = fits.parse_fit(["--config=run.yaml"])
    step = fits.step_of(config)
    trial = json.loads(json.dumps(fits.plain_training(config, step)))
    found = call(fit_batch.measure_batch, trial | ROW | {"batch": 3})
    assert found["limit_gib"] == 1.5
    assert 0.05 < found["peak_memory_gib"] < 20
    rate = 3 * 32 / found["micro_batch_ms"] * 1e3
    assert found["tokens_per_sec"] == pytest.approx(rate)


def in_a_fork(work) -> int:
    """Runs work in a process of its own; returns its exit code."""
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def grow(step_mib: int) -> None:
    kept = []
    while True:
        kept.append(torch.ones(step_mib * 2**18))


@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_trial_on_a_cpu_ends_at_its_limit():
    def work() -> None:
        status = Path("/proc/self/status").read_text()
        data_kib = int(re.search(r"VmData:\s+(\d+)", status)[1])
        assert limit_memory(CPU, data_kib / 2**20 + 0.25) is not None
        try:
            grow(64)
        except Exception as error:
            os._exit(7 if failure(error)["status"] == "out of memory" else 1)

    assert in_a_fork(work) == 7
