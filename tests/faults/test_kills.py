"""Processes that are killed and stopped, and go on: R01, R02, R03, R05, R29, R31."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from exact import (
    checkpoints,
    differences,
    load,
    must_equal,
    newest,
    rows,
    state_differences,
    step_of,
)
from folders import EPOCH_STEPS, SAVE, STEPS, VALIDATE, contents, copied, leftovers, run_folder
from harness import RESUME, TRACE, SilentWrong, fit, start_fit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

pytestmark = pytest.mark.faults
MOMENTS = ("first byte", "before fsync", "after fsync")
MOMENTS += ("before the sidecar", "before the rename", "renamed")
ASYNCHRONOUS = ("--checkpoint.asynchronous", "true")
each_way = pytest.mark.parametrize(
    "saving",
    [(), pytest.param(ASYNCHRONOUS, marks=pytest.mark.case("R51"))],
    ids=["synchronous", "asynchronous"],
)


def last_save_before(step: int, asynchronous: bool = False) -> int:
    """Return the last step whose save is complete when a later step's line is printed."""
    saves = [s for s in range(step) if s % SAVE == 0 or s % VALIDATE == 0]
    return saves[-2:][0] if asynchronous else saves[-1]  # the last one may be under way


def killed_at_random(folder: Path, rng: random.Random, *args: str) -> str:
    """Start the run, kill it at a random moment, and return that moment."""
    done = max([step_of(p) for p in checkpoints(run_folder(folder))], default=0)
    step = rng.randint(min(done + 1, STEPS - 4), STEPS - 4)
    delay_s = rng.uniform(0, 0.02)
    with start_fit(folder, *RESUME, *args, faults=TRACE) as process:
        told = process.wait_for(step)
        time.sleep(delay_s)
        os.kill(process.process.pid, signal.SIGKILL)
        assert process.end().code == -signal.SIGKILL
    if (expected := last_save_before(told, "asynchronous" in " ".join(args))) > 0:
        found = step_of(newest(run_folder(folder)))
        assert found >= expected, f"a save is lost: {found}, expected at least {expected}"
    return f"{told}+{delay_s * 1e3:.0f} ms"


@pytest.mark.case("R01")
@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize("workers", [0, 2])
@each_way
def test_killed_at_random_moments(whole, folder, case, workers, seed, saving):
    rng = random.Random(seed)
    loader = ("--data.num_workers", str(workers), *saving)
    moments = [killed_at_random(folder, rng, *loader) for _ in range(2)]
    fit(folder, *RESUME, *loader, faults=TRACE).ok()
    case.saw(f"seed {seed}, killed after steps {', '.join(moments)}")
    must_equal(whole, folder)


@pytest.mark.case("R01")
def test_killed_in_compiled_bfloat16(folder, tmp_path, case):
    """With dropout's hashed masks and two threads, whose sums must not depend on who is first."""
    fast = ("--trainer.precision", "bf16-mixed", "--model.compile", "true")
    two = {"OMP_NUM_THREADS": "2"}
    left_alone = copied(folder, tmp_path / "alone")
    fit(left_alone, *fast, env=two).ok()
    with start_fit(folder, *fast, env=two) as process:
        told = process.wait_for(13)
        os.kill(process.process.pid, signal.SIGKILL)
        assert process.end().code == -signal.SIGKILL
    fit(folder, *RESUME, *fast, env=two).ok()
    case.saw(f"compiled, bfloat16: killed after step {told}")
    must_equal(left_alone, folder)


def test_the_comparison_can_fail(whole, every, tmp_path):
    """One bit of one weight, one row and one window are seen."""
    other = copied(every, tmp_path / "other")
    run = run_folder(other)
    assert differences(run_folder(whole), run) == []
    state = load(newest(run))
    weight = next(iter(state["state_dict"].values())).view(torch.int32).view(-1)
    weight[0] ^= 1
    torch.save(state, newest(run))
    seen = differences(run_folder(whole), run)  # the head and the embedding are one tensor
    assert [name.split("/")[1] for name in seen] == ["state_dict", "state_dict"]
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:-2] + lines[-1:]))
    assert len(differences(run_folder(whole), run)) > 2
    trace = other / "trace.jsonl"
    traced = (whole / "trace.jsonl").read_text().splitlines(keepends=True)
    trace.write_text("".join([*traced[:7], traced[8], traced[7], *traced[9:]]))
    found = differences(run_folder(whole), run_folder(whole), (whole / "trace.jsonl", trace))
    assert found, "a swapped order was not seen"


