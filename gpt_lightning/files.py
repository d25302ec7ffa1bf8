"""Files and folders that appear complete or not at all."""

import contextlib
import errno
import glob
import hashlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from gpt_lightning.errors import UserError


@contextlib.contextmanager
def explained(action: str, path: Path) -> Iterator[None]:
    """Turns an OSError (full disk, no permission) into a line: action, path, reason."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot {action} {path}: {error.strerror or error}; "
            "check the disk's space and permissions, or choose another folder"
        ) from error


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file so that at every moment it is absent, the old one, or complete.

    Raises:
        UserError: the folder cannot be written or the disk is full.
    """
    with explained("write", path):
        temporary = _temporary(path)
        try:
            write_durable(temporary, content)
            os.replace(temporary, path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder, not only the files' contents, survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durable(path: Path, *parts: bytes | memoryview) -> None:
    """Writes a file and waits until the disk has it.

    Raises:
        OSError: it cannot be written; a part of it may be left.
    """
    with open(path, "wb") as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """A folder beside `out`, so that a rename leads from one to the other; gone afterwards."""
    folder = _temporary(out)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # what is left, the next run sweeps


def _temporary(path: Path) -> Path:
    """A free name beside `path`, after removing what dead processes left under such names.

    The name carries host and process, by which a later run knows that its maker is dead.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f".{path.name}.tmp.{socket.gethostname()}."
    for old in path.parent.glob(f"{glob.escape(mark)}*"):
        pid = old.name.removeprefix(mark)
        # Our own number on an old file is a dead process's that had it before us.
        if pid.isdigit() and (int(pid) == os.getpid() or not lives(int(pid))):
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)
    return path.with_name(f"{mark}{os.getpid()}")


def lives(pid: int) -> bool:
    """Whether a process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True  # another user's
    return True


def move_into_place(folder: Path, out: Path, overwrite: bool) -> bool:
    """Renames the workspace's folder `new` to `out`.

    Args:
        folder: the workspace of `out`, with a folder `new` in it.
        out: where `new` goes.
        overwrite: whether what is in `out` makes room first.

    Returns:
        False where another process has put something into `out` meanwhile.
    """
    if overwrite:
        with contextlib.suppress(FileNotFoundError):
            os.rename(out, folder / "old")  # and is deleted with the workspace
    try:
        os.rename(folder / "new", out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    sync_folder(out.parent)
    return True


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
