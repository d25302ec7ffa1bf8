"""Files that are no whole checkpoint of ours: every command accepts or refuses them alike."""

import os
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from tiny_fit import RUN, TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.files import file_sha256
from gpt_lightning.runs.checkpoint import read_checkpoint, read_content
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.folders import check_digest, has_digest, sidecar, write_sidecar
from gpt_lightning.runs.resume import newest_checkpoint

TINY = [*TINY_RUN, "--data.batch_size=4", "--trainer.max_steps=8"]
# by the way in which a command reads a file: {} is its path
READING = {
    "sample": ["sample", "{}", "--max_new_tokens=3"],
    "inspect": ["checkpoint", "inspect", "{}"],
    "validate": ["validate", *TINY, "--ckpt_path={}"],
    "ckpt_path": ["fit", *TINY, "--ckpt_path={}"],
    "init_from": ["fit", *TINY, "--model.init_from={}"],
    "resume": ["fit", *TINY, "--resume={}"],
}
VERIFY = ["checkpoint", "verify", "{}"]
ALL = [*READING.values(), VERIFY]


@pytest.fixture
def file(four_steps) -> Path:
    """The checkpoint of a run of four steps."""
    (path,) = RUN.glob("checkpoints/*.ckpt")
    return path


def code(command: list[str], path: Path) -> int:
    return main([argument.format(path) for argument in command])


def refused(command: list[str], path: Path, capsys) -> str:
    """Runs a command that must be refused in one line, which is returned."""
    capsys.readouterr()
    assert code(command, path) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1, lines
    assert str(path) in lines[0]
    return lines[0]


@pytest.mark.parametrize("name", READING)
def test_without_a_digest_a_reading_command_warns_and_goes_on(name, file, capsys):
    sidecar(file).unlink()
    assert code(READING[name], file) == 0
    warnings = re.findall(r"warning: (.*) has no readable digest in", capsys.readouterr().err)
    assert warnings == [str(file.resolve())]


def test_without_a_digest_nothing_is_called_whole(file, capsys):
    sidecar(file).unlink()
    assert "has no readable digest in" in refused(VERIFY, file, capsys)


UNREADABLE: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: None,
    "empty": Path.touch,
    "no text": lambda path: path.write_bytes(b"\xff\xfe"),
    "cut": lambda path: path.write_text("0123456789abcdef"),
    "another line": lambda path: path.write_text(f"{'0' * 64}  a.ckpt\nno digest\n"),
    "a folder": Path.mkdir,
    "a pipe": lambda path: os.mkfifo(path),
    "a loop": lambda path: path.symlink_to(path),  # an OSError, as without the permission
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_what_is_no_digest_is_a_missing_one(kind, file):
    sidecar(file).unlink()
    UNREADABLE[kind](sidecar(file))
    assert not check_digest(file, required=False)
    assert not has_digest(file)
    with pytest.raises(UserError, match=r"--resume .*step-0000004.*\.ckpt, or `.* resume "):
        newest_checkpoint(RUN)
    DurableCheckpointIO().load_checkpoint(file)


def test_a_digest_without_permission_is_a_missing_one(file, monkeypatch):
    def forbidden(path: Path, **kwargs: Any) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", forbidden)  # root may read every file
    assert not check_digest(file, required=False)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["byte", "pipe"])
def test_what_is_damaged_is_refused_by_every_command(damage, file, capsys):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 0x40
    if damage == "byte":
        file.write_bytes(content)
    else:
        file.unlink()
        os.mkfifo(file)
    for command in ALL:
        refused(command, file, capsys)


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a folder"])
def test_what_is_no_file_is_refused_at_once(kind, file):
    file.unlink()
    if kind == "a pipe":
        os.mkfifo(file)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    for check in (check_digest, read_checkpoint, DurableCheckpointIO().load_checkpoint):
        with pytest.raises(UserError, match=f"is {kind}, not a file: give a checkpoint"):
            check(file)


def test_compressed_records_are_never_taken_for_numbers(file, capsys):
    with zipfile.ZipFile(file) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in records.items():
            archive.writestr(name, content)
    write_sidecar(file, file_sha256(file))
    for command in (READING["sample"], READING["validate"], READING["resume"]):
        assert "its records are compressed" in refused(command, file, capsys)


FOREIGN = {
    "empty": b"",
    "text": b"hello, world\n",
    "cut": b"PK\x03\x04" + bytes(100),
    "weights": {"wte.weight": torch.zeros(2)},
    "lightning": {"state_dict": {}, "epoch": 1},
    "nanogpt": {"model": {}, "model_args": {}},
    "tensor": torch.zeros(2),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_refused_with_a_way_to_use_its_weights(name, file, capsys):
    content, path = FOREIGN[name], Path("foreign.ckpt")
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    line = refused(READING["inspect"], path, capsys)
    assert "`gpt-lightning import SOURCE --out new.ckpt`" in line
    assert "mmap" not in line


def test_a_missing_digest_is_said_once_and_by_rank_0_alone(monkeypatch, tmp_path, capsys):
    for name in ("a.ckpt", "b.ckpt"):
        torch.save({"gpt_lightning": {}}, tmp_path / name)
    for _ in range(2):
        read_content(tmp_path / "a.ckpt")
    assert capsys.readouterr().err.count("a.ckpt has no readable digest") == 1
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    read_content(tmp_path / "b.ckpt")
    assert capsys.readouterr().err == ""


def test_a_link_has_the_digest_of_its_file(file, tmp_path, capsys):
    link = tmp_path / "last.ckpt"  # as ModelCheckpoint(save_last="link") makes it
    link.symlink_to(file.resolve())
    assert check_digest(link)
    assert main(["sample", str(link), "--max_new_tokens=1"]) == 0
    assert "digest" not in capsys.readouterr().err
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(UserError, match="is damaged"):
        check_digest(link)
