"""TokenDataModule through `fit`: data that changed between two sessions."""

import os
from pathlib import Path

import pytest
import torch
from prepared import prepare_text
from tiny_fit import TINY_MODEL

from gpt_lightning.cli import main

TINY = [*TINY_MODEL, "--data.batch_size=4", "--trainer.log_every_n_steps=1"]


@pytest.fixture(autouse=True)
def dataset(tmp_path, text_file, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    prepare_text(text_file, tmp_path / "data" / "one", "byte", shard_tokens=5_000)


def fit(*args: str) -> int:
    return main(["fit", *TINY, "--data.dataset=one", "--run_name=run", *args])


def resume(*args: str) -> int:
    return fit("--trainer.max_steps=6", "--ckpt_path=lightning_logs/run/version_0", *args)


def test_a_shard_that_was_replaced_is_refused_on_resume(capsys):
    assert fit("--trainer.max_steps=3") == 0
    shard = Path("data/one/train-00001.npy")
    content, times = shard.read_bytes(), shard.stat()
    shard.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same name, size and time
    assert resume() == 2
    line = capsys.readouterr().err
    assert "one/train-00001.npy: it was replaced since the checkpoint was saved: expected" in line
    shard.write_bytes(content)  # touched, but the same
    assert resume() == 0


def test_another_dataset_is_refused_on_resume(text_file, capsys):
    assert fit("--trainer.max_steps=3") == 0
    text_file.write_text(text_file.read_text()[:-500])
    prepare_text(text_file, Path("data/other"), "byte", shard_tokens=5_000)
    assert resume("--data.dataset=other") == 2
    assert "the checkpoint has another dataset: resume with" in capsys.readouterr().err
    assert resume("--data.seed=7") == 2
    assert (
        "the checkpoint has data.seed 1337, this run has 7: resume with" in capsys.readouterr().err
    )


def test_resuming_goes_on_with_the_same_dataset_in_another_place(capsys):
    assert fit("--trainer.max_steps=3") == 0
    Path("data/one").rename(Path("data/moved"))
    assert resume("--data.dataset=moved") == 0


def test_a_checkpoint_has_the_position_for_people():
    assert fit("--trainer.max_steps=3") == 0
    (path,) = Path("lightning_logs").glob("run/version_0/checkpoints/*3*.ckpt")
    record = torch.load(path, weights_only=True)["gpt_lightning"]
    assert record["data_position"] == {"epoch": 0, "window": 12}
