"""Lightning's callbacks across a resume, and the banner's notes about what the run leaves out."""

import json
from pathlib import Path

import pytest
from lightning.pytorch import callbacks as cb
from test_lightning_table import Freeze
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.training.fit import default_callbacks, run_cli

pytestmark = pytest.mark.slow  # CI runs them
BASE = [
    *TINY_RUN,
    *("--data.batch_size=2", "--model.compile=false", "--model.config.dropout=0.1"),
    "--trainer.log_every_n_steps=1",
]
EPOCHS_OF_3 = [
    *("--trainer.limit_train_batches=3", "--trainer.val_check_interval=1.0"),
    "--trainer.check_val_every_n_epoch=1",
]


@pytest.fixture(autouse=True)
def folder(tmp_path, text_file, monkeypatch):
    monkeypatch.chdir(tmp_path)


def fit(name: str, steps: int, *options: str, callbacks: list = ()) -> dict:
    """Train, and return the run's losses and norms by step and name."""
    argv = ["fit", *BASE, f"--run_name={name}", f"--trainer.max_steps={steps}", *options]
    run_cli(argv, callbacks=[*callbacks, *default_callbacks("fit")])
    text = (Path("lightning_logs") / name / "version_0" / "metrics.jsonl").read_text()
    rows = map(json.loads, text.splitlines())
    keys = ("train/loss", "val/loss", "optim/grad_norm")
    return {(row["step"], key): row[key] for row in rows for key in keys if key in row}


@pytest.mark.parametrize(
    ("kind", "arguments", "options"),
    [
        (cb.EMAWeightAveraging, {"decay": 0.5}, []),
        (Freeze, {}, EPOCHS_OF_3),  # step 4 is the first with the embedding
        pytest.param(cb.WeightAveraging, {}, [], marks=pytest.mark.slow),
        pytest.param(cb.LearningRateMonitor, {}, [], marks=pytest.mark.slow),
        pytest.param(cb.EarlyStopping, {"monitor": "val/loss"}, [], marks=pytest.mark.slow),
    ],
)
def test_a_longer_run_is_the_uninterrupted_one(kind, arguments, options):
    whole = fit("whole", 8, *options, callbacks=[kind(**arguments)])
    fit("cut", 4, *options, callbacks=[kind(**arguments)])
    cut = fit("cut", 8, "--resume=auto", *options, callbacks=[kind(**arguments)])
    assert cut == whole
    assert (8, "train/loss") in whole


def test_validate_gives_the_value_of_the_average(capsys):
    run = fit("ema", 4, callbacks=[cb.EMAWeightAveraging(decay=0.5)])
    plain = fit("plain", 4)
    assert run[4, "train/loss"] == plain[4, "train/loss"]
    assert run[4, "val/loss"] != plain[4, "val/loss"]
    capsys.readouterr()
    assert main(["validate", *BASE, "--ckpt_path=lightning_logs/ema/version_0"]) == 0
    assert f"validation loss {run[4, 'val/loss']:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("when", [{"monitor": "val/loss"}, {"every_n_train_steps": 3}])
def test_a_file_of_model_checkpoint_continues_exactly(when, accumulate):
    options = [f"--trainer.accumulate_grad_batches={accumulate}"]
    theirs = cb.ModelCheckpoint("theirs", save_top_k=-1, **when)
    whole = fit("whole", 10, *options, callbacks=[theirs])
    for path in sorted(Path("theirs").glob("*step=[3-9].ckpt")):
        step = int(path.stem.partition("step=")[2])
        rest = fit(path.stem, 10, *options, f"--ckpt_path={path}")
        assert rest == {key: value for key, value in whole.items() if key[0] > step}


@pytest.mark.parametrize("algorithm", ["value", pytest.param("norm", marks=pytest.mark.slow)])
def test_a_run_with_a_clipping_algorithm_is_resumed(algorithm):
    clip = ["--trainer.gradient_clip_val=0.01", f"--trainer.gradient_clip_algorithm={algorithm}"]
    whole = fit("whole", 3, *clip)
    fit("cut", 2, *clip)
    assert fit("cut", 3, "--resume=auto", *clip) == whole


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (
            ["--model.schedule=cosine", "--model.warmup_steps=100"],
            "schedule    the run ends at step 2, in the warm-up of 100 steps",
        ),
        (
            ["--model.schedule=cosine", "--model.decay_steps=30"],
            "schedule    the run ends at step 2, before the cosine decay's end at 30",
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
