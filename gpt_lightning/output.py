"""Standard output and standard error whose loss cannot end a command."""

import contextlib
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from gpt_lightning.errors import UserError

if TYPE_CHECKING:
    from tqdm import tqdm

LOG_S = 10.0  # seconds between two states of a bar in a log


@dataclass(eq=False)
class LastingStream:
    """Text stream that drops its text after the first error of its file.

    The reader of a pipe goes away, a terminal is closed, or a disk is full. Then a warning is
    printed once on the other stream, later text is dropped, and the command continues.

    A progress bar on a terminal begins its writes with a carriage return, and ends in no new line.
    The bar is erased before other text is written, which would continue the bar's line.

    Args:
        name: Name of the stream in the warning.
        stream: Stream, with or without a file descriptor.
        prints_only: True for a command that does nothing but print. If the reader goes away, the
            command ends with exit code 0; another error is a UserError.
    """

    bar: ClassVar[Any] = (None, 0)  # stream of the last write, and the width of the bar in it

    _name: str
    _stream: Any
    _prints_only: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        stream, width = LastingStream.bar
        if text:
            LastingStream.bar = (self, len(text.strip()) if text[0] == "\r" else 0)
            if width and text[0].isprintable() and self.isatty() and stream.isatty():
                stream.write(f"\r{' ' * width}\r")
                stream.flush()
        try:
            self._stream.write(text)
        except UnicodeEncodeError as error:  # the terminal or file may have ASCII alone
            plain = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            self.write(plain)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        with contextlib.suppress(OSError, AttributeError, ValueError):  # a notebook's has none
            if self._stream.fileno() in (1, 2):
                # text in the buffer and child processes write there
                os.dup2(descriptor, self._stream.fileno())
        self._stream = os.fdopen(descriptor, "w")
        if self._prints_only and isinstance(error, BrokenPipeError):
            raise SystemExit(0)
        if self._prints_only:
            raise UserError(f"cannot write {self._name}: {error.strerror}") from error
        other = sys.stdout if self is sys.stderr else sys.stderr
        print(
            f"warning: {self._name} is lost ({error.strerror}); the command continues without it",
            file=other,
            flush=True,
        )


@contextlib.contextmanager
def lasting_output(prints_only: bool = False) -> Iterator[None]:
    """Replace sys.stdout and sys.stderr by streams whose loss cannot end a command.

    Args:
        prints_only: True for a command that does nothing but print; losing standard output ends it.
    """
    # The next file that is opened, for example a checkpoint, would get a missing descriptor 0, 1 or
    # 2, and prints of C++ would be written into this file.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    before = sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull, "r+") as closed:  # Python has None for a stream that is closed
        sys.stdin = before[0] or closed
        sys.stdout = LastingStream("standard output", before[1] or closed, prints_only)
        sys.stderr = LastingStream("standard error", before[2] or closed, False)
        try:
            yield
        finally:
            sys.stderr.flush()
            sys.stdin, sys.stdout, sys.stderr = before


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
