"""Progress of a preparation: a bar on a terminal, else a line every ten seconds."""

import time
from typing import Self

LINE_S = 10.0  # seconds between two lines


class Progress:
    """Progress display with MB/s of input and the number of tokens.

    Args:
        n_bytes: Bytes of the whole input.
        done_bytes: Bytes that an earlier run has done.
    """

    def __init__(self, n_bytes: int, done_bytes: int) -> None:
        self._n_bytes = n_bytes
        self._bytes = self._begun_bytes = done_bytes
        self._tokens = 0
        self._begun_s = self._printed_s = time.monotonic()
        from tqdm import tqdm  # a command's --help does not need it

        # disable=None: no bar where stderr is not a terminal
        self._bar = tqdm(
            total=n_bytes, initial=done_bytes, unit="B", unit_scale=True, leave=False, disable=None
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, n_bytes: int, n_tokens: int) -> None:
        """Count a unit."""
        self._bytes += n_bytes
        self._tokens += n_tokens
        self._bar.set_postfix_str(f"{self._tokens:,} tokens", refresh=False)
        self._bar.update(n_bytes)
        if self._bar.disable and time.monotonic() - self._printed_s >= LINE_S:
            self._printed_s = time.monotonic()
            print(self.line(), flush=True)

    def reach(self, n_bytes: int, n_tokens: int) -> None:
        """Count tokens, and the input up to n_bytes."""
        self.add(n_bytes - self._bytes, n_tokens)

    def line(self) -> str:
        """Return the line of a log."""
        seconds = max(time.monotonic() - self._begun_s, 1e-9)
        rate = (self._bytes - self._begun_bytes) / 1e6 / seconds
        percent = 100 * self._bytes / max(self._n_bytes, 1)
        return (
            f"{self._bytes / 1e6:,.0f} of {self._n_bytes / 1e6:,.0f} MB ({percent:.0f}%), "
            f"{rate:.1f} MB/s, {self._tokens:,} tokens"
        )
