"""Files behind URLs: list, read, fetch, upload, delete."""

import contextlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, file_sha256, replacement
from gpt_lightning.remote.attempts import NO_FILE, T, attempts, is_missing

TRANSFERS = 3  # of a file that arrives with other bytes


# ---- reading -----------------------------------------------------------------------------------


def listed(url: str) -> dict[str, Fields]:
    """Return the entries of a folder by name, as fsspec lists them; none if it does not exist."""

    def entries(system: Any, path: str) -> list[Fields]:
        system.invalidate_cache()
        return list(system.ls(path, detail=True))

    found = _if_there(url, entries, "list") or []
    return {entry["name"].rstrip("/").rpartition("/")[2]: entry for entry in found}


def read(url: str, first: bool = False) -> bytes:
    """Return the content of a file; `first` as in attempts."""
    return attempts(url, lambda system, path: system.cat_file(path), first=first)


def read_if_there(url: str) -> bytes | None:
    """Return the content of a file; None if it does not exist."""
    return _if_there(url, lambda system, path: bytes(system.cat_file(path)))


def _if_there(url: str, work: Callable[[Any, str], T], action: str = "fetch") -> T | None:
    """Return the result of `attempts`; None if the file does not exist."""

    def found(system: Any, path: str) -> T | None:
        try:
            return work(system, path)
        except NO_FILE as error:
            if is_missing(error):
                return None
            raise

    return attempts(url, found, action)


def fetch_file(
    url: str,
    path: Path,
    sha256: str,
    patience_s: float | None = None,
    check: Callable[[Path], object] = bool,
) -> None:
    """Fetch a file, which appears at `path` complete and checked or not at all.

    Args:
        url: Address of the file.
        path: Path of the copy.
        sha256: Expected digest; "" for any.
        patience_s: Argument of `attempts`.
        check: Function that raises a UserError for a copy that is not the expected one.

    Raises:
        UserError: All attempts failed, another file came each time, or it cannot be written.
    """

    def get(system: Any, there: str) -> None:
        system.get_file(there, str(temporary))

    with explained("write", path), replacement(path) as temporary:
        for _ in range(TRANSFERS):  # bytes may be damaged on their way
            attempts(url, get, patience_s=patience_s)
            found = file_sha256(temporary)
            if sha256 in ("", found):
                break
        else:
            raise UserError(
                f"cannot fetch {url}: expected SHA-256 {sha256}, found {found}: check the file at "
                "this address"
            )
        check(temporary)
        sync_file(temporary)


def sync_file(path: Path) -> None:
    """Sync the content of a file to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ---- writing -----------------------------------------------------------------------------------


def upload(path: Path, url: str) -> None:
    """Upload a file. On a disk, its name means a complete file at every moment, as in a store.

    Raises:
        UserError: All attempts failed.
    """

    def put(system: Any, there: str) -> None:
        if "local" in system.protocol:  # a disk, which may be shared
            with explained("write", there), replacement(Path(there)) as temporary:
                shutil.copyfile(path, temporary)
                sync_file(temporary)
            return
        system.put_file(str(path), there)
        system.invalidate_cache()
        size = path.stat().st_size
        found = system.info(there)["size"]
        if found != size:
            raise ConnectionError(f"sent {size:,} bytes, found {found:,}")

    attempts(url, put, "write")


def delete(url: str) -> None:
    """Delete a file, if it exists."""

    def remove(system: Any, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            system.rm_file(path)

    attempts(url, remove, "delete")
