"""Scripts of benchmarks/ on tiny settings: data, peers, bench_ladder."""

import json

import pytest

from benchmarks import bench_ladder, data, peers
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import measured


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "isolated", lambda address, row, timeout_s: measured(address, row))


def rows(bench, words: str, code: int = 0) -> list[dict]:
    """Run a script and return the rows of its report."""
    module = bench.command[-1]
    assert sweep.run_bench(bench, ["-m", module, *words.split()]) == code
    (path,) = sweep.ROOT.glob("*/*/results.json")
    report = json.loads(path.read_text())
    assert report["machine"]["command"] == f"python -m {module} {words}"
    return report["rows"]


def test_the_loader_is_compared_with_its_floor(monkeypatch):
    monkeypatch.setattr(data, "BATCHES", 10)
    found = rows(data.BENCH, "--n_tokens 50000 --batch_sizes 4 --workers 0")
    assert [row["order"] for row in found] == ["sequential", "shuffled", "random"]
    for row in found:
        assert row["status"] == "ok", row["note"]
        share = row["tokens_per_sec"] / row["floor_tokens_per_sec"]
        assert row["floor_share"] == pytest.approx(share)
        assert row["floor_tokens_per_sec"] == pytest.approx(4 * 1024 / row["floor_ms"] * 1e3)


def test_a_stall_does_not_count_and_bursts_do():
    assert data.steady_mean([1.0] * 29 + [930.0]) == 1.0
    # four batches at once, from four workers: the fourth of them waits
    assert data.steady_mean([0.0, 0.0, 0.0, 4.0] * 20) == 1.0
    assert data.steady_mean([0.0, 0.0, 0.0, 0.0, 5.0] * 10) == 1.0  # ten parts, a burst each
    assert data.steady_mean([1.0, 2.0, 3.0]) == 2.0  # parts of one
    assert data.steady_mean([1.0, 3.0] * 10) == 2.0  # ten parts of two
    assert data.steady_mean([7.0]) == 7.0


def test_both_models_have_the_same_loss_and_their_own_times():
    pytest.importorskip("transformers")
    words = "--device cpu --sizes tiny --contexts 16 --dtypes fp32 --compile false --rounds 2"
    (row,) = rows(peers.BENCH, words)
    assert row["status"] == "ok", row["note"]
    assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
    for name in ("ours", "theirs"):
        assert row[f"{name}_tokens_per_sec"] == pytest.approx(4 * 16 / row[f"{name}_ms"] * 1e3)
        assert row[f"{name}_graphs"] == 0
    assert row["ours_loss"] == pytest.approx(row["theirs_loss"], abs=1e-5)


def test_a_rung_has_the_settings_and_the_speed_up_over_those_before_it(monkeypatch):
    rates = iter([(100.0, 1e12), (300.0, 2e12), None, (600.0, 2e12)])
    seen = []
    current = {}

    def next_peak(device):
        current["rate"] = next(rates)
        return current["rate"][1] if current["rate"] else 1e12

    def pretend(argv):
        seen.append(dict(words.removeprefix("--").split("=", 1) for words in argv))
        if current["rate"] is None:
            raise ValueError("planted")
        return {"tokens_per_sec": current["rate"][0], "mfu": 0.2}

    monkeypatch.setattr(bench_ladder, "best_peak", next_peak)
    monkeypatch.setattr(bench_ladder.fits, "timed_fit", pretend)
    words = "--device cpu --rungs fp32,tf32,bf16,compile,fused-optimizer --data.block_size=32"
    first, tf32, bf16, failed, last = rows(bench_ladder.BENCH, words, code=1)
    assert tf32["status"] == "skipped"
    assert (first["mfu"], first["speedup"]) == (0.2, None)
    assert (bf16["mfu"], bf16["speedup"], bf16["speedup_in_all"]) == (0.4, 3.0, 3.0)
    assert failed["speedup"] is None
    assert (last["mfu"], last["speedup"], last["speedup_in_all"]) == (0.4, 2.0, 6.0)
    plain, half, compiled, fused = seen
    assert plain["trainer.precision"] == "32-true"
    assert plain["model.config.attention"] == "naive"
    assert plain["data.block_size"] == "32"
    changed = {"trainer.precision": "bf16-mixed", "speed.peak_flops": "2000000000000.0"}
    assert half == plain | changed
    assert compiled["model.compile"] == "true"
    assert fused["model.config.attention"] == "sdpa"
    assert fused["model.config.vocab_size"] == "50304"
    assert fused["model.fused"] == "true"
