"""Exceptions: user errors and out-of-memory (exit code 2), loss of a rank (75), SIGTERM (143)."""

import contextlib
import functools
import importlib
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

EXIT_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: the same command may succeed later
CONTINUE = "start the same command with --resume auto to continue"


class UserError(ValueError):
    """Bad input. The message is one line: the file or key, what was found, and the fix.

    The command line prints the message without a traceback and exits with 2. Any other exception is
    a defect of the program or of the machine, and exits with 1.
    """

    exit_code = 2


class OutageError(UserError):
    """Server, store or connection that does not answer; the command line exits with 75."""

    exit_code = EXIT_AGAIN


class MemoryExhaustedError(RuntimeError):
    """Out of memory. The message is one line that names settings with a smaller need.

    The command line treats it like a UserError; benchmarks record a failed row and continue.
    """

    exit_code = 2


class PeerError(RuntimeError):
    """Failure of another rank or of its machine.

    The command line prints the message without a traceback and exits with 75: the same command with
    `--resume auto` continues.
    """

    exit_code = EXIT_AGAIN


def optional(package: str, extra: str) -> Any:
    """Return a package of one of our extras; raise a UserError if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise UserError(f"{package} is missing: pip install 'gpt-lightning[{extra}]'") from error


# messages of the allocators of CUDA, MPS and the CPU, of cuBLAS and cuDNN, of C++ and the system
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate",
    "status_alloc_failed",
    "bad_alloc",
    "size calculation overflowed",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means that memory ran out."""
    if isinstance(error, MemoryError | MemoryExhaustedError):
        return True
    text = str(error).lower()
    return not isinstance(error, UserError | PeerError) and any(
        sign in text for sign in OUT_OF_MEMORY
    )


def exit_on_signal(number: int, frame: object) -> NoReturn:
    """Handle a signal by SystemExit, so that a command cleans up as after Ctrl-C."""
    sys.exit(128 + number)


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit."""
    if threading.current_thread() is not threading.main_thread():  # only it may set handlers
        yield
        return
    before = signal.signal(signal.SIGTERM, exit_on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def one_line(error: object) -> str:
    """Return a text, or the message of an exception, as one line."""
    return " ".join(str(error).split())


@functools.cache
def warn(text: str) -> None:
    """Print a warning on standard error, each text once in a process."""
    print(f"warning: {text}", file=sys.stderr)


def reason_of(error: BaseException) -> str:
    """Return the first line of an exception in words, without the name of its class."""
    text = next(iter(str(error).strip().splitlines()), "")
    if isinstance(error, KeyError):
        return f"{text} is missing"
    if isinstance(error, TypeError | AttributeError):
        return "its content has another form"
    if "Weights only load failed" in text:
        return "it holds objects, which would run code"
    return text or type(error).__name__