@pytest.mark.case("R02")
@pytest.mark.parametrize(
    ("moment", "number"), [*itertools.product(MOMENTS, (1, 3)), ("deleting", 3)]
)
@each_way
def test_killed_inside_the_save(whole, folder, case, moment, number, saving):
    ended = fit(folder, *saving, faults={"kill_in_save": [moment, number]})
    assert ended.code == -signal.SIGKILL, ended
    left = [step_of(p) for p in checkpoints(run_folder(folder))]
    resumed = fit(folder, *RESUME, *saving).ok()
    case.saw(f"{moment} of save {number}: went on from {max(left, default=0)}")
    if left:
        assert re.search(rf"step {max(left)}\b", resumed.out), resumed.out[:1500]
    must_equal(whole, folder)


@pytest.mark.case("R03")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@each_way
def test_stopped_within_a_step(whole, folder, case, number, code, workers, saving):
    loader = ("--data.num_workers", str(workers), *saving)
    faults = TRACE | {"signal_at": [int(number), 11, 0]}
    ended = fit(folder, *loader, faults=faults)
    if ended.code == 0:
        raise SilentWrong("a stop signal ended with 0")
    assert ended.code == code, ended.err[-2000:]
    assert "Traceback" not in ended.err, ended.err[-2000:]
    assert step_of(newest(run_folder(folder))) == 11  # the step under way was finished
    case.saw(f"{signal.Signals(number).name}: exit {code}, {ended.last_line}")
    fit(folder, *RESUME, *loader, faults=TRACE).ok()
    must_equal(whole, folder)


@pytest.mark.case("R03")
def test_stopped_at_a_step_of_validation(whole, folder, case):
    faults = {"signal_at": [int(signal.SIGTERM), 2 * VALIDATE, 1]}
    assert fit(folder, faults=faults).code == 143
    saved = rows(run_folder(folder))
    assert any("val/loss" in row and row["step"] == 2 * VALIDATE for row in saved)
    fit(folder, *RESUME).ok()
    case.saw("at a validation: validated, then saved")
    must_equal(whole, folder)


@pytest.mark.case("R05")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [EPOCH_STEPS - 1, EPOCH_STEPS, EPOCH_STEPS + 1])
def test_resumed_around_the_end_of_an_epoch(every, tmp_path, case, step, workers):
    folder = copied(every, tmp_path / "work", step)
    fit(folder, *RESUME, "--data.num_workers", str(workers)).ok()
    case.saw(f"at step {step} of epochs of {EPOCH_STEPS}")
    must_equal(every, folder)


@pytest.mark.case("R05")
def test_three_resumes_in_one_epoch(whole, folder, case):
    for step in (14, 17, 19):
        stop = {"signal_at": [int(signal.SIGTERM), step, 1]}
        assert fit(folder, *RESUME, faults=stop).code == 143
        assert step_of(newest(run_folder(folder))) == step
    fit(folder, *RESUME).ok()
    case.saw("three times in one epoch")
    must_equal(whole, folder)


@pytest.mark.case("R29")
def test_metrics_and_curves_after_three_kills(whole, folder, case):
    seed = 29
    rng = random.Random(seed)
    moments = [killed_at_random(folder, rng) for _ in range(3)]
    fit(folder, *RESUME).ok()
    case.saw(f"seed {seed}, killed after steps {', '.join(moments)}")
    if rows(run_folder(whole)) != rows(run_folder(folder)):
        raise SilentWrong("the metrics files differ")
    events = EventAccumulator(str(run_folder(folder)), size_guidance={"scalars": 0}).Reload()
    steps = [event.step for event in events.Scalars("train/loss")]
    if steps != list(range(1, STEPS + 1)):
        raise SilentWrong(f"TensorBoard's steps are {steps}")


@pytest.mark.case("R29")
@pytest.mark.parametrize("tail", ['{"step": 11', "\0\0\0\0", '{"step": 11, "time": 1.0}\n{"st'])
def test_a_torn_last_line_is_repaired(every, tmp_path, case, tail):
    folder = copied(every, tmp_path / "work", 10)
    file = run_folder(folder) / "metrics.jsonl"
    lines = [x for x in file.read_text().splitlines(keepends=True) if json.loads(x)["step"] <= 10]
    file.write_text("".join(lines) + tail)
    fit(folder, *RESUME).ok()
    case.saw(f"torn: {tail!r}")
    must_equal(every, folder)


