"""Files and folders that appear complete or not at all, and locks."""

import csv
import errno
import glob
import hashlib
import itertools
import json
import os
import shutil
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gpt_lightning.errors import UserError, warn

Fields = dict[str, Any]  # values by name: an object of JSON or YAML, a state in a checkpoint
CHECK_DISK = "check the disk's space and permissions, or choose another folder"
# errors of flock on a file system without locks
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP)


@contextmanager
def explained(action: str, path: Path | str, fix: str = CHECK_DISK) -> Iterator[None]:
    """Turn an OSError (full disk, no permission) into a UserError: action, path, reason, fix."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            fix = "raise the limit of open files: `ulimit -n 4096`"
        if error.errno in (errno.EEXIST, errno.ENOTDIR):
            check_parents(path)
        raise UserError(f"cannot {action} {path}: {error.strerror or error}; {fix}") from error


def check_regular(path: Path, fix: str) -> None:
    """Check that a path is a regular file: reading a pipe or a device may never end.

    Raises:
        OSError: The path does not exist.
        UserError: It is a folder, a pipe or a device.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device"
        raise UserError(f"{path} is {kind}, not a file: {fix}")


def check_parents(path: Path | str) -> None:
    """Raise a UserError if something above a path is no folder, which names it."""
    for parent in Path(path).parents:
        if os.path.lexists(parent) and not parent.is_dir():
            raise UserError(f"cannot write {path}: {parent} is no folder; choose another name")


def new_path(option: str, name: str | None, suffix: str = "") -> Path:
    """Return the path of an option that names a new file or folder.

    Raises:
        UserError: The option is missing or an address, its path exists, ends in another suffix, or
            is below a file.
    """
    if name and "://" in name:
        raise UserError(f"{option} {name} is an address: give a local name, and upload that")
    digest = f"{name}.sha256" if suffix == ".ckpt" else ""  # its second file
    taken = next(filter(os.path.lexists, filter(None, (name, digest))), None)
    if not name or not name.endswith(suffix) or taken:
        other = " or has another suffix" if suffix else ""
        wrong = f"{taken or name} exists{other}" if name else "is missing"
        kind = f"a new file such as new{suffix}" if suffix else "the name of a new file or folder"
        raise UserError(f"{option} {wrong}: give {kind}")
    check_parents(name)
    return Path(name)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file that at every moment is absent, the old one, or complete.

    Raises:
        UserError: The folder cannot be written or the disk is full.
    """
    with explained("write", path), replacement(path) as temporary:
        write_durable(temporary, content)


@contextmanager
def replacement(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; its file takes that name if the body succeeds.

    Raises:
        OSError: The folder cannot be written.
    """
    temporary = temporary_path(path)
    try:
        yield temporary
        os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to the disk, not only the files' contents.

    On macOS, fsync leaves everything in the drive's cache, which F_FULLFSYNC empties (its man page
    of fsync). Some file systems there do not have F_FULLFSYNC.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if sys.platform == "darwin":
            import fcntl  # absent on Windows

            with suppress(OSError):
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    finally:
        os.close(descriptor)


def write_durable(path: Path, content: bytes | memoryview) -> None:
    """Write a file and sync it to the disk.

    Raises:
        OSError: The file cannot be written; a part of it may be left.
    """
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """Yield a temporary folder beside `out`, on the same file system."""
    folder = temporary_path(out)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # the next run deletes any rest


def temporary_path(path: Path) -> Path:
    """Return a free name beside `path`, after deleting the temporaries of dead processes.

    Host and process are part of the name, so that a later run recognizes a dead process.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f".{path.name}.tmp.{socket.gethostname()}."
    for old in path.parent.glob(f"{glob.escape(mark)}*"):
        pid = old.name.removeprefix(mark)
        # An old file with our own number is from an earlier process of that number.
        if pid.isdigit() and (int(pid) == os.getpid() or not lives(int(pid))):
            if old.is_dir():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.unlink(missing_ok=True)
    return path.with_name(f"{mark}{os.getpid()}")


def lives(pid: int) -> bool:
    """Return whether a process exists."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)  # it is another user's
    return True


