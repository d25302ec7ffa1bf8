"""Two ranks over gloo, and numbers that are none: R04, R15, R26."""

import os
import re
import signal
import time

import pytest
from exact import checkpoints, finite, must_equal, newest, rows, sequences, step_of
from folders import leftovers, run_folder, write_inputs
from harness import SilentWrong, fit, start_fit
from test_damaged_data import SET

pytestmark = pytest.mark.faults
TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "4")
OFF = ("--model.config.dropout", "0.0")  # its masks are by rank
RESUME = ("--resume", "auto")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A folder with an uninterrupted run of two ranks, with dropout."""
    folder = write_inputs(tmp_path_factory.mktemp("pair"))
    fit(folder, *TWO, faults={"trace": str(folder / "trace.jsonl")}).ok()
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A folder with an uninterrupted run of one rank, without dropout."""
    folder = write_inputs(tmp_path_factory.mktemp("single"))
    fit(folder, *OFF, faults={"trace": str(folder / "trace.jsonl")}).ok()
    return folder


@pytest.mark.case("R04")
@pytest.mark.parametrize("rank", [1, 0])
def test_a_signal_to_one_rank_stops_both(pair, folder, case, rank):
    trace = folder / "trace.jsonl"
    with start_fit(folder, *TWO, faults={"trace": str(trace)}) as process:
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
    fit(folder, *TWO, *RESUME, faults={"trace": str(trace)}).ok()
    must_equal(run_folder(pair), run_folder(folder), (pair / "trace.jsonl", trace))


@pytest.mark.case("R15")
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_gradient_that_is_no_number(whole, folder, case, value):
    ended = fit(folder, faults={"bad_gradient": [value, 5, 0]})
    line = ended.refused("step 5", "nan|inf", "not changed")
    case.saw(line.removeprefix("error: "))
    assert step_of(newest(run_folder(folder))) == 4
    assert finite(newest(run_folder(folder)))
    fit(folder, *RESUME).ok()
    must_equal(run_folder(whole), run_folder(folder))


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
    trace = folder / "trace.jsonl"
    with start_fit(folder, *TWO, faults={"trace": str(trace)}) as process:
        process.wait_for(15)
        for pid in process.descendants():
            os.kill(pid, signal.SIGKILL)
        process.end()
    fit(folder, *TWO, *RESUME, faults={"trace": str(trace)}).ok()
    case.saw("2 to 2 after SIGKILL: exact")
    must_equal(run_folder(pair), run_folder(folder), (pair / "trace.jsonl", trace))


@pytest.mark.case("R26")
@pytest.mark.parametrize("first", ["two ranks", "one rank"])
def test_another_number_of_ranks_goes_on_in_the_same_order(single, folder, case, first):
    before, after = (TWO, ()) if first == "two ranks" else ((), TWO)
    trace = folder / "trace.jsonl"
    stop = {"signal_at": [int(signal.SIGTERM), 14, 1], "trace": str(trace)}
    assert fit(folder, *OFF, *before, faults=stop).code == 143
    ended = fit(folder, *OFF, *after, *RESUME, faults={"trace": str(trace)}).ok()
    assert re.search(r"changed +ranks", ended.out), ended.out[:2000]
    assert sequences(trace) == sequences(single / "trace.jsonl")
    found, expected = rows(run_folder(folder)), rows(run_folder(single))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        losses = {"train/loss", "val/loss"} & other.keys()
        assert losses == {"train/loss", "val/loss"} & one.keys()
        for key in losses:  # gradients are averaged in another order
            assert one[key] == pytest.approx(other[key], rel=1e-5), one
    case.saw(f"{first} first: the same order, loss within 1e-5")
