"""Two ranks over gloo, numbers that are none on one of them, and ends of ranks: R04, R15, R26, R41,
R42, R45."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from exact import checkpoints, finite, must_equal, newest, rows, sequences, step_of
from folders import STEPS, leftovers, run_folder, write_inputs
from harness import RESUME, TRACE, Running, SilentWrong, fit, start_fit
from test_damaged_data import SET

pytestmark = pytest.mark.faults
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "4")
OFF = ("--model.config.dropout", "0.0")  # its masks are by rank


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with an uninterrupted run of two ranks, with dropout."""
    folder = write_inputs(tmp_path_factory.mktemp("pair"))
    fit(folder, *TWO, faults=TRACE).ok()
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with an uninterrupted run of one rank, without dropout."""
    folder = write_inputs(tmp_path_factory.mktemp("single"))
    fit(folder, *OFF, faults=TRACE).ok()
    return folder


@pytest.mark.case("R04")
@pytest.mark.parametrize("rank", [1, 0])
def test_a_signal_to_one_rank_stops_both(pair, folder, case, rank):
    with start_fit(folder, *TWO, faults=TRACE) as process:
        process.wait_for(9)
        os.kill(process.rank(rank), signal.SIGTERM)
        began = time.monotonic()
        ended = process.end()
        seconds = time.monotonic() - began
    assert ended.code == 143, f"exit {ended.code}: {ended.err[-1500:]}"
    assert "Traceback" not in ended.err
    assert seconds < 30  # 3 on an idle machine; a rank that waits for a dead one takes minutes
    stopped_at = step_of(newest(run_folder(folder)))
    assert len([p for p in checkpoints(run_folder(folder)) if step_of(p) == stopped_at]) == 1
    assert leftovers(folder) == []
    case.saw(f"rank {rank}: exit 143 after {seconds:.1f} s, at step {stopped_at}")
    fit(folder, *TWO, *RESUME, faults=TRACE).ok()
    must_equal(pair, folder)


@pytest.mark.case("R15")
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_gradient_that_is_no_number(whole, folder, case, value):
    ended = fit(folder, faults={"bad_gradient": [value, 5, 0]})
    line = ended.refused("step 5", "nan|inf", "not changed")
    case.saw(line.removeprefix("error: "))
    assert step_of(newest(run_folder(folder))) == 4
    assert finite(newest(run_folder(folder)))
    fit(folder, *RESUME).ok()
    must_equal(whole, folder)


@pytest.mark.case("R15")
def test_a_gradient_that_is_no_number_on_one_rank(folder, case):
    ended = fit(folder, *TWO, faults={"bad_gradient": ["nan", 5, 1]})
    text = [line for line in ended.err.splitlines() if "step 5" in line]
    if ended.code == 0:
        raise SilentWrong("trained on with nan")
    assert text, ended.err[-1500:]
    assert ended.code == 2, ended.code
    assert finite(newest(run_folder(folder)))
    case.saw(f"rank 1 of 2: both stop, {len(text)} lines")


@pytest.mark.case("R15")
def test_a_learning_rate_of_1e20(folder, case):
    ended = fit(folder, "--model.learning_rate", "1e20")
    line = ended.refused(r"step \d+", "learning_rate")
    case.saw("1e20: " + line.removeprefix("error: "))
    for path in checkpoints(run_folder(folder)):
        assert finite(path), path.name


@pytest.mark.case("R26")
def test_two_ranks_have_the_order_of_one(whole, pair, case):
    """Disjoint rows whose union is the order of one rank; the rows interleave, in order."""
    if sequences(pair / "trace.jsonl") != sequences(whole / "trace.jsonl"):
        raise SilentWrong("two ranks train in another order")
    case.saw("the same global order")


@pytest.mark.case("R26")
def test_shards_of_uneven_length(shards, case):
    """Three shards of 1,000 tokens and one of 240."""
    for name, args in (("one", ()), ("two", TWO)):
        trace = {"trace": str(shards / f"{name}.jsonl")}
        fit(shards, *SET, *args, "--run_name", name, faults=trace).ok()
    if sequences(shards / "one.jsonl") != sequences(shards / "two.jsonl"):
        raise SilentWrong("two ranks train in another order")
    case.saw("uneven shards: the same order")


@pytest.mark.case("R26")
def test_killed_with_two_ranks(pair, folder, case):
    with start_fit(folder, *TWO, faults=TRACE) as process:
        process.wait_for(15)
        for pid in process.descendants():
            os.kill(pid, signal.SIGKILL)
        process.end()
    fit(folder, *TWO, *RESUME, faults=TRACE).ok()
    case.saw("2 to 2 after SIGKILL: exact")
    must_equal(pair, folder)


@pytest.mark.case("R26")
@pytest.mark.parametrize("first", ["two ranks", "one rank"])
def test_another_number_of_ranks_goes_on_in_the_same_order(single, folder, case, first):
    before, after = (TWO, ()) if first == "two ranks" else ((), TWO)
    stop = {"signal_at": [int(signal.SIGTERM), 14, 1]} | TRACE
    assert fit(folder, *OFF, *before, faults=stop).code == 143
    ended = fit(folder, *OFF, *after, *RESUME, faults=TRACE).ok()
    assert re.search(r"changed +ranks", ended.out), ended.out[:2000]
    assert sequences(folder / "trace.jsonl") == sequences(single / "trace.jsonl")
    found, expected = rows(run_folder(folder)), rows(run_folder(single))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        losses = {"train/loss", "val/loss"} & other.keys()
        assert losses == {"train/loss", "val/loss"} & one.keys()
        for key in losses:  # gradients are averaged in another order
            assert one[key] == pytest.approx(other[key], rel=1e-5), one
    case.saw(f"{first} first: the same order, loss within 1e-5")


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
@pytest.mark.parametrize(
    ("rank", "code", "words"), [(1, 75, "was ended by SIGKILL"), (0, -9, "has ended")]
)
def test_a_rank_that_is_killed(folder, case, rank, code, words):
    with start_fit(folder, *TWO, *ENDLESS) as process:
        process.wait_for(5)
        os.kill(process.rank(rank), signal.SIGKILL)
        seconds = one_line(process, code, f"rank {rank} {words}", AGAIN)
    case.saw(f"rank {rank} killed: exit {code} after {seconds:.0f} s")
    if rank == 1:
        assert leftovers(folder) == []
        fit(folder, *TWO, *RESUME, "--trainer.max_steps", str(STEPS)).ok()


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
@pytest.mark.parametrize("rank", [1, 0, "all"])
def test_an_error_of_one_or_all_ranks_is_printed_once(folder, case, rank):
    faults, words = {"user_error": [5, rank]}, f"an error of rank {rank}"
    if rank == "all":
        faults, words = {"bad_gradient": ["nan", 5, 0]}, "gradient norm is nan"
    with start_fit(folder, *TWO, faults=faults) as process:
        seconds = one_line(process, 2, words)
    case.saw(f"{words}: exit 2 after {seconds:.0f} s")


@pytest.mark.case("R45")
def test_a_file_system_without_locks(whole, folder, case):
    ended = fit(folder, faults={"no_locks": []}).ok()
    folders = re.findall("warning: the file system of (.*) has no locks: start one", ended.err)
    names = ["data", "checkpoints", "version_0"]
    assert [Path(name).name for name in folders] == names, ended.err
    case.saw("one warning per folder, of the data, the run and its checkpoints")
    must_equal(whole, folder)
