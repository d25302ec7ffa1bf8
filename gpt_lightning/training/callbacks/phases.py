"""PhaseClock: wall time of a run by phase."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class PhaseClock:
    """Assign every moment to exactly one phase, so that the phases add up to the wall time.

    Args:
        phase: Phase that begins now.
        now: Clock, in seconds, monotonic.
    """

    def __init__(self, phase: str, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._since = now()
        self.current = phase
        self._seconds: dict[str, float] = {}

    def switch(self, phase: str) -> None:
        """End the current phase and begin another, or continue one."""
        now = self._now()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        self._since, self.current = now, phase

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Interrupt the current phase by another, and continue it afterwards."""
        outer = self.current
        self.switch(name)
        try:
            yield
        finally:
            self.switch(outer)

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase, the current one up to now, in order of first appearance."""
        self.switch(self.current)
        return dict(self._seconds)
