"""TokenDataModule through `fit`: mixtures, and data that changed between two sessions."""

import os
from pathlib import Path

import pytest
import torch
from prepared import prepare_text
from tiny_fit import TINY_MODEL, rows

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.training.datamodule import TokenDataModule

TINY = [*TINY_MODEL, "--data.batch_size=4", "--trainer.log_every_n_steps=1"]


@pytest.fixture(autouse=True)
def two_datasets(tmp_path, text_file, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        prepare_text(text_file, tmp_path / "data" / name, "byte", shard_tokens=5_000)


@pytest.mark.slow
def test_a_mixture_trains_and_its_proportions_are_logged():
    mixture = '--data.mixture={"one": 3, "two": 1}'
    assert main(["fit", *TINY, mixture, "--trainer.max_steps=250", "--run_name=mixed"]) == 0
    last = [row for row in rows("mixed") if "data/share/one" in row][-1]
    assert last["data/share/one"] == pytest.approx(0.75)  # 1,000 samples
    assert last["data/share/two"] == pytest.approx(0.25)
    assert all(row["perf/data_wait_ms"] >= 0 for row in rows("mixed") if "perf/tokens" in row)


def test_a_mixture_of_other_tokens_is_refused(tmp_path, text_file, capsys):
    prepare_text(text_file, tmp_path / "data" / "chars", "char")
    mixture = '--data.mixture={"one": 1, "chars": 1}'
    assert main(["fit", *TINY, mixture, "--trainer.max_steps=1"]) == 2
    assert "chars and one are made of other tokens (char and byte)" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"data.dataset and data.mixture given"):
        TokenDataModule(dataset="one", mixture={"two": 1.0})


def fit(*args: str) -> int:
    return main(["fit", *TINY, "--data.dataset=one", "--run_name=run", *args])


def resume(*args: str) -> int:
    return fit("--trainer.max_steps=6", "--ckpt_path=lightning_logs/run/version_0", *args)


@pytest.mark.parametrize(
    "mixture", [(), ("--data.dataset=null", '--data.mixture={"two": 1, "one": 1}')]
)
def test_a_shard_that_was_replaced_is_refused_on_resume(mixture, capsys):
    assert fit("--trainer.max_steps=3", *mixture) == 0
    shard = Path("data/one/train-00001.npy")
    content, times = shard.read_bytes(), shard.stat()
    shard.write_bytes(content[:-2] + bytes([content[-2] ^ 1]) + content[-1:])
    os.utime(shard, ns=(times.st_atime_ns, times.st_mtime_ns))  # the same name, size and time
    assert resume(*mixture) == 2
    line = capsys.readouterr().err
    assert "one/train-00001.npy: it was replaced since the checkpoint was saved: expected" in line
    shard.write_bytes(content)  # touched, but the same
    assert resume(*mixture) == 0


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
