"""Cells that no measurement can have: a row with one is a failed row, whatever its process said."""

import math
from collections.abc import Mapping
from typing import Any

TIMES_AND_RATES = ("_ms", "_s", "_per_sec")  # above 0
SIZES = ("_mib", "_gib")  # at least 0
SIGNED = ("difference_ms",)  # of two times; noise can make it negative


def implausible(measured: Mapping[str, Any]) -> str:
    """What is wrong with a row's numbers, by the units in their names; empty if nothing is."""
    found = [
        f"{name} is {value:.6g}"
        for name, value in measured.items()
        if isinstance(value, float) and not possible(name, value)
    ]
    return "; ".join(found)


def possible(name: str, value: float) -> bool:
    """Whether a field can have a value.

    Args:
        name: Of the field, with its unit.
        value: A time of 0 is none: clocks are finer than anything that is timed here. An MFU above
            1 has a wrong peak or a wrong time.
    """
    if not math.isfinite(value):
        return False
    if name in SIGNED:
        return True
    if name == "mfu":
        return 0.0 < value <= 1.0
    if "_std" in name or name.endswith(SIZES):
        return value >= 0.0
    return value > 0.0 or not name.endswith(TIMES_AND_RATES)


def finite(measured: Mapping[str, Any]) -> dict[str, Any]:
    """A row whose numbers that are none are missing: JSON has no word for them."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in measured.items()
    }
