"""Runs that end before their last step, and what a resume may change: R19, R25, R27, R30, R34, R37,
R60, R61."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from exact import checkpoints, must_equal, newest, rows, sequences, step_of
from folders import STEPS, contents, copied, run_folder
from harness import LIMIT_S, RESUME, TRACE, Running, SilentWrong, fit, start_fit

pytestmark = pytest.mark.faults


@pytest.mark.case("R19")
def test_the_command_line_wins_and_says_so(stopped, case):
    path = str(newest(run_folder(stopped)))
    other = ("--model.learning_rate", "0.5", "--trainer.gradient_clip_val", "0.1")
    ended = fit(stopped, "--resume", path, *other, env={"OMP_NUM_THREADS": "2"}).ok()
    for change in (r"model\.learning_rate 0\.003 -> 0\.5", "gradient_clip_val 1.0 -> 0.1"):
        assert re.search(rf"changed +{change}", ended.out), ended.out[:2000]
    said = re.findall(r"[^\n]*threads 1 -> 2[^\n]*", ended.out + ended.err)
    assert len(said) == 1, ended.out[:1500]
    case.saw(f"changed model.learning_rate 0.003 -> 0.5; {said[0]}")
    rates = [r["optim/lr"] for r in rows(run_folder(stopped)) if "optim/lr" in r]
    assert max(rates[:10]) < 3.1e-3
    if not rates[10] > 0.4:
        raise SilentWrong(f"the rate of step 11 is {rates[10]}")


@pytest.mark.case("R25")
@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_workers_change_nothing(whole, folder, case, workers):
    fit(folder, "--data.num_workers", workers, faults=TRACE).ok()
    case.saw(f"{workers} workers")
    must_equal(whole, folder)


@pytest.mark.case("R27")
def test_other_micro_batches_can_be_allowed_and_have_the_same_order(whole, folder, case):
    """4 sequences x 4 micro-batches are 8 x 2; dropout off, for its masks are by micro-batch."""
    off = ("--model.config.dropout", "0.0")
    stop = {"signal_at": [15, 10, 1]} | TRACE
    assert fit(folder, *off, faults=stop).code == 143
    other = ("--data.batch_size", "4", "--trainer.accumulate_grad_batches", "4",
             "--trainer.val_check_interval", "24")  # fmt: skip
    line = fit(folder, *RESUME, *off, *other).refused("checkpoint has", "this run has")
    option = re.search(r"(--[\w.]+) true", line)
    assert option, "the line names no way out"
    other += (option[1], "true")
    fit(folder, *RESUME, *off, *other, faults=TRACE).ok()
    assert sequences(folder / "trace.jsonl") == sequences(whole / "trace.jsonl")
    case.saw(f"4 x 4 for 8 x 2: refused; {option[1]} true goes on, the same order")


@pytest.mark.case("R30")
def test_nothing_there_is_said_and_the_run_begins(whole, folder, case):
    ended = fit(folder, *RESUME).ok()
    said = [line for line in ended.out.splitlines() if "step 0" in line]
    assert len(said) == 1, ended.out[:1000]
    case.saw(said[0])
    must_equal(whole, folder)


@pytest.mark.case("R30")
@pytest.mark.parametrize("how", ["auto", "folder", "file"])
def test_a_finished_run_stays_as_it_is(every, tmp_path, case, how):
    folder = copied(every, tmp_path / "work")
    run = run_folder(folder)
    before = contents(folder)
    path = {"auto": "auto", "folder": str(run), "file": str(newest(run))}[how]
    ended = fit(folder, "--resume", path).ok()
    said = [line for line in ended.out.splitlines() if "nothing to do" in line]
    assert len(said) == 1, ended.out
    case.saw(said[0])
    changed = {k for k, v in contents(folder).items() if before.get(k) != v} | (
        before.keys() - contents(folder).keys()
    )
    assert not changed, f"changed: {sorted(changed)}"


@pytest.mark.case("R30")
def test_a_future_that_was_left_is_not_taken_up_again(every, tmp_path, case):
    """Resumed from an older file and stopped early: auto continues there, not from a later file."""
    folder = copied(every, tmp_path / "work", 20)
    older = next(p for p in checkpoints(run_folder(folder)) if step_of(p) == 14)
    stop = {"signal_at": [15, 16, 1]}
    back = fit(folder, "--resume", str(older), faults=stop)
    assert back.code == 143
    assert re.search(r"step 14\b", back.out)
    ended = fit(folder, *RESUME).ok()
    went_on = re.search(r"step (\d+),", ended.out)
    case.saw(f"back to 14, stopped at 16, auto went on from {went_on and went_on[1]}")
    must_equal(every, folder)


# ---- stops that Lightning's callbacks ask for ----------------------------------------------------


@pytest.mark.case("R34")
@pytest.mark.parametrize("micro", [0, 1])
def test_should_stop_within_a_step(whole, folder, case, micro):
    ended = fit(folder, faults=TRACE | {"stop_at": [11, micro]}).ok()
    assert step_of(newest(run_folder(folder))) == 11  # the step under way was finished
    assert "--resume auto" in ended.out + ended.err
    fit(folder, *RESUME, faults=TRACE).ok()
    case.saw(f"should_stop in micro-batch {micro + 1} of 2: stopped after step 11, exact")
    must_equal(whole, folder)


@pytest.mark.case("R34")
def test_max_time(whole, folder, case):
    slow = {"slow": 0.5}  # so that it ends before the last step on any machine
    fit(folder, "--trainer.max_time", "00:00:00:04", faults=slow).ok()
    stopped = step_of(newest(run_folder(folder)))
    assert 0 < stopped < STEPS
    fit(folder, *RESUME).ok()
    case.saw(f"max_time: stopped after step {stopped}, exact")
    must_equal(whole, folder)


@pytest.mark.case("R34")
def test_early_stopping(whole, folder, case):
    early = [f"--trainer.callbacks{word}" for word in (
        "+=EarlyStopping", ".monitor=val/loss", ".patience=1", ".min_delta=100")]  # fmt: skip
    fit(folder, *early).ok()
    stopped = step_of(newest(run_folder(folder)))
    assert stopped == 12  # validations are after steps 6 and 12
    fit(folder, *RESUME).ok()
    case.saw("EarlyStopping: stopped after step 12, exact")
    must_equal(whole, folder)


# ---- output that goes away -----------------------------------------------------------------------


def shell(folder, command: str):
    """Run a command of bash, in which FIT is the run."""
    fit_ = f"{sys.executable} -m gpt_lightning fit --config run.yaml"
    text = f"set -o pipefail; {command.replace('FIT', fit_)}"
    with Running(["bash", "-c", text], folder, {}) as process:
        return process.end()


@pytest.mark.case("R37")
@pytest.mark.parametrize("command", ["FIT | head -n 12", "FIT >&-", "FIT <&- >&- 2>&-"])
def test_output_that_nobody_reads(whole, folder, case, command):
    ended = shell(folder, command).ok()
    assert "Traceback" not in ended.err
    case.saw(f"{command.replace('FIT', 'fit')}: trained to the end")
    must_equal(whole, folder)


@pytest.mark.case("R37")
def test_a_terminal_that_goes_away(whole, folder, case):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gpt_lightning", "fit", "--config", "run.yaml"]
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    said = b""
    while not re.search(rb"\b[3-9]/30\b", said):  # step of the progress bar
        said += os.read(ours, 4096)
    os.close(ours)  # writing gives EIO from now on
    assert process.wait(LIMIT_S) == 0, said
    case.saw("terminal gone after step 3: trained to the end")
    must_equal(whole, folder)


@pytest.mark.case("R61")
def test_two_resumes_at_once(whole, folder, case):
    with start_fit(folder, faults={"slow": 0.2}) as first:
        first.wait_for(8)
        second = fit(folder, *RESUME, "--trainer.max_steps", "30")
        line = second.refused("another process", "run")
        first.end().ok()
    case.saw(line.removeprefix("error: "))
    must_equal(whole, folder)


@pytest.mark.case("R60")
def test_another_time_zone_and_clock(whole, folder, case):
    stop = {"signal_at": [int(signal.SIGTERM), 14, 1]}
    assert fit(folder, faults=stop, env={"TZ": "Pacific/Kiritimati"}).code == 143
    time_of_file = time.time() + 86400
    os.utime(newest(run_folder(folder)), (time_of_file, time_of_file))
    faults = {"clock": [-7200.0, 0]}
    fit(folder, *RESUME, faults=faults, env={"TZ": "Pacific/Pago_Pago"}).ok()
    case.saw("25 hours of time zones and two hours of clock apart: exact")
    must_equal(whole, folder)
