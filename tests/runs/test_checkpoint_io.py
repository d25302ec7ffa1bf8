"""Files that are whole or absent, and digests that are checked at each read."""

import hashlib
import os
import re
import resource
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.runs import checkpoint_io, folders
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO, write_durable_checkpoint
from gpt_lightning.runs.folders import (
    SPARE_BYTES,
    check_digest,
    check_writable,
    read_sidecar,
    sidecar,
    sweep,
)

CONTENT = {"state_dict": {"w": torch.arange(1000.0)}, "global_step": 3}
DEAD = 2**22 + 1  # above the largest process id


@pytest.fixture
def file(tmp_path) -> Path:
    write_durable_checkpoint(CONTENT, tmp_path / "a.ckpt")
    return tmp_path / "a.ckpt"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_written_is_read_and_nothing_else_is_left(file):
    loaded = DurableCheckpointIO().load_checkpoint(file)
    assert torch.equal(loaded["state_dict"]["w"], CONTENT["state_dict"]["w"])
    assert loaded["global_step"] == 3
    assert {path.name for path in file.parent.iterdir()} == {"a.ckpt", "a.ckpt.sha256"}
    assert sidecar(file).read_text() == f"{sha256(file)}  a.ckpt\n"
    DurableCheckpointIO().remove_checkpoint(file)
    DurableCheckpointIO().remove_checkpoint(file)  # one that is gone is no error
    assert list(file.parent.iterdir()) == []


def test_the_digest_of_the_content_before_stays_known_until_the_rename(file):
    before = sha256(file)
    write_durable_checkpoint({**CONTENT, "global_step": 4}, file)
    assert read_sidecar(file) == [sha256(file), before]
    write_durable_checkpoint({**CONTENT, "global_step": 5}, file)
    assert len(read_sidecar(file)) == 2  # not every content that it ever had
    check_digest(file)


def test_every_changed_byte_is_damage(file):
    content = bytearray(file.read_bytes())
    for position in range(0, len(content), len(content) // 7):
        content[position] ^= 1
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.ckpt is damaged: expected SHA-256"):
            DurableCheckpointIO().load_checkpoint(file)
        content[position] ^= 1
    file.write_bytes(content)
    check_digest(file)


def test_a_write_that_fails_leaves_the_file_before_it(file, monkeypatch):
    before = {path.name: path.read_bytes() for path in file.parent.iterdir()}

    def full(*args: object) -> None:
        raise RuntimeError("unexpected pos 64 vs 0")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        UserError, match=r"cannot write .*a\.ckpt: unexpected pos 64 vs 0; the check"
    ):
        write_durable_checkpoint(CONTENT, file)
    assert {path.name: path.read_bytes() for path in file.parent.iterdir()} == before


def test_a_save_is_read_back(tmp_path, monkeypatch):
    def lying(checkpoint, path):
        write_durable_checkpoint(checkpoint, path)
        path.write_bytes(path.read_bytes()[:-1])

    monkeypatch.setattr(checkpoint_io, "write_durable_checkpoint", lying)
    with pytest.raises(UserError, match=r"a\.ckpt is damaged"):
        DurableCheckpointIO().save_checkpoint(CONTENT, tmp_path / "a.ckpt")


@pytest.mark.parametrize("limit", [0, 1000, 3000])
def test_a_full_disk_is_named_as_the_system_names_it(tmp_path, limit):
    """torch hides it behind 'unexpected pos'; a limit on files' size fails as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*a\.ckpt: File too large; the check"):
            write_durable_checkpoint(CONTENT, tmp_path / "a.ckpt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_an_object_that_no_resume_could_read_is_not_saved(file):
    with pytest.raises(
        UserError, match=r"not saved.* object of fractions\.Fraction; the "
    ) as error:
        write_durable_checkpoint({**CONTENT, "callbacks": {"Mine": Fraction(1, 2)}}, file)
    assert "\n" not in str(error.value)
    check_digest(file)
    assert DurableCheckpointIO().load_checkpoint(file)["global_step"] == 3
    assert {path.name for path in file.parent.iterdir()} == {"a.ckpt", "a.ckpt.sha256"}


def test_a_file_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    events = []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "replace", lambda a, b: events.append(f"-> {b}") or replace(a, b))

    def synced(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    write_durable_checkpoint(CONTENT, tmp_path / "b.ckpt")
    named = events.index(f"-> {tmp_path / 'b.ckpt'}")
    digest = events.index(f"-> {tmp_path / 'b.ckpt.sha256'}")
    assert digest < named
    assert any(re.search(r"\.b\.ckpt\.tmp|b\.ckpt\..*tmp", event) for event in events[:digest])


def test_leftovers_of_dead_processes_go_and_those_of_living_ones_stay(tmp_path):
    for name in (f".a.ckpt.tmp.{DEAD}", f".a.ckpt.tmp.{os.getpid()}", ".b.tmp.x", "c.ckpt.sha256"):
        (tmp_path / name).write_bytes(b"x")
    write_durable_checkpoint(CONTENT, tmp_path / "d.ckpt")
    sweep(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f".a.ckpt.tmp.{os.getpid()}", ".b.tmp.x", "d.ckpt", "d.ckpt.sha256"}


def test_room_for_one_more_file_is_asked_for_before_the_first_step(tmp_path, monkeypatch):
    free = folders.shutil.disk_usage(tmp_path)
    room = 10 * 2**20
    monkeypatch.setattr(folders.shutil, "disk_usage", lambda folder: free._replace(free=room))
    check_writable(tmp_path / "new", room - SPARE_BYTES)
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(UserError, match=r"new has 10 MB left, and a checkpoint takes some 9 MB"):
        check_writable(tmp_path / "new", room - SPARE_BYTES + 1)
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match="file is no folder"):
        check_writable(tmp_path / "file" / "x", 0)
