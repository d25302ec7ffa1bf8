"""Numbers that are none, arguments, orphans, rates, descriptors: R39, R40, R48 to R50, R54, R59."""

import json
import os
import re
import signal

import pytest
from exact import checkpoints, finite, must_equal, newest, step_of
from folders import STEPS, VALIDATE, contents, run_folder, write_inputs
from harness import RESUME, SilentWrong, fit, gpt, refusals, start_fit

pytestmark = pytest.mark.faults


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
    must_equal(whole, folder)


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
        if ended.code:  # the message must not be "damaged"
            line = ended.refused("descriptor|open files|ulimit")
            assert "damage" not in line
            assert limit < 1024, line
        case.saw(f"{n_shards} shards, {limit} descriptors, {workers} workers: exit {ended.code}")
    assert step_of(newest(run_folder(folder, "of1024"))) == 6


@pytest.mark.case("R40")
def test_orphaned_workers_do_not_stop_the_next_session(whole, folder, case):
    """They end within seconds of the main process; the restart comes at once."""
    workers = ("--data.num_workers", "2")
    with start_fit(folder, *workers) as process:
        process.wait_for(9)
        os.kill(process.process.pid, signal.SIGKILL)
        ended = fit(folder, *workers, *RESUME).ok()
        process.end()
    case.saw(f"restarted beside the workers: exit {ended.code}")
    must_equal(whole, folder)


# ---- arguments of the Trainer --------------------------------------------------------------------

SENSELESS = {
    "max_steps": "-2",
    "max_epochs": "-3",
    "min_steps": "-1",
    "gradient_clip_val": "-1",
    "gradient_clip_algorithm": "median",
    "accumulate_grad_batches": "0",
    "limit_train_batches": "-1",
    "limit_val_batches": "1.5",
    "overfit_batches": "-0.1",
    "val_check_interval": "0",
    "check_val_every_n_epoch": "0",
    "log_every_n_steps": "-1",
    "num_sanity_val_steps": "-2",
    "num_nodes": "0",
    "devices": "0",
    "precision": "17-true",
    "strategy": "ddp_spawn",
    "max_time": "yesterday",
    "accelerator": "tpu",
    "barebones": "true",
}


@pytest.mark.case("R48")
def test_senseless_values_are_refused_before_anything_is_written(folder, case):
    before = contents(folder)
    commands = [
        ["fit", "--config", "run.yaml", f"--trainer.{key}", value]
        for key, value in SENSELESS.items()
    ]
    codes = refusals(folder, commands, [*SENSELESS])
    accepted = [key for key, code in zip(SENSELESS, codes, strict=True) if code == 0]
    if accepted:
        raise SilentWrong(f"accepted: {', '.join(accepted)}")
    case.saw(f"{codes.count(2)} of {len(codes)} refused by name")
    assert set(codes) == {2}
    assert contents(folder) == before


# ---- numbers that are none, or too large ---------------------------------------------------------


@pytest.mark.case("R49")
def test_a_batch_of_nan_makes_a_validation_of_nan(folder, case):
    ended = fit(folder, faults={"nan_validation": [2 * VALIDATE]})
    lines = (run_folder(folder) / "metrics.jsonl").read_text().splitlines()
    found = {row["step"]: row["val/loss"] for row in map(json.loads, lines) if "val/loss" in row}
    assert found[VALIDATE] is not None
    if found.get(2 * VALIDATE) is not None:
        raise SilentWrong(f"val/loss is {found[2 * VALIDATE]} over a batch of NaN")
    said = [x for x in (ended.out + ended.err).splitlines() if re.search(r"\bnan\b", x)]
    assert said, ended.out[-1500:]
    case.saw(f"exit {ended.code}: {said[-1]}")
    assert finite(newest(run_folder(folder)))


# ---- a copy that is not what was sent ------------------------------------------------------------


@pytest.mark.case("R59")
def test_an_upload_that_was_torn_once_is_made_again(whole, folder, case):
    fit(folder, "--checkpoint.folder", "shared", faults={"lying_folder": [1]}).ok()
    here = run_folder(folder) / "checkpoints"
    there = folder / "shared" / "run" / "version_0" / "checkpoints"
    if not contents(here).items() <= contents(there).items():
        raise SilentWrong("the copy differs from the run's own files")
    case.saw("half of the first file was stored: sent again, the copy is whole")
    must_equal(whole, folder)


@pytest.mark.case("R59")
def test_a_folder_that_always_lies_is_named_and_costs_nothing(whole, folder, case):
    ended = fit(folder, "--checkpoint.folder", "shared", faults={"lying_folder": [10**6]})
    if ended.code == 0:
        raise SilentWrong("no checkpoint is in the folder, and the run ends with 0")
    line = next(x for x in ended.err.splitlines()[::-1] if x.startswith("error: "))
    assert "shared" in line
    case.saw(f"always: exit {ended.code}, {line.removeprefix('error: ')}")
    assert not list((folder / "shared").rglob("*.ckpt"))
    assert step_of(newest(run_folder(folder))) == STEPS
    must_equal(whole, folder)
