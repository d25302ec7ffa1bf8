"""Comparison of two ways to do the same work, in short blocks A B A B of one process.

A machine changes while it is measured: clocks, temperature, other processes. Changes that both
blocks of a round see cancel in their ratio, and the spread of the ratios shows the noise.
"""

import statistics
from collections.abc import Callable, Mapping

Block = Callable[[], list[float]]  # returns the milliseconds of each of its steps, at least one


def compare(blocks: Mapping[str, Block], rounds: int) -> dict[str, float]:
    """Run A B A B ... and return statistics of the rounds as fields of a row.

    A block counts by its mean, so that work of every tenth step, such as logging, is included. A
    stall spoils one round, and the median over the rounds ignores it.

    Args:
        blocks: Block of A and block of B, by their names.
        rounds: Blocks of each, at least 1.

    Returns:
        A_ms and B_ms, with the names of the two: medians over the rounds of a block's mean step.
        difference_ms: median of B's mean step minus A's; noise can make it negative. ratio,
        ratio_std, ratio_min, ratio_max: median and spread of B's mean step over A's; the standard
        deviation of one round is 0.
    """
    (a, run_a), (b, run_b) = blocks.items()
    means = [(statistics.fmean(run_a()), statistics.fmean(run_b())) for _ in range(rounds)]
    ratios = [b_ms / a_ms for a_ms, b_ms in means]
    return {
        f"{a}_ms": statistics.median([a_ms for a_ms, _ in means]),
        f"{b}_ms": statistics.median([b_ms for _, b_ms in means]),
        "difference_ms": statistics.median([b_ms - a_ms for a_ms, b_ms in means]),
        "ratio": statistics.median(ratios),
        "ratio_std": statistics.stdev(ratios) if len(ratios) > 1 else 0.0,
        "ratio_min": min(ratios),
        "ratio_max": max(ratios),
    }
