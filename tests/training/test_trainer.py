"""Bounds of the Trainer's arguments, from both sides, without a run."""

from datetime import timedelta

import pytest
from lightning.pytorch import callbacks as stock
from lightning.pytorch.trainer.connectors import accelerator_connector

from gpt_lightning.errors import UserError
from gpt_lightning.training import trainer as module
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.trainer import (
    TABLES,
    changed_arguments,
    check_callbacks,
    check_monitors,
    check_names,
    check_numbers,
)

BETWEEN = {"check_val_every_n_epoch": 1}


@pytest.mark.parametrize(("key", "least"), TABLES["at_least"].items())
def test_every_number_has_a_least_value(key, least):
    if least or key not in TABLES["not_zero"]:
        check_numbers(BETWEEN | {key: least})
    with pytest.raises(UserError, match=f"trainer.{key} is {least - 1}; it must be at least"):
        check_numbers(BETWEEN | {key: least - 1})


@pytest.mark.parametrize(
    "given",
    [
        {"limit_val_batches": 2.0},
        {"limit_val_batches": 1.0, "overfit_batches": 0.25},
        {"max_steps": 0, "num_sanity_val_steps": -1},  # nanoGPT's evaluation at step 0
        {"max_steps": 0, "fast_dev_run": 1},
        {"min_steps": 4, "max_steps": 4},
        {"min_steps": 4, "max_steps": -1},
        {"min_steps": 0, "max_steps": 1},
        {"min_epochs": None, "max_epochs": 3},
        {"val_check_interval": 5, "check_val_every_n_epoch": None},
        {"val_check_interval": 0.5},
        {"val_check_interval": None, "check_val_every_n_epoch": None},
        {"max_time": "00:00:00:01"},
        {"max_time": {"minutes": 5}},
        {"max_time": timedelta(0)},  # Lightning's own business
    ],
)
def test_numbers_that_agree(given):
    check_numbers(BETWEEN | given)


@pytest.mark.parametrize("value", [{"years": 1}, "0:00:01", "00:01:00:00 "])
def test_a_duration_is_in_known_units(value):
    with pytest.raises(UserError, match=r"trainer\.max_time is .*DD:HH:MM:SS"):
        check_numbers({"max_time": value})


def test_ranks_are_not_copies_of_an_interactive_python(monkeypatch):
    """Lightning's auto is ddp_fork in an interactive Python, and ddp_fork by name is an error."""
    monkeypatch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
    with pytest.raises(UserError, match=r"trainer\.devices: set it to 1 in an interactive"):
        module.Trainer(accelerator="cpu", devices=2, logger=False)
    module.Trainer(accelerator="cpu", devices=1, logger=False)


@pytest.mark.parametrize("devices", [0, -2, "0", "gpu", "[]", "1.5", ""])
def test_devices_that_do_not_exist(devices):
    with pytest.raises(UserError, match=r"trainer.devices is .*; expected auto, a number"):
        check_names({"devices": devices})


def test_callbacks_are_checked_where_the_run_is_ours():
    averaging = stock.StochasticWeightAveraging(swa_lrs=1e-3)
    check_callbacks([averaging], {})
    with pytest.raises(UserError, match="StochasticWeightAveraging sets learning rates"):
        check_callbacks([RunCheckpoint(), averaging], {})


def test_callbacks_monitor_metrics_that_are_logged():
    stopping = stock.EarlyStopping(monitor="loss")
    with pytest.raises(UserError, match=r"EarlyStopping monitors 'loss'.*; there are val/loss"):
        check_monitors([stopping], True, RunCheckpoint())
    check_monitors([stopping], True, type("Own", (), {})())
    by_step = stock.EarlyStopping(monitor="train/loss")
    check_monitors([by_step], True)
    with pytest.raises(UserError, match="monitors 'train/loss'"):
        check_monitors([by_step], False)


def test_lightning_gets_one_progress_bar_and_one_kind_of_checkpoint():
    ours, bar, theirs = RunCheckpoint(), StepProgress(), stock.ModelCheckpoint()
    assert changed_arguments([], {}) == {"callbacks": []}
    assert changed_arguments([bar], {})["callbacks"] == [bar]
    rich = stock.TQDMProgressBar()
    assert changed_arguments([bar, rich], {})["callbacks"] == [rich]
    assert changed_arguments([ours], {})["enable_checkpointing"] is False
    assert changed_arguments([ours, theirs], {})["enable_checkpointing"] is True
    assert "enable_checkpointing" not in changed_arguments([theirs], {})
    off = {"enable_checkpointing": False}  # Lightning raises
    assert changed_arguments([ours, theirs], off)["enable_checkpointing"] is False
