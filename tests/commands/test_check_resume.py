"""`doctor --resume` makes a short run of a long run's configuration."""

import pytest

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import SESSION, fit_command


@pytest.mark.parametrize(
    ("name", "may_differ"),
    [
        ("time", True),
        ("perf/tokens_per_sec", True),
        ("perf/step_ms", True),
        ("perf/mfu", True),
        ("perf/memory_gib", True),
        ("perf/tokens", False),
        ("train/loss", False),
        ("val/bits_per_byte", False),
        ("optim/grad_norm", False),
    ],
)
def test_only_times_rates_and_memory_may_differ_between_equal_runs(name, may_differ):
    assert bool(SESSION.fullmatch(name)) == may_differ


def test_the_short_run_has_its_own_end_and_the_schedule_none_in_it(tmp_path):
    options = ["--config", "quickstart", "--model.decay_steps=7", "--trainer.max_steps=9"]
    command = fit_command(options, 20, tmp_path)
    assert command.index("--trainer.max_steps=20") > command.index("--trainer.max_steps=9")
    assert command.index("--model.decay_steps=1000000") > command.index("--model.decay_steps=7")


def test_a_missing_configuration_takes_one_line(tmp_path, capsys):
    assert main(["doctor", "--resume", "--config", str(tmp_path / "no.yaml")]) == 2
    assert capsys.readouterr().err.startswith(f"error: --config {tmp_path / 'no.yaml'}: ")
