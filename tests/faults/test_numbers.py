"""Numbers of a run: none that is none is kept, and rates are of training alone: R39, R50, R54."""

import json
import re

import pytest
from exact import checkpoints, finite, must_equal, newest, step_of
from folders import STEPS, run_folder, write_inputs
from harness import SilentWrong, fit, gpt

pytestmark = pytest.mark.faults
RESUME = ("--resume", "auto")


# ---- weights and moments -------------------------------------------------------------------------


@pytest.mark.case("R39")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_an_update_that_leaves_no_numbers(folder, case, optimizer):
    """Finite gradients, and a rate that is too large for any weight."""
    rates = ("--model.learning_rate", "1e38", "--model.warmup_steps", "0")
    rates += ("--model.muon_learning_rate", "1e38") if optimizer == "muon" else ()
    ended = fit(folder, *rates, "--model.optimizer", optimizer, "--trainer.max_steps", "1",
                "--model.schedule", "constant")  # fmt: skip
    for path in checkpoints(run_folder(folder)):
        if not finite(path):
            raise SilentWrong(f"exit {ended.code}, and {path.name} is no checkpoint of numbers")
    line = ended.refused("finite|nan|inf")
    case.saw(f"{optimizer}, 1e38: {line.removeprefix('error: ')}")


@pytest.mark.case("R39")
@pytest.mark.parametrize("step", [11, STEPS])
def test_a_moment_that_is_no_number(whole, folder, case, step):
    ended = fit(folder, faults={"bad_moment": [step]})
    kept = checkpoints(run_folder(folder))
    if ended.code == 0 or not all(map(finite, kept)):
        raise SilentWrong(f"exit {ended.code}, kept {[path.name for path in kept]}")
    line = ended.refused("finite|nan|inf")
    assert step_of(kept[0]) < step
    fit(folder, *RESUME).ok()
    case.saw(f"NaN in AdamW's state at step {step}: {line.removeprefix('error: ')}; exact after")
    must_equal(run_folder(whole), run_folder(folder))


# ---- rates ---------------------------------------------------------------------------------------


@pytest.mark.case("R50")
def test_slow_saves_are_in_no_step(folder, case):
    """A step takes 0.1 s and more, a save 4 s; a busy machine is no 20 times slower."""
    every = ("--checkpoint.every_n_steps", "3", "--samples.max_new_tokens", "40")
    faults = {"slow": [0.05], "slow_sync": [2.0]}
    ended = fit(folder, *every, "--trainer.max_steps", "18", faults=faults).ok()
    lines = (run_folder(folder) / "metrics.jsonl").read_text().splitlines()
    times = [row["perf/step_ms"] for row in map(json.loads, lines) if "perf/step_ms" in row]
    assert len(times) >= 15
    assert min(times) >= 100
    if max(times) > 2000:
        raise SilentWrong(f"a step of {max(times):,.0f} ms")
    (spent,) = re.findall(r"^time +(.*)$", ended.out, re.MULTILINE)
    total, phases = spent.split(" s: ")
    parts = {name: float(s) for name, s in re.findall(r"([a-z][a-z -]*?) (-?[\d.]+)", phases)}
    assert min(parts.values()) >= 0, spent
    assert sum(parts.values()) == pytest.approx(float(total), abs=0.06 * len(parts))  # rounded
    assert parts["checkpoint"] >= 4 * 6
    assert "stall" not in ended.out
    case.saw(f"6 saves of 4 s: no step above {max(times):,.0f} ms; {spent}")


# ---- descriptors ---------------------------------------------------------------------------------


@pytest.mark.case("R54")
@pytest.mark.parametrize("workers", ["0", "2"])
def test_more_shards_than_descriptors(tmp_path, case, workers):
    folder = write_inputs(tmp_path / "work")
    text = (folder / "text.txt").read_text()
    (folder / "long.txt").write_text(text * 10)
    gpt(folder, "prepare", "long.txt", "--tokenizer", "char", "--out", "set",
        "--shard-tokens", "25").ok()  # fmt: skip
    n_shards = len(list((folder / "set").glob("train-*.npy")))
    assert n_shards > 1200
    use = ("--data.dataset", "set", "--data.text_file", "null", "--data.num_workers", workers)
    for limit in (1024, 256):
        ended = fit(folder, *use, "--run_name", f"of{limit}", "--trainer.max_steps", "6",
                    wrap=("prlimit", f"--nofile={limit}:{limit}"))  # fmt: skip
        if ended.code:  # of all things, not "damaged"
            line = ended.refused("descriptor|open files|ulimit")
            assert "damage" not in line
            assert limit < 1024, line
        case.saw(f"{n_shards} shards, {limit} descriptors, {workers} workers: exit {ended.code}")
    assert step_of(newest(run_folder(folder, "of1024"))) == 6
