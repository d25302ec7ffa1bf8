"""Defaults are part of the interface: a changed one is another run from the same command."""

import dataclasses
import inspect
from pathlib import Path

import pytest
import yaml

from gpt_lightning.cli import main
from gpt_lightning.commands.sample import sample
from gpt_lightning.errors import UserError
from gpt_lightning.prepare.command import prepare
from gpt_lightning.training.callbacks import EVERY_RUN
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.callbacks.signals import StopSignals
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule

DEFAULTS = yaml.safe_load(Path(__file__).with_name("defaults.yaml").read_text())


def as_yaml(value):
    """Return a default as YAML holds it."""
    if dataclasses.is_dataclass(value):
        return dataclasses.asdict(value)
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("command", DEFAULTS)
def test_the_defaults_of_a_command(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([command, "--print_config"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    lightnings = {"trainer", "seed_everything"} if command == "fit" else set()
    assert {key: printed[key] for key in printed.keys() - lightnings} == DEFAULTS[command]


@pytest.mark.parametrize(
    ("key", "made"),
    [
        ("model", GPTModule),
        ("data", TokenDataModule),
        ("speed", SpeedMonitor),
        ("progress", StepProgress),
        ("samples", SampleText),
        ("checkpoint", RunCheckpoint),
        ("signals", StopSignals),
        (None, sample),
        (None, prepare),
    ],
)
def test_python_has_the_defaults_of_the_command(key, made):
    expected = DEFAULTS[made.__name__] if key is None else DEFAULTS["fit"][key]
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            assert as_yaml(parameter.default) == expected[name]
        if key in EVERY_RUN:  # Python checks its arguments as the command does
            with pytest.raises(UserError, match=f"{key}.{name}"):
                made(**{name: ["no value"]})