@pytest.mark.case("R31")
@pytest.mark.parametrize("step", [3, 10])  # in the warm-up, and after it
def test_optimizer_and_rate_against_the_closed_form(folder, case, step):
    free = ("--trainer.gradient_clip_val", "null", "--checkpoint.every_n_steps", "1",
            "--checkpoint.keep_last", "9")  # fmt: skip
    fit(folder, *free, "--trainer.max_steps", str(step)).ok()
    before = load(newest(run_folder(folder)))
    file = folder / "gradients.pt"
    fit(folder, *RESUME, *free, "--trainer.max_steps", str(step + 1),
        faults={"gradients": str(file)}).ok()  # fmt: skip
    after = load(newest(run_folder(folder)))
    assert after["global_step"] == step + 1
    check_update(before, after, torch.load(file, weights_only=True), expected_rate(step))
    found = rows(run_folder(folder))[-1]
    rate = next(r["optim/lr"] for r in rows(run_folder(folder)) if r["step"] == step + 1
                and "optim/lr" in r)  # fmt: skip
    assert rate == pytest.approx(expected_rate(step), rel=1e-6)  # float32 in the file
    case.saw(f"step {found['step']}: rate {rate:.2e}, AdamW's moments and weights")


def expected_rate(step: int) -> float:
    """Return the rate: warm-up to 3e-3 in step 6, then half a cosine to a tenth of it."""
    peak, low, warmup = 3.0e-3, 3.0e-4, 5
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    return low + (peak - low) * (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))) / 2


def check_update(before: dict, after: dict, gradients: dict, rate: float) -> None:
    """Make one step of AdamW in float64 from the saved state and the gradients."""
    groups = after["optimizer_states"][0]["param_groups"]
    old, new = (s["optimizer_states"][0]["state"] for s in (before, after))
    names = names_by_index(after, groups, gradients)
    for group in groups:
        b1, b2 = group["betas"]
        for index in group["params"]:
            g = gradients[names[index]].double()
            m = b1 * old[index]["exp_avg"].double() + (1 - b1) * g
            v = b2 * old[index]["exp_avg_sq"].double() + (1 - b2) * g * g
            t = float(old[index]["step"]) + 1
            w = before["state_dict"][names[index]].double() * (1 - rate * group["weight_decay"])
            w -= rate * (m / (1 - b1**t)) / ((v / (1 - b2**t)).sqrt() + group["eps"])
            # the state is float32: eight digits of it, and sums that cancel
            torch.testing.assert_close(new[index]["exp_avg"].double(), m, rtol=1e-5, atol=1e-9)
            torch.testing.assert_close(new[index]["exp_avg_sq"].double(), v, rtol=1e-5, atol=1e-12)
            torch.testing.assert_close(
                after["state_dict"][names[index]].double(), w, rtol=1e-5, atol=1e-7
            )
            assert float(new[index]["step"]) == t


def names_by_index(state: dict, groups: list[dict], gradients: dict) -> dict[int, str]:
    """Return parameters in the optimizer's order: matrices, then vectors, each in the model's."""
    ordered = [n for n in gradients if gradients[n].dim() >= 2]
    ordered += [n for n in gradients if gradients[n].dim() < 2]
    indices = [index for group in groups for index in group["params"]]
    return dict(zip(indices, ordered, strict=True))


@pytest.mark.case("R52")
@each_way
def test_killed_and_continued_on_a_new_machine(whole, folder, case, saving):
    """From a shared folder alone, after a kill at a random moment and one inside a save."""
    copy = ("--checkpoint.folder", "shared", *saving)
    moment = killed_at_random(folder, random.Random(52), *copy)
    shutil.rmtree(folder / "lightning_logs")
    ended = fit(folder, *RESUME, *copy, faults=TRACE | {"kill_in_save": ["renamed", 2]})
    assert ended.code == -signal.SIGKILL, ended
    shutil.rmtree(folder / "lightning_logs")
    fit(folder, *RESUME, *copy, faults=TRACE).ok()
    case.saw(f"killed after step {moment} and inside a save, the folder alone was left")
    if state_differences(newest(run_folder(whole)), newest(run_folder(folder))):
        raise SilentWrong("another result")
    if rows(run_folder(whole)) != rows(run_folder(folder)):
        raise SilentWrong("the metrics files differ")
    here, there = run_folder(folder) / "checkpoints", folder / "shared/run/version_0/checkpoints"
    assert contents(here).items() <= contents(there).items()
    assert leftovers(folder) == []
