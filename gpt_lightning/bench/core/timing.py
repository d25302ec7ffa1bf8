"""Times of phases inside one step, on the device's own clock.

Every phase of every step is measured where it happens: nothing is a difference of two means, so no
cell can be negative. Marks cost nothing on a GPU (events), and the device is waited for once, after
the last step.
"""

import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gpt_lightning.hardware.device import Timestamp, elapsed_s, record_event, synchronize

STALL = 10.0  # times the median


@dataclass(frozen=True)
class Stats:
    """Of the durations of one phase, in milliseconds.

    Attributes:
        median: Half of them are longer.
        mean: Their average.
        std: Standard deviation of the sample; 0 for one value.
        min: The shortest.
        p90: One in ten is longer.
        max: The longest: an outlier is seen here.
        steady_mean: Average without stalls, durations of over ten times the median: rates are of
            it, as SpeedMonitor's are.
    """

    median: float
    mean: float
    std: float
    min: float
    p90: float
    max: float
    steady_mean: float


def stats(milliseconds: list[float]) -> Stats:
    """Statistics of durations; there must be one at least."""
    ordered = sorted(milliseconds)
    median = statistics.median(ordered)
    return Stats(
        median=median,
        mean=statistics.fmean(ordered),
        std=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        min=ordered[0],
        p90=ordered[min(len(ordered) - 1, round(0.9 * (len(ordered) - 1)))],
        max=ordered[-1],
        steady_mean=statistics.fmean([value for value in ordered if value <= STALL * median]),
    )


class StepTimer:
    """Marks the ends of a step's phases.

    Args:
        device: That does the work.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[list[tuple[str, Timestamp]]] = []

    def begin(self) -> None:
        """A step begins now."""
        self._marks.append([("", record_event(self.device))])

    def end(self, phase: str) -> None:
        """A phase, which began where the one before it ended, ends now."""
        self._marks[-1].append((phase, record_event(self.device)))

    def milliseconds(self) -> dict[str, list[float]]:
        """Durations by phase, a value a step, and of the whole step under `total`."""
        synchronize(self.device)
        found: dict[str, list[float]] = {}
        for step in self._marks:
            for (_, begin), (phase, end) in itertools.pairwise(step):
                found.setdefault(phase, []).append(elapsed_s(begin, end) * 1e3)
            found.setdefault("total", []).append(elapsed_s(step[0][1], step[-1][1]) * 1e3)
        return found


def measure(
    step: Callable[[StepTimer], None], device: torch.device, warmup: int, steps: int
) -> tuple[dict[str, Stats], float]:
    """Runs a step `warmup` times without, and `steps` times with the clock.

    Args:
        step: Calls `timer.end(phase)` at the end of each phase.
        device: That does the work.
        warmup: Steps before; with 0 the first step, with compilation, is among those measured.
        steps: At least 1.

    Returns:
        Statistics by phase, and the seconds of the very first step, compilation included.
    """
    assert steps >= 1, steps
    synchronize(device)
    timer = StepTimer(device)
    first = None
    for index in range(warmup + steps):
        if index == warmup and warmup:
            synchronize(device)
            timer = StepTimer(device)
        timer.begin()
        step(timer)
        if first is None:
            synchronize(device)
            first = timer.milliseconds()["total"][0] / 1e3
    assert first is not None, "no step"
    return {phase: stats(values) for phase, values in timer.milliseconds().items()}, first
