"""Help of fit: our keys in a line each, and sections with their whole text."""

import pytest

from gpt_lightning.cli import main
from gpt_lightning.training import fit
from gpt_lightning.training.callbacks import EVERY_RUN
from gpt_lightning.training.help import help_text

pytestmark = pytest.mark.slow  # docstrings of all classes are read


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_our_keys_come_first_and_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = help_text(fit.training_parser(), "fit", "").splitlines()
    assert len(lines) < 150
    headings = [line.partition(".KEY")[0].lstrip("-") for line in lines if ".KEY:" in line]
    assert headings[:2] == ["model", "data"]
    assert {*EVERY_RUN, "evaluation"} < {*headings}
    assert headings[-1] == "trainer"
    settings = [line for line in lines if line.startswith("  ") and not line.startswith("   ")]
    assert max(map(len, settings)) <= max(columns, 78)
    learning_rate = next(line for line in lines if line.startswith("  learning_rate "))
    assert learning_rate.split()[:2] == ["learning_rate", "0.0006"]
    assert any("max_steps" in line for line in lines[-15:])
    assert any(line.startswith("example: ") and "--config quickstart" in line for line in lines)


def test_a_section_has_its_whole_text_and_no_other_keys():
    text = help_text(fit.training_parser(), "fit", "model")
    assert "--model.config.n_layer" in text
    assert "--model.optimizer" in text
    assert "Dtype of the residual" in " ".join(text.split())
    assert "--data." not in text
    assert "--trainer." not in text


def test_both_forms_are_options_and_a_wrong_section_is_an_error(capsys):
    assert main(["validate", "--help=speed"]) == 0
    assert "--speed.peak_flops" in capsys.readouterr().out
    assert main(["fit", "-h"]) == 0
    assert "--help=SECTION" in capsys.readouterr().out
    assert main(["fit", "--help=modle"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: --help=modle: expected model, data, ")
    assert line.endswith(": did you mean 'model'?")
