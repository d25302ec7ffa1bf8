"""Results of tasks: metrics with standard errors, beside the published figures of GPT-2."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

HARNESS = "lm-evaluation-harness"
Item = dict[str, Any]  # of a task


@dataclass(frozen=True)
class Metric:
    """One number of a task.

    Attributes:
        protocol: Name of the rules that it was computed by.
        name: Name of the number under these rules.
        value: The number; an accuracy is a fraction.
        stderr: Standard error; None where the protocol has none.
    """

    protocol: str
    name: str
    value: float
    stderr: float | None = None


@dataclass(frozen=True)
class Result:
    """Metrics of a task and what they were computed from.

    Attributes:
        task: Name of the task.
        metrics: Numbers of all protocols, the headline first.
        notes: Facts about the items that readers of the numbers need.
        scores: Scores of the requests of each item: log-likelihood, scored tokens, greedy.
    """

    task: str
    metrics: list[Metric]
    notes: list[str]
    scores: list[Any]


def accuracy(protocol: str, name: str, hits: Sequence[bool]) -> Metric:
    """Return the share of hits, and its standard error from the sample's standard deviation."""
    deviation = statistics.stdev(map(float, hits)) if len(hits) > 1 else None
    stderr = None if deviation is None else deviation / math.sqrt(len(hits))
    return Metric(protocol, name, statistics.fmean(hits), stderr)


def exp(nats: float) -> float:
    """Return the perplexity of a mean loss; infinite where a float cannot hold it."""
    return math.exp(nats) if nats < 700 else math.inf
