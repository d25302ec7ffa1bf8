"""The average of EMAWeightAveraging, and the banner's notes about what the run leaves out."""

import pytest
from lightning.pytorch import callbacks as cb
from tiny_fit import TINY_RUN, rows

from gpt_lightning.cli import main
from gpt_lightning.training.fit import default_callbacks, run_cli

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]  # CI runs them
BASE = [
    *TINY_RUN,
    *("--data.batch_size=2", "--model.compile=false", "--model.config.dropout=0.1"),
    "--trainer.log_every_n_steps=1",
]


def fit(name: str, *callbacks: cb.Callback) -> dict:
    """Train for four steps, and return the last losses by name."""
    argv = ["fit", *BASE, f"--run_name={name}", "--trainer.max_steps=4"]
    run_cli(argv, callbacks=[*callbacks, *default_callbacks("fit")])
    found = {}
    for row in rows(name):
        found |= row
    return found


def test_validate_gives_the_value_of_the_average(capsys):
    run = fit("ema", cb.EMAWeightAveraging(decay=0.5))
    plain = fit("plain")
    assert run["train/loss"] == plain["train/loss"]
    assert run["val/loss"] != plain["val/loss"]
    capsys.readouterr()
    assert main(["validate", *BASE, "--ckpt_path=lightning_logs/ema/version_0"]) == 0
    assert f"validation loss {run['val/loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--model.schedule=cosine", "--model.warmup_steps=100"],
            "schedule    the run ends at step 2, the cosine schedule at 100, its warm-up at 100",
        ),
        (
            ["--model.schedule=cosine", "--model.decay_steps=30"],
            "schedule    the run ends at step 2, the cosine schedule at 30, its warm-up at 0",
        ),
        (
            ["--trainer.accumulate_grad_batches=2"],
            "validation  none: the first is due after 1,000 micro-batches, the run has 4; "
            "--trainer.val_check_interval 4 validates at its end",
        ),
    ],
)
def test_the_banner_says_what_the_run_does_not_reach(options, line, capsys):
    argv = ["fit", *BASE, "--trainer.max_steps=2", "--trainer.val_check_interval=1000", *options]
    assert main(argv) == 0
    assert line in capsys.readouterr().out.splitlines()
