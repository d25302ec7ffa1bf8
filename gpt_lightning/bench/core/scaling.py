"""Model of the time of a training step over n processes, from a few measured constants.

    step(n)    = compute + exposed(n) + data + checkpoint / interval
    exposed(n) = max((1 - overlap) comm(n), comm(n) - window)
    comm(n)    = alpha hops(n) + 2 (n - 1) / n bytes / bandwidth
    hops(n)    = min(n - 1, 2 ceil(log2 n))

All-reduce of n processes: a ring (Patarasuk and Yuan 2009) sends 2 (n - 1) / n of the bytes in
n - 1 pairs of steps, and a tree as much in 2 log2 n. alpha is the latency of one of them. overlap
is the share of the communication that the backward hides, and window the longest time that it can.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Constants of an all-reduce.

    Attributes:
        alpha_s: Latency of a hop, in seconds.
        bytes_per_s: Bus bandwidth of a process.
    """

    alpha_s: float
    bytes_per_s: float

    def all_reduce_s(self, nbytes: float, n: int) -> float:
        """Return the seconds of an all-reduce of some bytes on each of n processes."""
        return self.alpha_s * hops(n) + bus_share(n) * nbytes / self.bytes_per_s


def hops(n: int) -> int:
    """Return the hops of an all-reduce of n processes."""
    return min(n - 1, 2 * math.ceil(math.log2(n)))


def bus_share(n: int) -> float:
    """Return the bytes that each of n processes sends in an all-reduce, over its bytes."""
    return 2 * (n - 1) / n


def fit_link(times: Sequence[tuple[float, float]], n: int) -> Link | None:
    """Return the link that explains times of all-reduces of n processes; None without two sizes.

    Args:
        times: Bytes and seconds. The line goes through the smallest and the largest size.
        n: Processes.
    """
    (small, fast), (large, slow) = min(times, default=(0, 0)), max(times, default=(0, 0))
    if large == small or slow <= fast:
        return None
    per_byte = (slow - fast) / (large - small)
    alpha = max(0.0, fast - small * per_byte)
    return Link(alpha / hops(n), bus_share(n) / per_byte)


@dataclass(frozen=True)
class Step:
    """Constants of a step on one process, in seconds.

    Attributes:
        compute_s: Forward, backward and update.
        gradient_bytes: Bytes that are all-reduced.
        overlap: Share of the communication that the backward hides, 0 to 1.
        window_s: Longest time that it hides: the backward of the last micro-batch.
        data_s: Wait for a batch.
        checkpoint_s: Stall of a checkpoint.
        interval: Steps between checkpoints.
    """

    compute_s: float
    gradient_bytes: float
    overlap: float
    window_s: float = math.inf
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    interval: int = 1

    def time_s(self, link: Link, n: int) -> float:
        """Return the seconds of a step of n processes."""
        comm = link.all_reduce_s(self.gradient_bytes, n)
        exposed = max((1 - self.overlap) * comm, comm - self.window_s)
        return self.compute_s + exposed + self.data_s + self.checkpoint_s / self.interval


def measured_overlap(exposed_s: float, comm_s: float) -> float:
    """Return the hidden share of a communication, from what a step takes longer with it."""
    return min(1.0, max(0.0, 1 - exposed_s / comm_s))
