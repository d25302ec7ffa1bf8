"""Folders of shards: which are deleted, and when, and errors while they are read. One process."""

import errno
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from gpt_lightning import files
from gpt_lightning.errors import UserError, is_out_of_memory
from gpt_lightning.hardware.distributed import is_lost_peer
from gpt_lightning.runs import shards
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO, sweep_shards
from gpt_lightning.runs.folders import check_digest, sidecar

pytest.importorskip("safetensors")


def written(folder: Path, name: str) -> Path:
    content = {"state_dict": {"w": torch.arange(100.0)}, "global_step": 3}
    content = shards.write_shards(content, folder / name, shards.is_of_parameter)
    DurableCheckpointIO().save_checkpoint(content, folder / name)
    return folder / name


def folders(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in folder.glob("shards/*"))


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"no digest\n"])
def test_a_damaged_digest_does_not_delete_good_shards(tmp_path, content):
    path = written(tmp_path, "a.ckpt")
    good = sidecar(path).read_bytes()
    sidecar(path).write_bytes(content)
    (tmp_path / "shards/killed-0123abcd").mkdir()
    sweep_shards(tmp_path)
    assert folders(tmp_path) == ["a"]  # the file itself names it
    sidecar(path).write_bytes(good)
    check_digest(path)


@pytest.mark.parametrize("has_sidecar", [True, False])
def test_a_checkpoint_that_cannot_be_read_stops_the_sweep(tmp_path, has_sidecar, capsys):
    path = written(tmp_path, "a.ckpt")
    path.write_bytes(b"damaged")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    if has_sidecar:
        sidecar(path).write_bytes(b"")
    else:
        sidecar(path).unlink()
    for _ in range(2):
        sweep_shards(tmp_path)
    assert folders(tmp_path) == ["a"]
    assert capsys.readouterr().err.count("warning: no old shards are deleted: ") == 1
    path.unlink()
    sidecar(path).unlink(missing_ok=True)
    sweep_shards(tmp_path)
    assert folders(tmp_path) == []


def test_a_damaged_file_keeps_the_shards_that_its_digests_name(tmp_path):
    path = written(tmp_path, "a.ckpt")
    written(tmp_path, "a.ckpt")  # replaces it; the list has both
    (kept,) = tmp_path.glob("shards/*")
    path.write_bytes(b"damaged")
    sweep_shards(tmp_path)
    assert kept.exists()


def full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("module", "function"),
    [
        *((files, "write_durable"), (torch, "save")),  # after the shards
        *((shards, "file_sha256"), (shards, "sync_folder")),  # they cannot be read back
    ],
)
def test_a_save_that_fails_deletes_its_shards(tmp_path, monkeypatch, module, function):
    before = written(tmp_path, "a.ckpt")
    monkeypatch.setattr(module, function, full)
    for name in ("a.ckpt", "b.ckpt"):
        with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
            written(tmp_path, name)
    assert folders(tmp_path) == ["a"]
    monkeypatch.undo()
    check_digest(before)


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:1"), is_lost_peer),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
            is_out_of_memory,
        ),
        (CheckpointException("", {1: (MemoryError(), None)}), is_out_of_memory),
        (ValueError("x"), None),
        (CheckpointException("", {0: (KeyError("w"), None)}), None),
    ],
)
def test_a_lost_rank_or_a_full_memory_is_no_damage(tmp_path, monkeypatch, error, is_kept):
    path = written(tmp_path, "a.ckpt")

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(shards, "load", fail)
    with pytest.raises((RuntimeError, MemoryError, UserError)) as raised:
        DurableCheckpointIO().load_checkpoint(path)
    if is_kept is None:
        assert re.search(r"shards/a-\w+ is damaged", str(raised.value))
    else:
        assert is_kept(raised.value)
