"""Content of a run folder about the run itself: config.yaml, identity, and rows of metrics."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import fit_command

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [*TINY_RUN, "--data.batch_size=4", "--trainer.log_every_n_steps=1"]
RUNS = Path("lightning_logs") / "run"
RUN = RUNS / "version_0"


def fit(steps: int, *args: str) -> int:
    return main(["fit", *TINY, f"--trainer.max_steps={steps}", *args])


def rows(run: Path = RUN) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def logged_steps(run: Path = RUN) -> list[int]:
    return [row["step"] for row in rows(run) if "train/loss" in row]


def checkpoint(step: int, run: Path = RUN) -> Path:
    (path,) = (run / "checkpoints").glob(f"step-{step:07d}*.ckpt")
    return path


def copy_with_digest(path: Path, folder: Path) -> None:
    for file in (path, path.with_name(path.name + ".sha256")):
        shutil.copy(file, folder)


# ---- config.yaml ---------------------------------------------------------------------------------


@pytest.mark.slow
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
    again = [row["train/loss"] for row in rows(Path("lightning_logs/again/version_0"))[:8]
             if "train/loss" in row]  # fmt: skip
    assert again == [row["train/loss"] for row in rows()[:8] if "train/loss" in row]
    # the command of `doctor --resume`, as it starts it
    _, _, _, *command = fit_command(config, 4, Path("doctor"))
    for session in range(2):
        assert main([*command, "--run_name=killed", "--resume=auto"]) == 0, session
    assert logged_steps(Path("doctor/lightning_logs/killed/version_0")) == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_that_began_from_a_checkpoint_is_resumed_by_the_same_command():
    assert fit(4, "--run_name=first") == 0
    start = f"--ckpt_path={checkpoint(4, Path('lightning_logs/first/version_0'))}"
    assert fit(8, start, "--resume=auto") == 0
    assert logged_steps() == [5, 6, 7, 8]
    assert fit(12, start, "--resume=auto") == 0
    assert logged_steps() == [5, 6, 7, 8, 9, 10, 11, 12]


# ---- identity ------------------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_skipped_and_set_aside(capsys):
    assert fit(4) == 0
    assert fit(12, "--run_name=other", "--model.learning_rate=0.1") == 0
    foreign = checkpoint(12, Path("lightning_logs/other/version_0"))
    copy_with_digest(foreign, RUN / "checkpoints")
    assert fit(8, "--resume=auto") == 0
    printed = capsys.readouterr()
    assert f"{RUN}/checkpoints/{foreign.name} is a checkpoint of run " in printed.err
    assert f"set aside   {foreign.name}.old" in printed.err
    assert "step-0000004" in printed.out
    assert logged_steps() == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_a_checkpoint_of_another_run_is_refused_by_name(capsys):
    assert fit(4) == 0
    assert fit(4, "--run_name=other", "--model.learning_rate=0.1") == 0
    (own,) = (RUN / "checkpoints").glob("*.ckpt")
    foreign = checkpoint(4, Path("lightning_logs/other/version_0"))
    for file in (RUN / "checkpoints").iterdir():
        file.unlink()
    copy_with_digest(foreign, RUN / "checkpoints")
    path = RUN / "checkpoints" / foreign.name
    assert fit(8, f"--resume={path}") == 2
    assert f"{path} is a checkpoint of run " in capsys.readouterr().err
    assert fit(8, "--resume=auto") == 2
    assert f"no checkpoint in {RUN} is whole and of this run" in capsys.readouterr().err
    assert fit(8, f"--ckpt_path={path}", "--run_name=third") == 0  # as the message says
    assert own.name[:12] == "step-0000004"


@pytest.mark.slow
def test_a_whole_run_folder_can_be_moved_and_copied():
    assert fit(4) == 0
    shutil.copytree(RUN, "elsewhere/copy")
    assert fit(8, "--resume=elsewhere/copy") == 0
    assert logged_steps(Path("elsewhere/copy")) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert logged_steps() == [1, 2, 3, 4]
    facts = torch.load(checkpoint(8, Path("elsewhere/copy")), weights_only=True)["gpt_lightning"]
    assert facts["run_id"] == json.loads((RUN / "run.json").read_text())["run_id"]


# ---- metrics.jsonl -------------------------------------------------------------------------------


def test_lost_rows_are_said_with_both_numbers(capsys):
    assert fit(4) == 0
    metrics = RUN / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    assert len(lines) == 5  # four steps and a validation
    metrics.write_text("".join(lines[:3]))
    assert fit(8, "--resume=auto") == 0
    assert (
        f"warning: {metrics} has 3 rows up to step 4, and had 5 when the checkpoint was saved"
    ) in capsys.readouterr().err
    assert fit(12, "--resume=auto") == 0
    assert "rows" not in capsys.readouterr().err  # said once


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


def test_rows_are_on_the_disk_before_the_checkpoint(monkeypatch):
    synced, fsync = [], os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    assert fit(4) == 0
    first = synced.index("metrics.jsonl")
    assert any(".ckpt" in name for name in synced[first:])
    assert not any(".ckpt" in name for name in synced[:first])


def test_a_setting_that_the_loaders_refuse_leaves_no_run_to_continue(capsys):
    assert fit(1) == 0
    assert fit(2, "--trainer.limit_train_batches=0.00001") == 2
    assert [run.name for run in RUN.parent.iterdir()] == ["version_0"]
    assert fit(2, "--resume=auto") == 0
    assert logged_steps() == [1, 2]
