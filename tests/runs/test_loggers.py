"""The run folder is ours with every logger, and no two runs share one."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from remote_logger import RemoteLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer
from tiny_fit import RUN, TINY_RUN, fit, logged_steps

from gpt_lightning.cli import main
from gpt_lightning.errors import UserError
from gpt_lightning.runs.logger import RunLogger, continue_logger

pytestmark = pytest.mark.slow  # CI runs them
RUNS = RUN.parent
CSV = {"class_path": "CSVLogger", "init_args": {"save_dir": "csv", "name": "mine"}}
REMOTE = {"class_path": "remote_logger.RemoteLogger"}
LOGGERS = {"tensorboard": True, "none": False, "several": [REMOTE, CSV]}


@pytest.fixture(autouse=True)
def clean(own_folder, monkeypatch) -> None:
    # files of one second are read in the order of a number in their names, and 10 precedes 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    monkeypatch.setattr(RemoteLogger, "rows", [])
    monkeypatch.setattr(RemoteLogger, "hyperparameters", {})


def with_logger(logger: object) -> str:
    """A configuration with a logger, by its path."""
    Path("logger.yaml").write_text(yaml.safe_dump({"trainer": {"logger": logger}}))
    return "--config=logger.yaml"


def folders() -> list[str]:
    return sorted(path.name for path in RUNS.iterdir())


def events(folder: Path, tag: str = "train/loss") -> list[int]:
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return [event.step for event in found.Scalars(tag)]


@pytest.mark.parametrize("name", ["tensorboard", "none", "several"])
def test_fit_resume_sample_and_hints_with_every_logger(name, capsys):
    config = with_logger(LOGGERS[name])
    assert fit(4, config) == 0
    run = RUNS / "version_0"
    assert folders() == ["version_0"]
    assert (run / "config.yaml").is_file()
    assert [path.name[:12] for path in (run / "checkpoints").glob("*.ckpt")] == ["step-0000004"]
    assert not Path("checkpoints").exists()
    hints = dict(re.findall(r"^(sample|look) +(.*)$", capsys.readouterr().out, re.M))
    assert ("look" in hints) == (name == "tensorboard")
    assert main([*shlex.split(hints["sample"])[1:], "--max_new_tokens=3"]) == 0
    if "look" in hints:
        assert shlex.split(hints["look"])[1:] == ["--logdir", "lightning_logs"]

    assert fit(8, config, "--resume=auto") == 0
    assert "resume      lightning_logs/run/version_0/checkpoints/step-0000004" in (
        capsys.readouterr().out
    )
    assert folders() == ["version_0"]
    assert logged_steps() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert main(["sample", str(run), "--max_new_tokens=3"]) == 0
    if name == "tensorboard":
        assert events(run) == [1, 2, 3, 4, 5, 6, 7, 8]
        tags = EventAccumulator(str(run)).Reload().Tags()["scalars"]
        assert not any("hp_metric" in tag for tag in tags)
    else:
        assert not list(run.glob("events.out.*"))
    if name == "several":  # Lightning's own deletes its file when it opens a folder again
        sessions = [Path(f"csv/mine/version_{n}/metrics.csv").read_text() for n in (0, 1)]
        assert [text.count("\n") > 4 for text in sessions] == [True, True]
    if name == "several":
        steps = [step for step, row in RemoteLogger.rows if "train/loss" in row]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8]
        assert RemoteLogger.hyperparameters["model/n_layer"] == 1


def test_points_after_the_checkpoint_are_purged_from_tensorboard_alone_or_among_others():
    """A killed session's points past its last save are drawn once, by the session after it."""
    own = {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "mine", "version": "a"}}
    for config, folder in ((True, RUNS / "version_0"), ([own, REMOTE], Path("mine") / "a")):
        if config is not True:
            folder = Path("mine") / "lightning_logs" / "a"
        args = [with_logger(config), "--checkpoint.every_n_steps=2", "--checkpoint.keep_last=9"]
        assert fit(6, *args) == 0
        run = max(RUNS.iterdir())
        for path in (run / "checkpoints").glob("step-000000[46]*"):
            path.unlink()
        assert fit(8, *args, "--resume=auto") == 0
        assert events(folder) == logged_steps(run) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_a_csv_file_of_an_earlier_session_is_never_deleted(capsys):
    fixed = CSV | {"init_args": {"save_dir": "csv", "version": 3}}
    config = with_logger(fixed)
    assert fit(4, config) == 0
    before = Path("csv/lightning_logs/version_3/metrics.csv").read_bytes()
    assert fit(8, config, "--resume=auto") == 2
    assert "CSVLogger would delete csv/lightning_logs/version_3/metrics.csv" in (
        capsys.readouterr().err
    )
    assert Path("csv/lightning_logs/version_3/metrics.csv").read_bytes() == before


def test_evaluations_have_folders_of_their_own(capsys):
    assert fit(4) == 0
    last = f"--ckpt_path={RUNS / 'version_0'}"
    for command in ("validate", "predict", "validate"):
        assert main([command, *TINY_RUN, "--data.batch_size=4", last]) == 0
    assert folders() == ["predict_0", "validate_0", "validate_1", "version_0"]
    assert (RUNS / "predict_0" / "token_losses.npy").is_file()
    (row,) = (RUNS / "validate_0" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(row)["step"] == 4
    assert events(RUNS / "validate_0", "val/loss") == [4]
    assert fit(8, "--resume=auto") == 0
    assert logged_steps() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "version_1" not in folders()


def test_other_loggers_that_start_at_once_have_folders_of_their_own():
    """Lightning takes the next free number and makes the folder later."""
    for kind in (CSVLogger, TensorBoardLogger):
        loggers = [kind("mine", name=kind.__name__) for _ in range(3)]
        for logger in loggers:
            continue_logger(logger, None)
        assert [Path(logger.log_dir).name for logger in loggers] == [
            "version_0", "version_1", "version_2",
        ]  # fmt: skip
        for logger in loggers:
            logger.log_metrics({"loss": 1.0}, step=1)
            logger.save()
            assert list(Path(logger.log_dir).iterdir())


def test_a_logger_claims_its_folder_once_and_leaves_none_if_nothing_happened(tmp_path):
    runs = tmp_path / "logs" / "run"
    first, second = RunLogger(runs), RunLogger(runs)
    assert first.folder != second.folder
    assert first.folder == runs / "version_0"
    second.log_metrics({"train/loss": 1.0}, step=1)
    for logger in (first, second):
        logger.finalize("failed")
    assert [path.name for path in runs.iterdir()] == ["version_1"]


@pytest.mark.parametrize("name", ["tensorboard", "several", "none"])
def test_a_command_with_an_error_leaves_no_run_folder(name, capsys):
    wrong = ["--data.batch_size=100000000"]
    assert fit(4, with_logger(LOGGERS[name]), *wrong) == 2
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.jsonl", "hparams.yaml"])
def test_a_folder_in_place_of_a_file_is_refused_before_a_resume_changes_anything(tmp_path, name):
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=f"{name} is a folder"):
        RunLogger(tmp_path.parent, folder=tmp_path, resume_step=3)
