"""Two ways to do the same work, in short blocks A B A B of one process.

A machine changes while it is measured: clocks, temperature, other people's work. What two blocks
that follow each other have in common cancels in their ratio, and the ratios of all rounds say how
far the result can be trusted.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

Block = Callable[[], list[float]]  # milliseconds of each of its steps
Round = tuple[list[float], list[float]]  # of A and of B


@dataclass(frozen=True)
class Comparison:
    """B against A.

    Attributes:
        a_ms: A step of A: median over the rounds of a block's mean.
        b_ms: The same of B.
        difference_ms: Median over the rounds of B's mean step less A's; noise can make it negative
            where the two are equal.
        ratio: Median over the rounds of B's mean step over A's.
        ratio_std: Standard deviation of the rounds' ratios; 0 for one round.
        ratio_min: The smallest of them.
        ratio_max: The largest of them.
    """

    a_ms: float
    b_ms: float
    difference_ms: float
    ratio: float
    ratio_std: float
    ratio_min: float
    ratio_max: float

    def named(self, a: str, b: str) -> dict[str, float]:
        """Its numbers as fields of a row: a_ms is A_ms, b_ms is B_ms."""
        names = {"a_ms": f"{a}_ms", "b_ms": f"{b}_ms"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


def interleave(a: Block, b: Block, rounds: int) -> list[Round]:
    """Runs A B A B ..."""
    return [(a(), b()) for _ in range(rounds)]


def compare(rounds: Sequence[Round]) -> Comparison:
    """Statistics of one round or more; every block has one step at least.

    A block is its mean: what only every tenth step does, such as logging, counts. A stall spoils
    its round, which the median over the rounds leaves out.
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
