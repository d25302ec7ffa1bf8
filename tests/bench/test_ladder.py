"""`gpt-lightning bench ladder` on a tiny model."""

import json

import pytest

from gpt_lightning.bench import fits, ladder
from gpt_lightning.cli import main
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import measured

TINY = [
    "--model.config.n_layer=1",
    "--model.config.n_head=2",
    "--model.config.n_embd=16",
    "--model.config.vocab_size=300",
    "--data.block_size=32",
    "--trainer.accelerator=cpu",
]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ladder, "best_peak", lambda device: 1e11)
    monkeypatch.setattr(sweep, "isolated", lambda address, row, timeout_s: measured(address, row))


def results() -> dict:
    (path,) = sweep.ROOT.glob("ladder/*/results.json")
    return json.loads(path.read_text())


def test_a_rung_has_the_settings_of_all_before_it(monkeypatch):
    seen = []

    def pretend(argv):
        seen.append(dict(s.removeprefix("--").split("=") for s in argv))
        raise ValueError("nothing is measured here")

    monkeypatch.setattr(fits, "timed_fit", pretend)
    assert main(["bench", "ladder", "--rungs", "fp32,bf16,fused-optimizer", *TINY]) == 1
    fp32, bf16, last = seen
    assert fp32["trainer.precision"] == "32-true"
    assert fp32["model.config.attention"] == "naive"
    assert bf16 == fp32 | {"trainer.precision": "bf16-mixed"}
    assert last["model.compile"] == "true"
    assert last["model.config.attention"] == "sdpa"
    assert last["model.config.vocab_size"] == "384"  # 300 up to a multiple of 128
    assert last["model.fused"] == "true"


def test_a_rung_stands_beside_the_first_and_the_one_before_it(monkeypatch):
    rates = {"fp32": (100.0, 1.0), "bf16": (300.0, 2.0), "flash": (600.0, 2.0)}

    def isolated(address, configuration, timeout_s):
        if configuration["rung"] == "compile":
            return {"status": "error", "note": "planted"}
        rate, peak = rates[configuration["rung"]]
        numbers = {"tokens_per_sec": rate, "mfu": 0.2, "peak_tflops_per_sec": peak}
        return {"status": "ok", "note": "", **numbers}

    monkeypatch.setattr(sweep, "isolated", isolated)
    assert main(["bench", "ladder", "--rungs", "fp32,bf16,compile,flash", *TINY]) == 1
    first, bf16, failed, flash = results()["rows"]
    assert (first["mfu"], first["speedup"]) == (0.2, None)
    assert (bf16["mfu"], bf16["speedup"], bf16["speedup_in_all"]) == (0.4, 3.0, 3.0)
    assert failed["speedup"] is None
    assert (flash["mfu"], flash["speedup"], flash["speedup_in_all"]) == (0.4, 2.0, 6.0)
