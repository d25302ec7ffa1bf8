"""Attempts with growing pauses at files behind URLs, and the classification of their errors."""

import errno
import time
from collections.abc import Callable
from typing import Any, TypeVar

from gpt_lightning.errors import OutageError, UserError, one_line, reason_of

BACKOFF_S = 0.5  # pause, which doubles with every attempt
LONGEST_S = 30.0  # pause
PATIENCE_S = 16.0  # time in all, for six attempts
SILENCE_S = 60.0  # timeout of a connection that sends nothing
AGAIN = "run the same command again: `prepare` continues, and `fit` with --resume auto"
BUSY = 408, 425, 429  # HTTP statuses below 500 after which another attempt may succeed
MISSING = 404, 410
NO_FILE = FileNotFoundError, NotADirectoryError
DISK_FULL = errno.ENOSPC, errno.EDQUOT, errno.EFBIG
PERMANENT = (
    *NO_FILE,
    IsADirectoryError,
    PermissionError,
    ImportError,
    NotImplementedError,
    ValueError,
)
LINE_S = 60.0  # time between two lines about an outage
T = TypeVar("T")


def attempts(
    url: str,
    work: Callable[[Any, str], T],
    action: str = "fetch",
    first: bool = False,
    patience_s: float | None = None,
) -> T:
    """Call a function with a URL's file system and path until it succeeds, with growing pauses.

    Args:
        url: Address on any file system of fsspec.
        work: Function of the file system and the path.
        action: Verb for messages.
        first: True for the first request to a new address: without a connection it is wrong.
        patience_s: Time after which no further attempt is made; None: 16 s.

    Raises:
        UserError: The error is one that no attempt mends.
        OutageError: The last attempt failed.
        OSError: A disk of this machine is full.
    """
    began = time.monotonic()
    next_line_s, pause_s = 0.0, BACKOFF_S
    limit_s = PATIENCE_S if patience_s is None else patience_s
    while True:
        try:
            return work(*on_file_system(url))
        except UserError:
            raise
        except Exception as error:  # each file system has its own for lost connections
            if getattr(error, "errno", None) in DISK_FULL:
                raise
            reason = reason_for(error)
            if not is_passing(error, first):
                fix = "check the address, the connection and the permissions"
                raise UserError(f"cannot {action} {url}: {reason}; {fix}") from error
            waited_s = time.monotonic() - began
            if waited_s + pause_s > limit_s:
                raise OutageError(
                    f"cannot {action} {url} ({reason}): check the connection and the file; {AGAIN}"
                ) from error
        if waited_s >= next_line_s:
            next_line_s = waited_s + LINE_S
            print(f"cannot {action} {url} ({reason}): trying for {limit_s:.0f} s", flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_S)


def on_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, one a process and thread loop, and the path on it.

    Raises:
        UserError: There is no such protocol, or it needs a package that is missing.
    """
    import fsspec  # local files do not need it

    options: dict[str, Any] = {}
    if url.startswith("http"):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        options["client_kwargs"] = {"timeout": timeout, "trust_env": True}  # HTTPS_PROXY
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except ImportError as error:
        package = getattr(error.__cause__, "name", None) or "fsspec[full]"
        raise UserError(f"{url} needs a package: pip install {package}") from error
    except ValueError as error:
        raise UserError(f"{url}: {error}: use s3://, gs:// or a folder") from error
    return system, path


# ---- errors ------------------------------------------------------------------------------------


def is_passing(error: Exception, first: bool = False) -> bool:
    """Return whether the reason of an error is a lost connection or a busy server.

    Args:
        error: Exception of any file system.
        first: True for the first request to an address.
    """
    origin = origin_of(error)
    if (status := http_status(origin)) is not None:
        return status in BUSY or status >= 500
    return not isinstance(origin, (*PERMANENT, *([OSError] if first else [])))


def is_missing(error: Exception) -> bool:
    """Return whether the reason of an error is that the file does not exist."""
    origin = origin_of(error)
    return isinstance(origin, NO_FILE) or http_status(origin) in MISSING


def reason_for(error: Exception) -> str:
    """Return the reason of an error in words."""
    return "no such file" if is_missing(error) else one_line(reason_of(origin_of(error)))


def origin_of(error: Exception) -> BaseException:
    """Return the error behind fsspec's FileNotFoundError, which it raises for any of http."""
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None
    is_http = isinstance(cause, OSError) or type(cause).__module__.startswith("aiohttp")
    return cause if cause is not None and is_http else error


def http_status(error: BaseException) -> int | None:
    """Return the status of an error of aiohttp or of the Hugging Face hub."""
    response = getattr(error, "response", None)
    found = getattr(error, "status", None) or getattr(response, "status_code", None)
    return found if isinstance(found, int) else None
