"""Types of arguments: bounds in errors, from the command line and from Python."""

import os
import sys
from pathlib import Path

import pytest
from jsonargparse.typing import NonNegativeInt, PositiveFloat, PositiveInt

from gpt_lightning.errors import UserError
from gpt_lightning.hints import suggestion
from gpt_lightning.parsing import HalfOpen as Fraction
from gpt_lightning.parsing import (
    OneLineParser,
    check_arguments,
    config_names,
    files_first,
    known_keys,
    nearest,
    program,
)


class Settings:
    """Arguments of every kind.

    Args:
        rate: A rate.
        steps: A number of steps.
        batch: A batch size or null.
        betas: Two fractions.
    """

    def __init__(
        self,
        rate: PositiveFloat = 0.5,
        steps: NonNegativeInt = 0,
        batch: PositiveInt | None = None,
        betas: tuple[Fraction, Fraction] = (0.9, 0.95),
    ) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rate", "0", "m.rate is 0; it must be above 0"),
        ("rate", "nan", "m.rate is nan; it must be above 0"),
        ("rate", "fast", "m.rate is 'fast'; expected float"),
        ("rate", "null", "m.rate is 'null'; expected float"),
        ("steps", "-1", "m.steps is -1; it must be at least 0"),
        ("steps", "2.5", "m.steps is '2.5'; expected int"),
        ("batch", "0", "m.batch is 0; it must be at least 1"),
        ("batch", "many", "m.batch is 'many'; expected null, int"),
        ("betas", "[0, 1]", "m.betas is 1; it must be at least 0 and below 1"),
    ],
)
def test_a_bound_is_named_on_the_command_line(name, value, message):
    parser = OneLineParser()
    parser.add_class_arguments(Settings, "m")
    with pytest.raises(UserError) as error:
        parser.parse_args([f"--m.{name}={value}"])
    assert str(error.value) == message


def test_the_same_bounds_hold_in_python():
    assert check_arguments(Settings, "m", {"betas": [0, 0.5], "batch": None}) == {
        "betas": (0.0, 0.5),
        "batch": None,
    }
    # jsonargparse's PositiveFloat would make a checkpoint name a class to import
    assert type(check_arguments(Settings, "m", {"rate": 1})["rate"]) is float
    with pytest.raises(UserError, match=r"m\.batch is 0; it must be at least 1"):
        check_arguments(Settings, "m", {"batch": 0})
    with pytest.raises(UserError, match="unknown key 'rat'"):
        check_arguments(Settings, "m", {"rat": 1.0})


@pytest.mark.parametrize(
    ("typed", "ordered"),
    [
        ("--a.b 1 --config x --config y", "--config=x --config=y --a.b=1"),
        ("--a.b=1 -c x --a.c -1 -c=y", "--config=x --config=y --a.b=1 --a.c -1"),
        ("--a+ 1 --a.b 2 RUN --config=x", "RUN --config=x --a+=1 --a.b=2"),
        ("--switch --config x RUN", "RUN --config=x --switch"),  # RUN is no value of the switch
        ("RUN -c x --a.b 1", "RUN -c x --a.b 1"),  # in order: as typed
    ],
)
def test_an_option_is_behind_every_configuration(typed, ordered):
    assert files_first(typed.split()) == ordered.split()


def test_a_program_is_named_as_it_works(monkeypatch, tmp_path):
    ours = tmp_path / ".venv" / "bin" / "gpt-lightning"
    ours.parent.mkdir(parents=True)
    ours.write_text("#!/bin/sh\n")
    ours.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(ours.parent / "python"))
    monkeypatch.chdir(tmp_path)
    assert program() == str(Path(".venv") / "bin" / "gpt-lightning")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert program() == str(ours)
    monkeypatch.setenv("PATH", f"{ours.parent}{os.pathsep}{os.environ['PATH']}")
    assert program() == "gpt-lightning"
    monkeypatch.setattr(sys, "executable", "/usr/bin/no-python")  # the package is on PYTHONPATH
    monkeypatch.setenv("PATH", str(tmp_path))
    assert program() == "/usr/bin/no-python -m gpt_lightning"
    assert program("tensorboard") == "tensorboard"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("model.learning_rat", "model.learning_rate"),
        ("modle.learning_rate", "model.learning_rate"),
        ("model.config.n_layr", "model.config.n_layer"),
        ("checkpoint.every_n_step", "checkpoint.every_n_steps"),
        ("trainer.acumulate_grad_batches", "trainer.accumulate_grad_batches"),
        ("lr", "model.learning_rate"),
        ("model.skip_spikes", ""),
        ("model.float8", ""),
        ("data.mixture", ""),
        ("data.shuffle", ""),
        ("model.my_parameter", ""),
        ("ema_decay", ""),
    ],
)
def test_a_hint_is_for_a_misspelling_and_no_stranger(typed, meant, parser):
    assert suggestion(typed, known_keys(parser)[0]) == meant


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("quikstart", "quickstart"), ("gpt2-124m", "gpt2_124m"), ("mygpt", ""), ("mixture", "")],
)
def test_the_nearest_configuration_is_near(typed, meant):
    assert nearest(typed, config_names()) == (meant and f": did you mean {meant!r}?")
