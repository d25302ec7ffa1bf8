"""`--resume` continues the right run from the right file with the settings of this command.

The content of a run folder about the run itself: config.yaml, identity, and rows of metrics.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tiny_fit import RUN, fit, logged_steps, rows

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import compare, fit_command
from gpt_lightning.runs.checkpoint import SCHEMA
from gpt_lightning.runs.checkpoint_io import write_durable_checkpoint

OTHER = Path("lightning_logs/other/version_0")


def checkpoint(step: int, run: Path = RUN) -> Path:
    (path,) = (run / "checkpoints").glob(f"step-{step:07d}*.ckpt")
    return path


def content(step: int) -> dict:
    return torch.load(checkpoint(step), weights_only=True)


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize(
    "kind", [["--model.optimizer=muon", "--model.config.dropout=0.2"], ["--data.order=nanogpt"]]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind, capsys):
    kind = [*kind, "--model.decay_steps=8"]
    assert fit(8, *kind, "--run_name=whole") == 0
    assert fit(4, *kind) == 0
    assert fit(8, *kind, "--resume=auto") == 0
    assert "changed" not in capsys.readouterr().out
    found = compare(Path("lightning_logs/whole/version_0"), RUN)
    assert all(found.values()), found


@pytest.mark.usefixtures("four_steps")
def test_another_schema_is_one_line(capsys):
    file = content(4)
    file["gpt_lightning"]["schema"] = SCHEMA + 1
    write_durable_checkpoint(file, checkpoint(4))
    assert fit(8, "--resume=auto") == 2
    assert f"schema {SCHEMA + 1}" in capsys.readouterr().err


@pytest.mark.usefixtures("own_folder")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_settings_of_this_command_win_and_are_printed(optimizer, capsys):
    kind = f"--model.optimizer={optimizer}"
    assert fit(2, kind) == 0
    changes = ["--model.weight_decay=0.5", "--model.betas=[0.5, 0.6]", "--resume=auto"]
    assert fit(4, kind, *changes) == 0
    assert "changed     model.weight_decay 0.1 -> 0.5" in capsys.readouterr().out
    groups = content(4)["optimizer_states"][0]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.5, 0.0}
    assert {tuple(group["betas"]) for group in groups if "betas" in group} == {(0.5, 0.6)}


@pytest.mark.usefixtures("four_steps")
def test_auto_goes_on_with_the_newest_run_even_if_it_has_saved_nothing(capsys):
    newer = RUN.with_name("version_1")
    (newer / "checkpoints").mkdir(parents=True)  # killed before its first one
    assert fit(4, "--resume=auto") == 0
    assert f"no checkpoint in {newer}" in capsys.readouterr().out
    assert checkpoint(4, newer)
    assert not RUN.with_name("version_2").exists()


@pytest.mark.usefixtures("own_folder")
def test_a_branch_that_is_left_does_not_come_back(capsys):
    assert fit(8) == 0
    first = f"--resume={checkpoint(4)}"
    args = ["--checkpoint.every_n_steps=1", "--checkpoint.keep_last=1", "--model.betas=[0.5, 0.6]"]
    assert fit(6, first, *args) == 0
    saved = sorted(int(path.name[5:12]) for path in (RUN / "checkpoints").glob("*.ckpt"))
    assert 6 in saved
    assert 8 not in saved
    assert "set aside   step-0000008" in capsys.readouterr().err
    assert fit(7, "--resume=auto", *args) == 0
    assert logged_steps() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.usefixtures("four_steps")
def test_another_run_is_refused_with_both_values(capsys):
    """Each setting by the records alone: test_resume_checks.py."""
    before = {path: path.read_bytes() for path in (RUN / "checkpoints").iterdir()}
    assert fit(8, "--resume=auto", "--trainer.accumulate_grad_batches=2") == 2
    assert "has micro-batches a step 1, this run has 2" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in (RUN / "checkpoints").iterdir()} == before


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_another_batch_of_nanogpts_order_is_refused(capsys):
    assert fit(2, "--data.order=nanogpt") == 0
    assert fit(4, "--data.order=nanogpt", "--data.batch_size=2", "--resume=auto") == 2
    assert "has data.batch_size 4, this run has 2" in capsys.readouterr().err


@pytest.mark.usefixtures("four_steps")
def test_a_file_outside_of_a_run_is_refused(capsys):
    for path in (RUN / "checkpoints").iterdir():
        path.rename(path.name)
    (copy,) = Path().glob("*.ckpt")
    assert fit(8, f"--resume={copy}") == 2
    assert "is in no run's folder checkpoints/" in capsys.readouterr().err


# ---- config.yaml ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("own_folder")
def test_the_runs_own_configuration_runs_validates_and_resumes_after_a_resume(capsys):
    assert fit(4, "--resume=auto") == 0
    assert fit(8, "--resume=auto") == 0
    saved = yaml.safe_load((RUN / "config.yaml").read_text())
    assert (saved["resume"], saved["ckpt_path"]) == ("never", None)
    config = ["--config", str(RUN / "config.yaml")]
    assert main(["validate", *config, "--ckpt_path", str(RUN)]) == 0
    assert main(["fit", *config, "--resume=auto", "--trainer.max_steps=12"]) == 0
    assert logged_steps() == list(range(1, 13))
    assert main(["fit", *config, "--run_name=again", "--trainer.max_steps=8"]) == 0
    again, first = (
        [row["train/loss"] for row in rows(run)[:8] if "train/loss" in row]
        for run in (Path("lightning_logs/again/version_0"), RUN)
    )
    assert again == first
    # the command of `doctor --resume`, as it starts it
    _, _, _, *command = fit_command(config, 4, Path("doctor"))
    for session in range(2):
        assert main([*command, "--run_name=killed", "--resume=auto"]) == 0, session
    assert logged_steps(Path("doctor/lightning_logs/killed/version_0")) == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("four_steps")
def test_a_run_that_began_from_a_checkpoint_is_resumed_by_the_same_command():
    start = f"--ckpt_path={checkpoint(4)}"
    for steps in (8, 12):
        assert fit(steps, start, "--run_name=other", "--resume=auto") == 0
        assert logged_steps(OTHER) == list(range(5, steps + 1))


# ---- identity ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four_steps")
def test_a_checkpoint_of_another_run_is_passed_over_and_refused_by_name(capsys):
    assert fit(12, "--run_name=other", "--model.betas=[0.5, 0.6]") == 0
    place = RUN / "checkpoints"
    for file in (OTHER / "checkpoints").glob("step-0000012*"):
        shutil.copy(file, place)
    path = checkpoint(12)
    assert fit(8, f"--resume={path}") == 2
    assert f"{path} is a checkpoint of run " in capsys.readouterr().err
    assert fit(8, "--resume=auto") == 0
    printed = capsys.readouterr()
    assert f"{path} is a checkpoint of run " in printed.err
    assert f"set aside   {path.name}.skipped" in printed.err
    assert logged_steps() == [1, 2, 3, 4, 5, 6, 7, 8]
    for file in place.glob("step-000000*"):
        file.unlink()
    for suffix in ("", ".sha256"):
        Path(f"{path}.skipped{suffix}").rename(f"{path}{suffix}")
    assert fit(8, "--resume=auto") == 2
    assert f"no checkpoint in {RUN} is whole and of this run" in capsys.readouterr().err
    (RUN / "run.json").unlink()
    assert fit(8, "--resume=auto") == 2
    assert f"{RUN}/run.json is missing" in capsys.readouterr().err
    assert fit(13, f"--ckpt_path={path}", "--run_name=third") == 0  # as the message says


@pytest.mark.slow
@pytest.mark.usefixtures("four_steps")
def test_a_whole_run_folder_can_be_moved_and_copied():
    copy = Path("elsewhere/copy")
    shutil.copytree(RUN, copy)
    assert fit(8, f"--resume={copy}") == 0
    assert logged_steps(copy) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert logged_steps() == [1, 2, 3, 4]
    facts = torch.load(checkpoint(8, copy), weights_only=True)["gpt_lightning"]
    assert facts["run_id"] == json.loads((RUN / "run.json").read_text())["run_id"]


# ---- metrics.jsonl -------------------------------------------------------------------------------


@pytest.mark.usefixtures("four_steps")
def test_lost_rows_are_said_with_both_numbers(capsys):
    metrics = RUN / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert len(lines) == 5  # four steps and a validation
    metrics.write_text("".join(lines[:3]))
    assert fit(6, "--resume=auto") == 0
    assert (
        f"warning: {metrics} has 3 rows up to step 4, and had 5 when the checkpoint was saved"
    ) in capsys.readouterr().err
    assert fit(8, "--resume=auto") == 0
    assert "rows" not in capsys.readouterr().err  # said once


@pytest.mark.usefixtures("own_folder")
def test_rows_that_a_callback_logs_after_the_save_are_there_once():
    """LearningRateMonitor logs at the start of a step under the number of the step before."""
    monitor = ["--trainer.callbacks+=LearningRateMonitor", "--checkpoint.every_n_steps=2"]
    assert fit(8, *monitor, "--checkpoint.keep_last=9", "--model.decay_steps=8") == 0
    shutil.copytree(RUN, "resumed")
    for path in Path("resumed/checkpoints").glob("step-000000[68]*"):
        path.unlink()
    assert fit(8, *monitor, "--resume=resumed", "--model.decay_steps=8") == 0
    whole, resumed = (
        [(row["step"], "train/loss" in row) for row in rows(run)] for run in (RUN, Path("resumed"))
    )
    assert whole == resumed


@pytest.mark.usefixtures("own_folder")
def test_rows_are_on_the_disk_before_the_checkpoint(monkeypatch):
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    assert fit(2) == 0
    first = synced.index("metrics.jsonl")
    assert any(".ckpt" in name for name in synced[first:])
    assert not any(".ckpt" in name for name in synced[:first])


@pytest.mark.usefixtures("four_steps")
def test_a_setting_that_the_loaders_refuse_leaves_no_run_to_continue():
    assert fit(5, "--trainer.limit_train_batches=0.00001") == 2
    assert [run.name for run in RUN.parent.iterdir()] == ["version_0"]
    assert fit(5, "--resume=auto") == 0
    assert logged_steps() == [1, 2, 3, 4, 5]
