"""Standard output and standard error: what happens when they are lost, and bars."""

import io
import os
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_S = 10.0  # seconds between two states of a bar in a log


class Output(io.FileIO):
    """Standard output or standard error, which remembers the error with which it was lost.

    It is lost when the reader of a pipe goes away, a terminal is closed, or a disk is full. Later
    text is dropped. A run goes on to the end of its step, and StopSignals saves and ends it as on
    SIGHUP. Another command ends at once.

    Attributes:
        of_run: True in a run.
        lost: First error of either stream.
    """

    of_run: ClassVar[bool] = False
    lost: ClassVar[OSError | None] = None

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            first = Output.lost is None
            Output.lost = Output.lost or error
            if first and not self.of_run:
                raise
            return len(content)


def open_closed_streams() -> None:
    """Open standard streams that the process has begun without, and escape what stdout lacks."""
    # The next file that is opened, for example a checkpoint, would get a missing descriptor 0, 1 or
    # 2, and prints of C++ would be written into this file.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "r+"))  # noqa: SIM115 - of the whole process
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal or file may have ASCII alone
        sys.stdout.reconfigure(errors="backslashreplace")


def use_output(of_run: bool) -> None:
    """Replace the streams of this process, unless they are a notebook's or a test's.

    Args:
        of_run: True if losing them ends a run between two steps.
    """
    Output.of_run = of_run
    Output.lost = None
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is getattr(sys, f"__{name}__"):
            stream.flush()
            raw = io.BufferedWriter(Output(descriptor, "w", closefd=False))
            text = io.TextIOWrapper(raw, stream.encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


def wrapped(line: str, indent: int = 6, **how: Any) -> str:
    """Return a line broken between words at the terminal's width; `how` goes to textwrap.fill."""
    how |= {"break_long_words": False, "break_on_hyphens": False}
    columns = shutil.get_terminal_size().columns
    return textwrap.fill(line, columns, subsequent_indent=" " * indent, placeholder=" ...", **how)


def progress_bar(n_bytes: int, done_bytes: int = 0) -> "tqdm[Any]":
    """Return a progress bar over bytes; a log gets its state every ten seconds.

    Args:
        n_bytes: Bytes of the whole input.
        done_bytes: Bytes that an earlier run has done.
    """
    from tqdm import tqdm  # a command's --help does not need it

    wait_s = 0.1 if sys.stderr.isatty() else LOG_S
    return tqdm(
        total=n_bytes,
        initial=done_bytes,
        unit="B",
        unit_scale=True,
        leave=False,
        mininterval=wait_s,
        delay=wait_s,
    )
