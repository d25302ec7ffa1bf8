"""A training argument is declared once: everything else follows from the fields of Settings."""

import dataclasses

import pytest

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.checkpoint import RunRecord
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.fit import training_parser
from gpt_lightning.training.module import GPTModule


def test_every_field_is_a_key_with_its_default_and_help():
    parser = training_parser()
    (fit,) = (a.choices["fit"] for a in parser._actions if isinstance(a.choices, dict))
    actions = {action.dest: action for action in fit._actions}
    for field in dataclasses.fields(Settings):
        action = actions[f"model.{field.name}"]
        assert action.default == field.default
        assert action.help, field.name


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0}, "model.learning_rate is 0; it must be above 0"),
        ({"min_learning_rate": -1.0}, "model.min_learning_rate is -1.0; it must be at least 0"),
        ({"betas": [0.9, 1.0]}, "model.betas is 1.0; it must be at least 0 and below 1"),
        ({"schedule": "step"}, "model.schedule is 'step'; expected cosine, linear, constant"),
        ({"warmup_steps": 1.5}, "model.warmup_steps is '1.5'; expected int"),
    ],
)
def test_bounds_hold_in_python(settings, message):
    with pytest.raises(UserError) as error:
        GPTModule(**settings)
    assert str(error.value) == message


def test_a_record_comes_back_from_a_checkpoint():
    record = RunRecord(
        config=GPTConfig(n_layer=2, vocab_size=100),
        settings=Settings(learning_rate=1, betas=(0.5, 0.6)),
        data_position={"epoch": 1, "window": 8},
    )
    checkpoint: dict = {}
    record.write(checkpoint)
    assert RunRecord.read(checkpoint) == record
    assert type(record.settings.learning_rate) is float  # a plain number, no class to import


def test_the_learning_rate_may_be_its_own_minimum_but_not_below_it():
    assert Settings(learning_rate=1e-3, min_learning_rate=1e-3).min_learning_rate == 1e-3
    with pytest.raises(UserError, match=r"min_learning_rate 0.002 is above model.learning_rate 0"):
        Settings(learning_rate=1e-3, min_learning_rate=2e-3)
