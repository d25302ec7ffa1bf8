"""Files behind a URL, on any file system of fsspec: attempts with pauses, and checked copies."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec.registry import known_implementations

from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256, replacement

ATTEMPTS = 6
BACKOFF_S = 0.5  # doubles with every attempt, 15 s in all
DENIED = 401, 403, 404  # HTTP
MISSING = FileNotFoundError, NotADirectoryError, PermissionError
SILENCE_S = 60.0  # timeout of a connection that sends nothing
T = TypeVar("T")


def fetch_file(
    url: str,
    path: Path,
    sha256: str,
    before: Callable[[Path], None] = lambda temporary: None,
    n_bytes: int | None = None,
    fix: str = "check the file at this address",
) -> str:
    """Fetch a file, which appears at `path` complete and checked or not at all.

    Args:
        url: Address of the file.
        path: Path of the copy.
        sha256: Expected digest; "" for any.
        before: Function to call before the copy, with the path of the temporary file.
        n_bytes: Expected size; None for any.
        fix: Hint for a file with another digest.

    Returns:
        SHA-256 of the file.

    Raises:
        UserError: All attempts failed, or the same other file came twice.
        OSError: The file cannot be written.
    """

    def fetch(system: Any, remote_path: str) -> str:
        system.get_file(remote_path, str(temporary))
        found, size = file_sha256(temporary), temporary.stat().st_size
        problem = f"expected {n_bytes:,} bytes, found {size:,}" if size != (n_bytes or size) else ""
        if found != (sha256 or found):
            problem = problem or f"expected SHA-256 {sha256}, found {found}"
        if problem and found in others:  # not damaged on its way
            raise UserError(f"cannot fetch {url} ({problem}, twice): {fix}") from ValueError(
                problem
            )
        if problem:
            others.add(found)
            raise ValueError(problem)
        return found

    others: set[str] = set()
    with replacement(path) as temporary:
        before(temporary)
        found = attempts(url, fetch)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
    return found


def attempts(url: str, work: Callable[[Any, str], T], action: str = "fetch") -> T:
    """Call a function with a URL's file system and path until it succeeds, with growing pauses.

    Args:
        url: Address on any file system of fsspec.
        work: Function of the file system and the path.
        action: Verb for errors.

    Raises:
        UserError: The last attempt failed, or the file does not exist.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(BACKOFF_S * 2 ** (attempt - 1))
        try:
            return work(*on_file_system(url))
        except UserError:
            raise
        except Exception as error:  # each file system has its own for lost connections
            reason = type(error).__name__
            if (status := getattr(error, "status", 0)) in DENIED or isinstance(error, MISSING):
                problem = "does not exist" if action == "fetch" else f"cannot be used to {action}"
                if action == "fetch" and status in DENIED[:2]:
                    problem = "cannot be read"
                raise UserError(
                    f"{url} {problem} ({status or reason}): check the address and its permissions"
                ) from error
            reason = " ".join(str(error).split()) or reason
            last: Exception = error
            if attempt == 0:
                print(
                    f"cannot {action} {url} ({reason}): trying {ATTEMPTS - 1} times more",
                    flush=True,
                )
    raise UserError(
        f"cannot {action} {url} after {ATTEMPTS} attempts ({reason}): check the connection and the "
        "file; --resume auto continues a run from its last checkpoint"
    ) from last


def on_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, one a process and thread loop, and the path on it.

    Raises:
        UserError: There is no such protocol, or it needs a package that is missing.
    """
    options: dict[str, Any] = {}
    if url.startswith(("http://", "https://")):
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENCE_S, sock_read=SILENCE_S)
        options["client_kwargs"] = {"timeout": timeout}
    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:
        known = known_implementations.get(url.partition("://")[0], {})
        package = known.get("class", "fsspec").partition(".")[0]
        fix = "use s3://, gs:// or a folder" if package == "fsspec" else f"pip install {package}"
        raise UserError(f"{url}: {' '.join(str(error).split())}: {fix}") from error
    return system, path
