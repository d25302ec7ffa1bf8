"""Checkpoints written in a thread: their bytes, their memory, their errors, and forks meanwhile."""

import gc
import io
import math
import os
import threading
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from tiny_fit import RUN, TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import compare
from gpt_lightning.errors import UserError
from gpt_lightning.runs import checkpoint_io
from gpt_lightning.runs.checkpoint_io import HashingFile, Saver
from gpt_lightning.runs.folders import check_digest, saved_checkpoints
from gpt_lightning.runs.shards import HostCopy


def example(seed: int = 0) -> dict:
    """All kinds of content: shared storages, views, numbers, words."""
    torch.manual_seed(seed)
    weight = torch.randn(37, 5)
    table = torch.arange(24).reshape(4, 6)
    weights = OrderedDict(wte=weight, head=weight, last=weight[-1], rows=table[1:, ::2].t())
    weights._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]  # as Module.state_dict
    name = "adamw"
    return {
        "state_dict": weights,
        "kinds": [
            torch.empty(0),
            torch.tensor(3.5),
            torch.randn(5).bfloat16(),
            torch.tensor([True, False]),
            torch.randn(3, dtype=torch.complex64),
        ],
        "loops": {"step": 7, "loss": 1.5, "nothing": None, "names": (name, [name]), "raw": b"\0x"},
    }


def saved(checkpoint: dict) -> bytes:
    file = io.BytesIO()
    torch.save(checkpoint, file)
    return file.getvalue()


def test_the_copy_is_written_with_the_same_bytes_whatever_changes_later():
    copy = HostCopy()
    for seed in (0, 1):  # the second time into the same memory
        checkpoint = example(seed)
        copied = copy(checkpoint)
        checkpoint["state_dict"]["wte"].zero_()
        checkpoint["kinds"][2].zero_()
        checkpoint["loops"]["names"][1].append("later")
        checkpoint["loops"]["step"] = 8
        assert saved(copied) == saved(example(seed))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.ones(2, dtype=torch.complex64).conj().imag,  # negated
        torch.eye(2).to_sparse(),
    ],
    ids=["conjugated", "negated", "sparse"],
)
def test_a_tensor_that_is_no_view_of_memory_is_an_error(tensor):
    with pytest.raises(UserError, match=r"callbacks\.mine\.0 .*--checkpoint\.asynchronous"):
        HostCopy()({"callbacks": {"mine": [tensor]}})


# ---- the thread ----------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Writing waits until this event is set."""
    event, real = threading.Event(), checkpoint_io.write_durable_checkpoint

    def write(checkpoint, path):
        assert event.wait(10)
        real(checkpoint, path)

    monkeypatch.setattr(checkpoint_io, "write_durable_checkpoint", write)
    return event


def test_a_save_returns_before_the_file_is_written_and_waits_for_the_one_before(gate, tmp_path):
    done: list[Path] = []
    writer, weight = Saver(True, done.append), torch.zeros(3)
    writer.save({"weight": weight}, tmp_path / "a.ckpt")
    weight += 1  # the next step
    writer.check()
    assert not (tmp_path / "a.ckpt").exists()
    threading.Timer(0.05, gate.set).start()
    writer.save({"weight": weight}, tmp_path / "b.ckpt")
    assert done[:1] == [tmp_path / "a.ckpt"]
    writer.wait()
    for path, values in zip(done, ([0, 0, 0], [1, 1, 1]), strict=True):
        check_digest(path)
        assert torch.load(path)["weight"].tolist() == values


@pytest.mark.skipif("2.11." in torch.__version__, reason="its stager serves one copy")
def test_memory_is_reserved_before_the_first_save(tmp_path):
    checkpoint = {"weight": torch.ones(100_000)}
    writer = Saver(True, lambda path: None)
    assert not writer.is_prepared
    writer.prepare(checkpoint)
    writer.wait()
    assert writer.is_prepared
    reserved = writer._copy(checkpoint)["weight"].data_ptr()
    writer.save(checkpoint, tmp_path / "a.ckpt")
    writer.wait()
    assert writer._copy(checkpoint)["weight"].data_ptr() == reserved


def test_an_error_of_the_thread_is_raised_once(tmp_path):
    (tmp_path / "file").touch()
    writer = Saver(True, lambda path: None)
    for _ in range(2):
        writer.save({}, tmp_path / "file" / "a.ckpt")
        with pytest.raises(UserError, match=r"cannot write .*a\.ckpt: File exists"):
            writer.wait()
        writer.wait()


def test_a_forked_process_closes_the_file_and_leaves_its_bytes(tmp_path):
    with HashingFile(tmp_path / "file") as file:
        file.write(b"before")
        pid = os.fork()
        if pid == 0:
            os._exit(0 if file.closed and not HashingFile._open else 1)
        assert os.waitpid(pid, 0)[1] == 0
        file.write(b"after")
    assert (tmp_path / "file").read_bytes() == b"beforeafter"


# ---- in a run ------------------------------------------------------------------------------------


def fit(*args: str) -> int:
    more = ["--checkpoint.every_n_steps=2", "--checkpoint.keep_last=9", "--data.batch_size=4"]
    return main(["fit", *TINY_RUN, "--trainer.max_steps=9", *more, *args])


def saved_steps() -> list[int]:
    return [saved.step for saved in saved_checkpoints(RUN / "checkpoints")]


@pytest.mark.usefixtures("own_folder")
def test_a_run_saves_the_same_states():
    assert fit() == 0
    assert fit("--checkpoint.asynchronous=true") == 0
    assert saved_steps() == [9, 8, 6, 4, 2]
    found = compare(RUN, RUN.with_name("version_1"))
    assert all(found.values()), found
    gc.collect()  # an executor that is collected ends its threads
    for thread in threading.enumerate():
        if thread.name.startswith("saver"):
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.usefixtures("own_folder")
def test_a_full_disk_ends_the_run_at_the_next_step(monkeypatch, capsys):
    real = checkpoint_io.HashingFile.write

    def write(self, content):
        if "step-0000004" in str(self.name):
            raise OSError(28, "No space left on device")
        return real(self, content)

    monkeypatch.setattr(checkpoint_io.HashingFile, "write", write)
    assert fit("--checkpoint.asynchronous=true") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: cannot write ")
    assert "No space left" in error
    assert saved_steps()[-1] == 2
    assert not {8, 9} <= {*saved_steps()}


@pytest.mark.usefixtures("own_folder")
def test_an_exception_waits_for_the_save(gate, monkeypatch, capsys):
    def nan(self, *args, **kwargs):
        if self.trainer.global_step == 2:
            threading.Timer(0.1, gate.set).start()
            return math.nan * real(self, *args, **kwargs)
        return real(self, *args, **kwargs)

    from gpt_lightning.training.module import GPTModule

    real = GPTModule.training_step
    monkeypatch.setattr(GPTModule, "training_step", nan)
    assert fit("--checkpoint.asynchronous=true") == 2
    assert "step 3" in capsys.readouterr().err.splitlines()[-1]
    (file,) = saved_checkpoints(RUN / "checkpoints")
    assert file.step == 2
    check_digest(file.path)


@pytest.mark.usefixtures("own_folder")
def test_a_state_that_is_not_finite_is_not_saved(capsys):
    one_large_step = ["--model.learning_rate=1e38", "--trainer.max_steps=1"]
    assert fit("--checkpoint.asynchronous=true", *one_large_step) == 2
    assert "not finite" in capsys.readouterr().err.splitlines()[-1]
    assert not saved_steps()