def move_into_place(folder: Path, out: Path, overwrite: bool) -> bool:
    """Rename the workspace's folder `new` to `out`.

    Args:
        folder: Workspace of `out`, with a folder `new` in it.
        out: New path of the folder.
        overwrite: True to move the present `out` away first.

    Returns:
        False if another process has written `out` meanwhile.
    """
    if overwrite:
        with suppress(FileNotFoundError):
            os.rename(out, folder / "old")  # deleted with the workspace
    try:
        os.rename(folder / "new", out)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    sync_folder(out.parent)
    return True


def numbered_folder(root: Path, prefix: str = "version_") -> Path:
    """Make the folder `PREFIX` + the next free number, which no other process has made.

    Args:
        root: Folder to make it in.
        prefix: First part of its name.

    Raises:
        OSError: It cannot be made.
        UserError: A link to nothing or a file has the name of a folder above it.
    """
    taken = (path.name.removeprefix(prefix) for path in root.glob(f"{glob.escape(prefix)}*"))
    first = max((int(number) + 1 for number in taken if number.isdigit()), default=0)
    for number in itertools.count(first):
        folder = root / f"{prefix}{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:  # another process has made it
            if not root.is_dir():
                raise UserError(
                    f"{error.filename} is a link to nothing, or a file: remove it, or choose "
                    "another name"
                ) from error
        else:
            return folder
    raise AssertionError("numbers do not end")


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal, read in chunks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256(content: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def json_digest(facts: Any, **how: Any) -> str:
    """Return the SHA-256 of facts as JSON, in hexadecimal; `how` goes to json.dumps."""
    return sha256(json.dumps(facts, **how).encode())


def reference_rows(name: str, first: str | None = None) -> list[dict[str, str]]:
    """Return the rows of a file of published numbers, which no one may have changed.

    Args:
        name: File in reference/.
        first: Value of the first column of the rows; None: all rows.

    Raises:
        UserError: The file has been changed; its SHA-256 is in no table's description.
    """
    path = Path(__file__).with_name("reference") / name
    content = path.read_bytes()
    line = f"{name}: {sha256(content)}\n"
    if not any(line in table.read_text(encoding="utf-8") for table in path.parent.glob("*.yaml")):
        raise UserError(
            f"{path} has been changed: its SHA-256 is in none of the YAML files beside it; install "
            "gpt-lightning again"
        )
    rows = csv.DictReader(content.decode().splitlines())
    return [row for row in rows if first in (None, next(iter(row.values())))]


def yaml_beside(module: str | Path, name: str = "") -> Any:
    """Return the content of a YAML file beside a module.

    Args:
        module: `__file__` of the module.
        name: Name of the file; "": that of the module.
    """
    import yaml  # not all commands need it

    path = Path(module).with_name(name) if name else Path(module).with_suffix(".yaml")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


# ---- locks -------------------------------------------------------------------------------------


@contextmanager
def locked(
    path: Path, on_wait: Callable[[], None] = lambda: None, poll_s: float = 0.05
) -> Iterator[None]:
    """Hold an exclusive lock between processes and threads.

    The lock is the kernel's, on a file: it ends with its process, however that ends. The holder
    deletes the file at the end, while it is held; a waiting process notices, and takes the lock on
    a new file. A file system without locks gives one warning, and the work continues without one.

    Args:
        path: Lock file; it and its folder are made if need be.
        on_wait: Function to call before waiting for another holder; it may raise instead.
        poll_s: Seconds between two looks at the lock of another holder.

    Raises:
        OSError: The lock file cannot be opened.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path, fallback_to_soft=False, poll_interval=poll_s)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT))  # filelock waits for ever where it cannot
    try:
        try:
            lock.acquire(timeout=0.2)  # is_held takes it for a moment
        except Timeout:
            on_wait()
            lock.acquire()
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        folder = path.parent
        warn(f"the file system of {folder} has no locks: start one process at a time there")
    try:
        yield
    finally:
        with suppress(OSError):  # Windows deletes it at the release
            path.unlink()
        lock.release()  # nothing, if it is not held


def is_held(path: Path) -> bool:
    """Return whether a process holds a lock of `locked`; the lock is taken for a moment.

    Raises:
        OSError: The lock file cannot be opened.
    """
    from filelock import FileLock, Timeout

    if not path.exists():
        return False
    os.close(os.open(path, os.O_RDWR))
    try:
        FileLock(path, fallback_to_soft=False).acquire(blocking=False).lock.release()
    except Timeout:
        return True
    return False
