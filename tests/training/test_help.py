"""Help of fit: our keys in a line each, and sections with their whole text."""

import pytest

from gpt_lightning.cli import main
from gpt_lightning.training import fit
from gpt_lightning.training.callbacks import EVERY_RUN

pytestmark = pytest.mark.slow  # docstrings of all classes are read


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_our_keys_come_first_and_fit_the_terminal(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = fit.help_text(fit.training_parser(), "fit", "").splitlines()
    assert len(lines) < 190
    headings = [line.partition(".KEY")[0].lstrip("-") for line in lines if ".KEY:" in line]
    assert headings[:2] == ["model", "data"]
    assert {*EVERY_RUN} < {*headings}
    assert headings[-1] == "trainer"
    assert max(map(len, lines)) <= columns
    assert "null A name that `gpt-lightning configs` lists" in " ".join(" ".join(lines).split())
    settings = {line.split()[0]: line.split()[1] for line in lines if line.startswith("  --")}
    assert settings["--model.learning_rate"] == "0.0006"
    assert "--trainer.max_steps" in settings
    assert any(line.startswith("example: ") and "--config quickstart" in line for line in lines)


def test_both_forms_of_the_help_are_options(capsys):
    assert main(["validate", "--help=speed"]) == 0
    out = capsys.readouterr().out
    assert "--speed.peak_flops " in out
    assert "the published dense peak in the run's" in " ".join(out.split())
    assert "--data.batch_size" not in out
    assert main(["fit", "-h"]) == 0
    assert "--help=SECTION" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["sample", "prepare", "reproduce", "resume", "bench"])
def test_no_word_of_the_help_is_broken(command, monkeypatch, capsys):
    words = []
    for columns in ("60", "1000"):
        monkeypatch.setenv("COLUMNS", columns)
        assert main([command, "--help"]) == 0
        words.append(capsys.readouterr().out.split())
    assert set(words[0]) <= set(words[1])
