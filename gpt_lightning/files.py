"""Files and folders that appear complete or not at all."""

import contextlib
import errno
import functools
import glob
import hashlib
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_lightning.errors import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

# errors by which a file system says that it has no locks (flock)
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


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


# ---- locks -------------------------------------------------------------------------------------


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold an exclusive lock between processes and threads.

    The lock is the kernel's, on a file: it ends with its process, however that ends. The holder
    deletes the file at the end, while it is held; a waiting process notices, and takes the lock on
    a new file. A file system without locks gives one warning, and the work continues without one.

    Args:
        path: Lock file; it is made if need be.
        on_wait: Function to call before waiting for another holder; it may raise instead.

    Raises:
        OSError: The lock file cannot be opened.
    """
    from filelock import FileLock

    lock = FileLock(path, fallback_to_soft=False)
    held = _acquire(lock, path, on_wait)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # Windows deletes it at the release
            path.unlink()
        if held:
            lock.release()


def _acquire(lock: "BaseFileLock", path: Path, on_wait: Callable[[], None]) -> bool:
    """Wait for a lock; return False if the file system has none."""
    from filelock import Timeout

    try:
        try:
            lock.acquire(blocking=False)
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        warn_without_locks(path.parent)
        return False
    return True


@functools.cache
def warn_without_locks(folder: Path) -> None:
    """Print, once a folder, that nothing keeps two processes apart there."""
    print(
        f"warning: the file system of {folder} has no locks: start one process at a time there",
        file=sys.stderr,
    )
