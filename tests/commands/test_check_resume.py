"""`doctor --resume` makes a short run of a long run's configuration."""

from pathlib import Path

import pytest

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import OF_THE_SESSION, fit_command, whole_schedule
from gpt_lightning.runs.logger import DESCRIPTIONS

CONFIGS = Path(__file__).parents[2] / "configs"


def test_only_times_rates_and_memory_may_differ_between_equal_runs():
    measured = {name for name in DESCRIPTIONS if name.startswith("perf/")} - {"perf/tokens"}
    assert {"time"} | measured == OF_THE_SESSION


@pytest.mark.parametrize(
    ("name", "option"),
    [("quickstart", ["--model.decay_steps=2400"]), ("shakespeare_char", [])],  # it has its own
)
def test_the_schedule_stays_the_whole_runs(name, option):
    assert whole_schedule(["--config", str(CONFIGS / f"{name}.yaml")]) == option


def test_the_users_options_win_over_it_and_the_short_run_over_them(tmp_path):
    options = ["--config", "quickstart", "--model.decay_steps=7", "--trainer.max_steps=9"]
    command = fit_command(options, 20, tmp_path)
    decays = [word for word in command if word.startswith("--model.decay_steps")]
    steps = [word for word in command if word.startswith("--trainer.max_steps")]
    assert (decays[-1], steps[-1]) == ("--model.decay_steps=7", "--trainer.max_steps=20")


def test_a_runs_own_file_says_null_where_nothing_was_set(tmp_path):
    text = "trainer: {max_steps: 9}\nmodel: {decay_steps: null}\n"
    (tmp_path / "config.yaml").write_text(text)
    assert whole_schedule([f"--config={tmp_path / 'config.yaml'}"]) == ["--model.decay_steps=9"]


@pytest.mark.parametrize(
    "text",
    [
        "trainer: {}\n",
        "model: {}\ntrainer: {max_epochs: 1}\n",
        "trainer: {max_epochs: 1, max_steps: -1}\n",
    ],
)
def test_a_configuration_without_an_end_has_none(text, tmp_path):
    (tmp_path / "run.yaml").write_text(text)
    assert whole_schedule([f"--config={tmp_path / 'run.yaml'}"]) == []


def test_a_missing_configuration_takes_one_line(tmp_path, capsys):
    assert main(["doctor", "--resume", "--config", str(tmp_path / "no.yaml")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --config {tmp_path / 'no.yaml'}: ")
