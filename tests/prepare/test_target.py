"""Whose turn it is: one process at a time, whatever became of the one before."""

import fcntl
import os
from pathlib import Path

import pytest

from gpt_lightning.prepare.target import exclusive_lock


def is_held(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def test_the_lock_is_there_while_it_is_held_and_gone_after(tmp_path: Path) -> None:
    with exclusive_lock(tmp_path / "new" / "out"):
        assert is_held(tmp_path / "new" / ".out.lock")
    assert not list((tmp_path / "new").iterdir())


def test_a_lock_on_a_deleted_file_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, calls = tmp_path / ".out.lock", fcntl.flock, []

    def flock(descriptor: int, how: int) -> None:
        if not calls:  # whoever had it ended, and deleted it, between our open and our lock
            path.unlink()
        calls.append(how)
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    with exclusive_lock(tmp_path / "out"):
        assert is_held(path)
