"""Comparison of two ways to do the same work, in short blocks A B A B of one process.

A machine changes while it is measured: clocks, temperature, other processes. Changes that both
blocks of a round see cancel in their ratio, and the spread of the ratios shows the noise.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

Block = Callable[[], list[float]]  # returns the milliseconds of each of its steps
Round = tuple[list[float], list[float]]  # of A and of B


@dataclass(frozen=True)
class Comparison:
    """Times of A and B, and the ratios of B to A.

    Attributes:
        a_ms: Step of A: median over the rounds of a block's mean.
        b_ms: Step of B, likewise.
        difference_ms: Median over the rounds of B's mean step minus A's; noise can make it
            negative.
        ratio: Median over the rounds of B's mean step over A's.
        ratio_std: Standard deviation of the rounds' ratios; 0 for one round.
        ratio_min: Smallest ratio of a round.
        ratio_max: Largest ratio of a round.
    """

    a_ms: float
    b_ms: float
    difference_ms: float
    ratio: float
    ratio_std: float
    ratio_min: float
    ratio_max: float

    def named(self, a: str, b: str) -> dict[str, float]:
        """Return the numbers as fields of a row, with a_ms and b_ms named A_ms and B_ms."""
        names = {"a_ms": f"{a}_ms", "b_ms": f"{b}_ms"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


def interleave(a: Block, b: Block, rounds: int) -> list[Round]:
    """Run A B A B ... and return the times of each round."""
    return [(a(), b()) for _ in range(rounds)]


def compare(rounds: Sequence[Round]) -> Comparison:
    """Return statistics of at least one round; every block has at least one step.

    A block counts by its mean, so that work of every tenth step, such as logging, is included. A
    stall spoils one round, and the median over the rounds ignores it.
    """
    means = [(statistics.fmean(a), statistics.fmean(b)) for a, b in rounds]
    ratios = [b / a for a, b in means]
    return Comparison(
        a_ms=statistics.median([a for a, _ in means]),
        b_ms=statistics.median([b for _, b in means]),
        difference_ms=statistics.median([b - a for a, b in means]),
        ratio=statistics.median(ratios),
        ratio_std=statistics.stdev(ratios) if len(ratios) > 1 else 0.0,
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )
