"""The timing core, on a clock that the tests turn."""

import pytest
import torch

from gpt_lightning.bench import timing
from gpt_lightning.bench.timing import StepTimer, columns, compare, phase_columns, record

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the test began, in a list of one."""
    now = [0.0]
    monkeypatch.setattr(timing, "record_event", lambda device: now[0])
    return now


def scripted(clock, durations):
    """A step whose phases take what is written, in seconds; one dictionary a step."""
    script = iter(durations)

    def step(timer):
        for phase, seconds in next(script).items():
            with timer.phase(phase):
                clock[0] += seconds

    return step


def test_phases_are_measured_where_they_happen(clock):
    steps = [{"forward": 1.0, "backward": 2.0, "optimizer": 0.5}] * 4
    found, _ = record(scripted(clock, steps), CPU, warmup=1, steps=3)
    milliseconds = {"forward": 1000.0, "backward": 2000.0, "optimizer": 500.0, "total": 3500.0}
    assert found == {phase: [ms] * 3 for phase, ms in milliseconds.items()}


def test_phases_add_up_to_the_total_of_each_step(clock):
    timer = StepTimer(CPU)
    step = scripted(clock, [{"a": 0.1 * n, "b": 0.7, "c": n * n} for n in range(1, 6)])
    for _ in range(5):
        clock[0] += 3.0  # between two steps, which is nobody's
        timer.begin()
        step(timer)
    times = timer.milliseconds()
    for parts in zip(times["a"], times["b"], times["c"], times["total"], strict=True):
        assert sum(parts[:3]) == pytest.approx(parts[3], rel=1e-12)


@pytest.mark.parametrize(("warmup", "expected"), [(2, [1000.0] * 3), (0, [60_000.0, 5000.0])])
def test_warm_up_is_not_among_the_steps_and_the_first_step_is_told(clock, warmup, expected):
    steps = [{"all": 60.0}, {"all": 5.0}, *[{"all": 1.0}] * 3]  # it compiles, then fills pools
    found, first = record(scripted(clock, steps), CPU, warmup, len(expected))
    assert first["total"] == 60_000.0
    assert found["all"] == expected


def test_an_outlier_is_seen_and_does_not_move_the_median():
    found = phase_columns({"total": [10.0] * 9 + [1000.0], "a": [7.0]}, "a")
    assert found["total_ms"] == 10.0
    assert found["total_mean_ms"] == pytest.approx(109.0)
    assert found["total_std_ms"] > 100
    assert (found["a_ms"], found["a_mean_ms"], found["a_std_ms"]) == (7.0, 7.0, 0.0)


def test_statistics_are_in_order():
    found = columns("a", [3.0, 1.0, 2.0, 5.0, 4.0], *timing.STATISTICS)
    assert (found["a_ms"], found["a_mean_ms"]) == (3.0, 3.0)
    assert found["a_std_ms"] == pytest.approx(2.5**0.5)  # deviation of a sample: 10 / (5 - 1)


# ---- A B A B -------------------------------------------------------------------------------------


def test_blocks_alternate():
    order = []
    blocks = {name: lambda name=name: order.append(name) or [1.0] for name in "ab"}
    compare(blocks, rounds=3)
    assert "".join(order) == "ababab"


def compared(rounds):
    """Compares blocks that took the milliseconds of these rounds."""
    a, b = (iter(blocks) for blocks in zip(*rounds, strict=True))
    return compare({"ours": lambda: next(a), "theirs": lambda: next(b)}, len(rounds))


def test_a_machine_that_slows_down_leaves_the_ratio():
    rounds = [([s * 10.0] * 3, [s * 12.0] * 3) for s in (1, 2, 3)]
    found = compared(rounds)
    assert (found["ours_ms"], found["theirs_ms"]) == (20.0, 24.0)
    assert found["ratio"] == pytest.approx(1.2)
    assert found["ratio_std"] == pytest.approx(0.0, abs=1e-12)


def test_the_spread_is_that_of_the_rounds():
    found = compared([([10.0], [10.0]), ([10.0], [20.0]), ([10.0], [30.0])])
    assert (found["ratio_min"], found["ratio"], found["ratio_max"]) == (1.0, 2.0, 3.0)
    assert found["ratio_std"] == pytest.approx(1.0)
    assert found["theirs_ms"] == 20.0


def test_what_every_tenth_step_does_counts_and_a_stalled_round_does_not():
    logging = [1.0] * 9 + [6.0]
    rounds = [([1.0] * 10, logging)] * 4 + [([1.0] * 10, [500.0] * 10)]
    found = compared(rounds)
    assert found["theirs_ms"] == pytest.approx(1.5)
    assert found["ratio"] == pytest.approx(1.5)
    assert found["ratio_max"] == 500.0


def test_a_batch_is_timed_from_request_to_request(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0])
    monkeypatch.setattr(timing, "record_event", lambda device: next(now))
    batches = timing.TimedBatches((torch.zeros(1), torch.zeros(1)), 4)
    assert len(list(batches)) == len(batches) == 4
    assert batches.milliseconds() == [1000.0, 2000.0, 3000.0]


def test_the_host_waits_before_the_clock_starts_and_before_it_is_read(clock, monkeypatch):
    """Else work of the warm-up, still queued on the device, would count as the first step."""
    events = []
    monkeypatch.setattr(timing, "synchronize", lambda device: events.append("wait"))
    steps = scripted(clock, [{"all": 1.0}] * 4)

    def step(timer):
        events.append("step")
        steps(timer)

    timing.record(step, CPU, warmup=2, steps=2)
    assert events == ["wait", "step", "wait", "step", "wait", "step", "step", "wait"]
