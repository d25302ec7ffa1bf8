"""Names of checkpoints, the file that is chosen, and what a file of an older schema means."""

import os
from pathlib import Path

import pytest
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.checkpoint import RunRecord, read_checkpoint
from gpt_lightning.runs.checkpoint_io import write_durable_checkpoint
from gpt_lightning.runs.folders import (
    checkpoint_name,
    find_checkpoint,
    run_folders,
    run_id,
    saved_checkpoints,
)
from gpt_lightning.runs.resume import newest_checkpoint
from gpt_lightning.runs.settings import Settings

TINY = GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, vocab_size=10)


def run_of(folder: Path, *names: str) -> Path:
    """A run folder with files of these names, the first one written last."""
    (folder / "checkpoints").mkdir(parents=True)
    for name in reversed(names):
        (folder / "checkpoints" / name).write_text(name)
    return folder


@pytest.mark.parametrize(("step", "loss"), [(7, None), (12, 1.23456), (12345678, 0.0), (0, 10.5)])
def test_a_name_says_step_and_loss(tmp_path, step, loss):
    run = run_of(
        tmp_path, checkpoint_name(step, loss), "last.ckpt", "step-7.ckpt.tmp", "step-x.ckpt"
    )
    (found,) = saved_checkpoints(run / "checkpoints")
    assert found.step == step
    assert found.loss == (None if loss is None else pytest.approx(loss, abs=5e-5))
    assert found.path.name == checkpoint_name(step, loss)


def test_the_best_is_the_lowest_loss_and_of_equals_the_newest(tmp_path):
    best = "step-0000004-loss-1.5000.ckpt"
    run = run_of(
        tmp_path / "a", "step-0000002-loss-2.0000.ckpt", best, "step-0000003-loss-1.5000.ckpt",
        "step-0000006.ckpt", "step-0000005-loss-1.7000.ckpt",
    )  # fmt: skip
    assert find_checkpoint(run).name == best
    assert [s.step for s in saved_checkpoints(run / "checkpoints")] == [6, 5, 4, 3, 2]
    without = run_of(tmp_path / "b", "step-0000002.ckpt", "step-0000010.ckpt", "step-0000009.ckpt")
    assert find_checkpoint(without).name == "step-0000010.ckpt"


def test_the_highest_version_with_a_checkpoint_is_taken(tmp_path):
    for number in (2, 9):
        run_of(tmp_path / f"version_{number}", f"step-000000{number}.ckpt")
    for name in ("version_10", "version_x", "other"):
        (tmp_path / name).mkdir()
    run_of(tmp_path / "version_11x", "step-0000011.ckpt")
    assert [p.name for p in run_folders(tmp_path)[1:]] == ["version_10", "version_9", "version_2"]
    assert find_checkpoint(tmp_path).name == "step-0000009.ckpt"
    file = tmp_path / "version_2" / "checkpoints" / "step-0000002.ckpt"
    assert find_checkpoint(file) == file
    with pytest.raises(UserError, match=r"version_10 has no checkpoints/step-\*.ckpt"):
        find_checkpoint(tmp_path / "version_10")
    with pytest.raises(UserError, match="nowhere does not exist"):
        find_checkpoint(tmp_path / "nowhere")
    (tmp_path / "other/model.safetensors").touch()
    with pytest.raises(UserError, match=r"other --out new\.ckpt"):
        find_checkpoint(tmp_path / "other")


def test_the_newest_run_below_a_folder_is_named_and_taken(tmp_path, capsys):
    for time, name in enumerate(("b", "a")):
        run = run_of(tmp_path / f"lightning_logs/{name}/version_0", f"step-000000{time}.ckpt")
        (run / "run.json").touch()
        os.utime(run / "run.json", (time, time))
    for folder in (tmp_path, tmp_path / "lightning_logs"):
        assert find_checkpoint(folder).parents[1] == run
        assert f"{run}, the newest in {folder}" in capsys.readouterr().err
    assert find_checkpoint(run / "checkpoints") == find_checkpoint(run)
    assert not capsys.readouterr().err


def test_a_run_has_the_identity_in_its_folder(tmp_path):
    assert run_id(tmp_path) is None  # the file is missing
    file = tmp_path / "run.json"
    file.write_text('{"run_id": "abc"}')
    assert run_id(tmp_path) == "abc"
    for damaged in ("", "{}", "[]", "null", "\0"):
        file.write_text(damaged)
        with pytest.raises(UserError, match=r"run\.json cannot be read .*: restore it"):
            run_id(tmp_path)


def written(path: Path, step: int, **changes) -> Path:
    """A checkpoint with the weights of one matrix, and one tensor that is not the model's."""
    record = RunRecord(config=TINY, settings=Settings(learning_rate=0.5), **changes)
    content = {
        "state_dict": {"model.wte.weight": torch.arange(6.0), "eval_loss.mean": torch.ones(1)},
        "global_step": step,
        "callbacks": {"SpeedMonitor": {"tokens": 640}},
    }
    record.write(content)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durable_checkpoint(content, path)
    return path


def test_the_newest_whole_file_is_taken_and_a_damaged_one_is_named(tmp_path, monkeypatch, capsys):
    files = [
        written(tmp_path / "checkpoints" / checkpoint_name(step, None), step) for step in (1, 2, 3)
    ]
    assert newest_checkpoint(tmp_path) == files[2]
    files[2].write_bytes(files[2].read_bytes()[:-1])
    assert newest_checkpoint(tmp_path) == files[1]
    said = capsys.readouterr().err
    assert said.startswith("warning: ")
    assert files[2].name in said
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert newest_checkpoint(tmp_path) == files[1]
    assert capsys.readouterr().err == ""  # rank 0 alone prints
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    for file in files[:2]:
        file.write_bytes(b"")
    with pytest.raises(UserError, match=r"no checkpoint in .* \(.*step-0000003.* is damaged: .*\)"):
        newest_checkpoint(tmp_path)
    assert capsys.readouterr().err == ""  # one line
    assert newest_checkpoint(tmp_path / "elsewhere") is None


def test_a_checkpoint_is_its_record_its_weights_its_step_and_its_tokens(tmp_path):
    found = read_checkpoint(written(tmp_path / "a.ckpt", 12, tokenizer={"name": "gpt2"}))
    assert found.record.config == TINY
    assert found.record.settings.learning_rate == 0.5
    assert found.record.tokenizer == {"name": "gpt2"}
    assert (found.step, found.tokens) == (12, 640)
    assert found.weights.keys() == {"wte.weight"}  # weights of the model alone, by its own names
    assert torch.equal(found.weights["wte.weight"], torch.arange(6.0))
