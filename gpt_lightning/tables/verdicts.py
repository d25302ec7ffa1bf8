"""Verdicts on rows: the result of a comparison, and sanity checks of measured values.

A row with an impossible value (NaN, time <= 0, MFU > 1) is marked failed.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

TIMES_AND_RATES = ("_ms", "_s", "_per_sec")  # above 0
MEMORY = ("_mib", "_gib")  # columns of at least 0
SIGNED = ("difference_ms",)  # noise can make the difference of two times negative
FINE = ("ok", "out of memory", "skipped")  # statuses that are no failure
KEPT = ("ok", "out of memory")  # statuses of rows that a resumed sweep does not measure again


class Verdict(StrEnum):
    """Result of a comparison, or the reason why there is none."""

    OK = "ok"
    DRIFT = "drift"
    FAILED = "FAIL"
    ERROR = "error"
    SKIPPED = "skipped"


def implausible(measured: Mapping[str, Any]) -> str:
    """Describe the impossible numbers of a row, by the units in their names; empty if none is."""
    found = [
        f"{name} is {value:.6g}"
        for name, value in measured.items()
        if isinstance(value, float) and not possible(name, value)
    ]
    return "; ".join(found)


def possible(name: str, value: float) -> bool:
    """Return whether a field can have a value.

    Args:
        name: Name of the field, with its unit.
        value: Value. A time of 0 is impossible: clocks are finer than anything timed here. An MFU
            above 1 has a wrong peak or a wrong time.
    """
    if not math.isfinite(value):
        return False
    if name in SIGNED:
        return True
    if name == "mfu":
        return 0.0 < value <= 1.0
    if "_std" in name or name.endswith(MEMORY):
        return value >= 0.0
    return value > 0.0 or not name.endswith(TIMES_AND_RATES)


def finite(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with None for non-finite numbers, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in measured.items()
    }
