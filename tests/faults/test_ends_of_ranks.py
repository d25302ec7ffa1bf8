"""The ends of two ranks: one is killed, stopped, in error, or never arrives. And no flock."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from exact import must_equal
from folders import STEPS, leftovers, run_folder
from harness import Running, fit, start_fit
from test_two_ranks import TWO

pytestmark = [pytest.mark.faults, pytest.mark.timeout(140)]
RESUME = ("--resume", "auto")
ENDLESS = ("--trainer.max_steps", "100000")
AGAIN = "start the same command with --resume auto to continue"


# ---- two ranks -----------------------------------------------------------------------------------


def one_line(process: Running, code: int, *words: str, limit_s: float = 100) -> float:
    """Return the seconds to the end of all ranks, which have a code and one line of error."""
    began = time.monotonic()
    ended = process.end(limit_s)
    seconds = time.monotonic() - began
    assert ended.code == code, f"exit {ended.code}: {ended.err[-3000:]}"
    lines = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, ended.err[-3000:]
    for word in words:
        assert re.search(word, lines[0]), f"no {word!r} in: {lines[0]}"
    assert "Traceback" not in ended.err, ended.err[-3000:]
    return seconds


@pytest.mark.case("R41")
def test_a_rank_that_is_killed(folder, case):
    with start_fit(folder, *TWO, *ENDLESS) as process:
        process.wait_for(5)
        os.kill(process.rank(1), signal.SIGKILL)
        seconds = one_line(process, 75, "rank 1 was ended by SIGKILL", AGAIN)
    case.saw(f"rank 1 killed: exit 75 after {seconds:.0f} s")
    assert leftovers(folder) == []
    fit(folder, *TWO, *RESUME, "--trainer.max_steps", str(STEPS)).ok()


@pytest.mark.case("R41")
def test_rank_0_is_killed(folder, case):
    with start_fit(folder, *TWO, *ENDLESS) as process:
        process.wait_for(5)
        os.kill(process.rank(0), signal.SIGKILL)
        seconds = one_line(process, -9, "rank 0 has ended", AGAIN)
    case.saw(f"rank 0 killed: the other ends after {seconds:.0f} s")


@pytest.mark.case("R41")
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_that_is_stopped(folder, case, rank):
    with start_fit(folder, *TWO, *ENDLESS, "--watchdog.limit_s", "5") as process:
        process.wait_for(5)
        os.kill(process.rank(rank), signal.SIGSTOP)
        began = time.monotonic()
        ended = process.end(60)
        seconds = time.monotonic() - began
    other = 1 - rank
    assert f"rank {other}: no progress for 5 s (watchdog.limit_s); its threads:" in ended.err
    assert re.search(r"Current thread|most recent call first", ended.err)
    assert ended.code == (75 if rank == 1 else -9), ended.err[-2000:]
    assert seconds < 30
    case.saw(f"rank {rank} stopped, limit 5 s: exit {ended.code} after {seconds:.0f} s")


@pytest.mark.case("R41")
def test_sigterm_beside_a_rank_that_is_stopped(folder, case):
    with start_fit(folder, *TWO, *ENDLESS, "--watchdog.grace_s", "3") as process:
        process.wait_for(5)
        os.kill(process.rank(1), signal.SIGSTOP)
        time.sleep(1)  # until rank 0 waits for it
        os.kill(process.rank(0), signal.SIGTERM)
        seconds = one_line(process, 143, "SIGTERM, but no batch has ended", AGAIN)
    case.saw(f"SIGTERM beside a stopped rank, grace 3 s: exit 143 after {seconds:.0f} s")
    assert seconds < 30


@pytest.mark.case("R42")
@pytest.mark.parametrize(("rank", "code"), [(0, -9), (1, 75)])
def test_a_rank_that_is_killed_before_the_ranks_have_met(folder, case, rank, code):
    with start_fit(folder, *TWO) as process:
        until = time.monotonic() + 60
        while process.rank(1) == process.process.pid and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(process.rank(1) if rank else process.process.pid, signal.SIGKILL)
        began = time.monotonic()
        while process.descendants() and time.monotonic() < began + 60:
            time.sleep(0.1)
        seconds = time.monotonic() - began
        ended = process.end(1)
    assert ended.code == code, ended.err[-2000:]
    assert f"error: rank {rank} " in ended.err
    case.saw(f"rank {rank} killed at its start: all end after {seconds:.0f} s")
    assert seconds < 60  # most of it imports


@pytest.mark.case("R41")
@pytest.mark.parametrize("rank", [1, 0])
def test_an_error_of_one_rank_is_printed_once(folder, case, rank):
    faults = {"user_error": [5, rank]}
    with start_fit(folder, *TWO, faults=faults) as process:
        seconds = one_line(process, 2, f"an error of rank {rank}")
    case.saw(f"an error of rank {rank}: exit 2 after {seconds:.0f} s")


@pytest.mark.case("R41")
def test_an_error_of_all_ranks_is_printed_once(folder, case):
    with start_fit(folder, *TWO, "--model.learning_rate", "1e30") as process:
        one_line(process, 2, "gradient norm is nan")
    case.saw("the same error of both ranks: printed once, exit 2")


@pytest.mark.case("R45")
def test_a_file_system_without_locks(whole, folder, case):
    ended = fit(folder, faults={"no_locks": []}).ok()
    folders = re.findall("warning: the file system of (.*) has no locks: start one", ended.err)
    assert [Path(name).name for name in folders] == ["data", "checkpoints"], ended.err
    case.saw("one warning per folder, of the data and of the checkpoints")
    must_equal(run_folder(whole), run_folder(folder))
