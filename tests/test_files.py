"""Locks: one holder at a time, whatever became of the one before, and file systems without any."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import filelock
import pytest

from gpt_lightning import files
from gpt_lightning.errors import UserError
from gpt_lightning.files import locked, numbered_folder


class Held(Exception):
    pass


def refuse() -> None:
    raise Held


def hold(path: Path, ready) -> None:
    with locked(path):
        ready.set()
        signal.pause()


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    path, context = tmp_path / "lock", multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(path, ready))
    process.start()
    assert ready.wait(60)
    with pytest.raises(Held), locked(path, refuse):
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert path.exists()
    with locked(path, refuse):
        pass
    assert not path.exists()


def test_threads_take_turns_though_each_deletes_the_file(tmp_path: Path) -> None:
    inside, most, order = [], [], []

    def work() -> None:
        for _ in range(20):
            with locked(tmp_path / "lock"):
                inside.append(1)
                most.append(len(inside))
                order.append(threading.get_ident())
                time.sleep(0.001)
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(order) == 80
    assert set(most) == {1}


def test_without_locks_there_is_one_warning_and_another_error_is_one(tmp_path, monkeypatch, capsys):
    def flock(descriptor: int, how: int) -> None:
        raise OSError(codes[0], os.strerror(codes.pop(0)))

    monkeypatch.setattr(fcntl, "flock", flock)
    codes = [errno.ENOLCK, errno.ENOSYS, errno.EIO]
    for _ in range(2):
        with locked(tmp_path / "lock", refuse):
            pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"warning: the file system of {tmp_path} has no locks")
    with pytest.raises(OSError, match="Input/output"), locked(tmp_path / "lock"):
        pass


def test_no_module_imports_fcntl_before_it_is_used() -> None:
    """It does not exist on Windows."""
    package = Path(files.__file__).parent
    imported = re.compile("^(import|from) fcntl", re.MULTILINE)
    assert [p for p in package.rglob("*.py") if imported.search(p.read_text())] == []


def test_a_lock_that_is_tested_can_be_taken(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not files.is_held(path)
    assert not path.exists()
    with locked(path):
        assert files.is_held(path)
    path.touch()  # file of a process that was killed
    assert not files.is_held(path)
    test = filelock.FileLock(path, thread_local=False)  # what is_held holds for a moment
    test.acquire()
    timer = threading.Timer(0.02, test.release)
    timer.start()
    with locked(path, refuse):
        timer.join()


def test_a_numbered_folder_is_made_when_it_is_chosen(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    (root / "version_7[").mkdir(parents=True)
    (root / "version_3").mkdir()
    with ThreadPoolExecutor(16) as pool:
        made = list(pool.map(lambda _: numbered_folder(root), range(64)))
    assert {folder.name for folder in made} == {f"version_{n}" for n in range(4, 68)}
    assert all(folder.is_dir() for folder in made)
    assert numbered_folder(root, "a[b]_") == root / "a[b]_0"
    assert numbered_folder(root, "a[b]_") == root / "a[b]_1"
    (tmp_path / "link").symlink_to("nowhere")
    for folder in ("link", "link/tiny"):
        with pytest.raises(UserError, match="link is a link to nothing, or a file: remove it"):
            numbered_folder(tmp_path / folder)
