"""Times of phases inside one step, on the device's own clock.

Every phase of every step is measured directly: no time is a difference of two means, so no time
can be negative. Timestamps cost nothing on a GPU (events), and the host waits for the device once,
after the last step.

Two ways to do the same work are compared in short blocks A B A B of one process. A machine changes
while it is measured: clocks, temperature, other processes. Changes that both blocks of a round see
cancel in their ratio, and the spread of the ratios shows the noise.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean, median, stdev

import torch

from gpt_lightning.data.loader import Batch
from gpt_lightning.hardware.device import Timestamp, elapsed_s, record_event, synchronize

Times = dict[str, list[float]]  # phase -> milliseconds of each step
STATISTICS: dict[str, Callable[[list[float]], float]] = {
    "mean": fmean,
    "std": lambda ms: stdev(ms) if len(ms) > 1 else 0.0,  # standard deviation of a sample
}
Block = Callable[[], list[float]]  # returns the milliseconds of each of its steps, at least one


def columns(name: str, milliseconds: list[float], *statistics: str) -> dict[str, float]:
    """Return columns of one phase: the median as NAME_ms, and STATISTICS as NAME_STATISTIC_ms."""
    others = {f"{name}_{key}_ms": STATISTICS[key](milliseconds) for key in statistics}
    return {f"{name}_ms": median(milliseconds), **others}


def phase_columns(times: Times, *phases: str) -> dict[str, float]:
    """Return the median, the mean and the standard deviation of the total and of each phase."""
    found: dict[str, float] = {}
    for phase in ("total", *phases):
        found |= columns(phase, times[phase], "mean", "std")
    return found


class StepTimer:
    """Records the ends of the phases of each step.

    Args:
        device: Device that does the work.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._marks: list[list[tuple[str, Timestamp]]] = []

    def begin(self) -> None:
        """Begin a step."""
        self._marks.append([("", record_event(self.device))])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Surround the work of a phase, which begins at the end of the phase before it."""
        yield
        self._marks[-1].append((name, record_event(self.device)))

    def milliseconds(self) -> Times:
        """Return durations by phase, one for each step, and of the whole step under `total`."""
        synchronize(self.device)
        found: Times = {}
        for step in self._marks:
            for (_, begin), (phase, end) in itertools.pairwise(step):
                found.setdefault(phase, []).append(elapsed_s(begin, end) * 1e3)
            found.setdefault("total", []).append(elapsed_s(step[0][1], step[-1][1]) * 1e3)
        return found


def record(
    step: Callable[[StepTimer], object], device: torch.device, warmup: int, steps: int
) -> tuple[Times, dict[str, float]]:
    """Run a step `warmup` times without the clock, then `steps` times with it.

    Args:
        step: Step that ends each phase on the timer.
        device: Device that does the work.
        warmup: Steps before; with 0 the first step, with compilation, is a measured one.
        steps: Measured steps, at least 1.

    Returns:
        Milliseconds of each step by phase, and those of the very first step, compilation included.
    """
    assert steps >= 1, steps
    synchronize(device)
    timer = StepTimer(device)
    first: dict[str, float] = {}
    for index in range(warmup + steps):
        if index == warmup and warmup:
            synchronize(device)
            timer = StepTimer(device)
        timer.begin()
        step(timer)
        if index == 0:
            first = {phase: values[0] for phase, values in timer.milliseconds().items()}
    return timer.milliseconds(), first


class TimedBatches:
    """Yields the same batch again and again, and records when each was requested.

    Args:
        batch: Tokens and targets, int64 (B, T) each, on the device.
        n: Number of batches.
    """

    def __init__(self, batch: Batch, n: int):
        self.batch, self.n = batch, n
        self.marks: list[Timestamp] = []

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.n):
            self.marks.append(record_event(self.batch[0].device))
            yield self.batch

    def milliseconds(self) -> list[float]:
        """Return the times between requests, n - 1 values."""
        synchronize(self.batch[0].device)
        return [elapsed_s(*marks) * 1e3 for marks in itertools.pairwise(self.marks)]


def compare(blocks: Mapping[str, Block], rounds: int) -> dict[str, float]:
    """Run A B A B ... and return statistics of the rounds as fields of a row.

    A block counts by its mean, so that work of every tenth step, such as logging, is included. A
    stall spoils one round, and the median over the rounds ignores it.

    Args:
        blocks: Block of A and block of B, by their names.
        rounds: Blocks of each, at least 1.

    Returns:
        A_ms and B_ms, with the names of the two: medians over the rounds of a block's mean step.
        ratio, ratio_std, ratio_min, ratio_max: median and spread of B's mean step over A's; the
        standard deviation of one round is 0.
    """
    (a, run_a), (b, run_b) = blocks.items()
    means = [(fmean(run_a()), fmean(run_b())) for _ in range(rounds)]
    ratios = [b_ms / a_ms for a_ms, b_ms in means]
    return {
        f"{a}_ms": median(a_ms for a_ms, _ in means),
        f"{b}_ms": median(b_ms for _, b_ms in means),
        "ratio": median(ratios),
        "ratio_std": STATISTICS["std"](ratios),
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
