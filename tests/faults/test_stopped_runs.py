"""Runs that end before their last step, and continue: R34, R37, R60, R61."""

import os
import pty
import re
import signal
import subprocess
import sys
import time

import pytest
from exact import must_equal, newest, step_of
from folders import STEPS, leftovers, run_folder
from harness import LIMIT_S, Running, fit, start_fit

pytestmark = pytest.mark.faults
RESUME = ("--resume", "auto")


# ---- stops that Lightning's callbacks ask for ----------------------------------------------------


@pytest.mark.case("R34")
@pytest.mark.parametrize("micro", [0, 1])
def test_should_stop_within_a_step(whole, folder, case, micro):
    trace = folder / "trace.jsonl"
    ended = fit(folder, faults={"trace": str(trace), "stop_at": [11, micro]}).ok()
    assert step_of(newest(run_folder(folder))) == 11  # the step under way was finished
    assert "--resume auto" in ended.out + ended.err
    fit(folder, *RESUME, faults={"trace": str(trace)}).ok()
    case.saw(f"should_stop in micro-batch {micro + 1} of 2: stopped after step 11, exact")
    must_equal(run_folder(whole), run_folder(folder), (whole / "trace.jsonl", trace))
    assert leftovers(folder) == []


@pytest.mark.case("R34")
def test_max_time(whole, folder, case):
    slow = {"slow": 0.5}  # so that it ends before the last step on any machine
    fit(folder, "--trainer.max_time", "00:00:00:04", faults=slow).ok()
    stopped = step_of(newest(run_folder(folder)))
    assert 0 < stopped < STEPS
    fit(folder, *RESUME).ok()
    case.saw(f"max_time: stopped after step {stopped}, exact")
    must_equal(run_folder(whole), run_folder(folder))


@pytest.mark.case("R34")
def test_early_stopping(whole, folder, case):
    early = [f"--trainer.callbacks{word}" for word in (
        "+=EarlyStopping", ".monitor=val/loss", ".patience=1", ".min_delta=100")]  # fmt: skip
    fit(folder, *early).ok()
    stopped = step_of(newest(run_folder(folder)))
    assert stopped == 12  # of validations after steps 6 and 12
    fit(folder, *RESUME).ok()
    case.saw("EarlyStopping: stopped after step 12, exact")
    must_equal(run_folder(whole), run_folder(folder))


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
    must_equal(run_folder(whole), run_folder(folder))


@pytest.mark.case("R37")
def test_a_terminal_that_goes_away(whole, folder, case):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "gpt_lightning", "fit", "--config", "run.yaml"]
    process = subprocess.Popen(
        command, cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    said = b""
    while not re.search(rb"\b[3-9]/30\b", said):  # of the bar
        said += os.read(ours, 4096)
    os.close(ours)  # writing gives EIO from now on
    assert process.wait(LIMIT_S) == 0, said
    case.saw("terminal gone after step 3: trained to the end")
    must_equal(run_folder(whole), run_folder(folder))


@pytest.mark.case("R61")
def test_two_resumes_at_once(whole, folder, case):
    with start_fit(folder, faults={"slow": 0.2}) as first:
        first.wait_for(8)
        second = fit(folder, *RESUME, "--trainer.max_steps", "30")
        line = second.refused("another process", "run")
        first.end().ok()
    case.saw(line.removeprefix("error: "))
    must_equal(run_folder(whole), run_folder(folder))


@pytest.mark.case("R60")
def test_another_time_zone_and_clock(whole, folder, case):
    stop = {"signal_at": [int(signal.SIGTERM), 14, 1]}
    assert fit(folder, faults=stop, env={"TZ": "Pacific/Kiritimati"}).code == 143
    time_of_file = time.time() + 86400
    os.utime(newest(run_folder(folder)), (time_of_file, time_of_file))
    faults = {"clock": [-7200.0, 0]}
    fit(folder, *RESUME, faults=faults, env={"TZ": "Pacific/Pago_Pago"}).ok()
    case.saw("25 hours of time zones and two hours of clock apart: exact")
    must_equal(run_folder(whole), run_folder(folder))
