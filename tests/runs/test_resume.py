"""`--resume` continues the right run from the right file with the settings of this command."""

import json
from pathlib import Path

import pytest
import torch
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.commands.check_resume import compare
from gpt_lightning.runs.checkpoint import SCHEMA
from gpt_lightning.runs.checkpoint_io import write_durable_checkpoint

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [*TINY_RUN, "--data.batch_size=4", "--trainer.log_every_n_steps=1"]
RUN = Path("lightning_logs") / "run"


def fit(steps: int, *args: str) -> int:
    return main(["fit", *TINY, f"--trainer.max_steps={steps}", *args])


def steps_saved(version: int = 0) -> list[int]:
    folder = RUN / f"version_{version}" / "checkpoints"
    return sorted(int(path.name[5:12]) for path in folder.glob("*.ckpt"))


def saved(step: int, version: int = 0) -> dict:
    (path,) = (RUN / f"version_{version}" / "checkpoints").glob(f"step-{step:07d}*.ckpt")
    return torch.load(path, weights_only=True)


def logged_steps(version: int = 0) -> list[int]:
    rows = (RUN / f"version_{version}" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["step"] for row in rows if "train/loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [["--model.optimizer=muon", "--model.config.dropout=0.2"], ["--data.order=nanogpt"]],
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(kind, capsys):
    kind = [*kind, "--model.decay_steps=8"]
    assert fit(8, *kind, "--run_name=whole") == 0
    assert fit(4, *kind) == 0
    assert fit(8, *kind, "--resume=auto") == 0
    assert "changed" not in capsys.readouterr().out
    found = compare(Path("lightning_logs/whole/version_0"), RUN / "version_0")
    assert all(found.values()), found


@pytest.mark.parametrize(("command", "to"), [("fit", "nowhere"), ("validate", "auto")])
def test_what_cannot_be_resumed_is_one_line(command, to, capsys):
    assert main([command, *TINY, f"--resume={to}"]) == 2
    assert "--resume" in capsys.readouterr().err


def test_another_schema_is_one_line(capsys):
    assert fit(4) == 0
    (path,) = (RUN / "version_0" / "checkpoints").glob("*.ckpt")
    file = torch.load(path, weights_only=True)
    file["gpt_lightning"]["schema"] = SCHEMA + 1
    write_durable_checkpoint(file, path)
    assert fit(8, "--resume=auto") == 2
    assert f"schema {SCHEMA + 1}" in capsys.readouterr().err


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_settings_of_this_command_win_and_are_printed(optimizer, capsys):
    kind = f"--model.optimizer={optimizer}"
    assert fit(4, kind) == 0
    changes = ["--model.weight_decay=0.5", "--model.betas=[0.5, 0.6]", "--resume=auto"]
    assert fit(8, kind, *changes) == 0
    assert "changed     model.weight_decay 0.1 -> 0.5" in capsys.readouterr().out
    groups = saved(8)["optimizer_states"][0]["param_groups"]
    assert {group["weight_decay"] for group in groups} == {0.5, 0.0}
    assert {tuple(group["betas"]) for group in groups if "betas" in group} == {(0.5, 0.6)}


def test_auto_goes_on_with_the_newest_run_even_if_it_has_saved_nothing(capsys):
    assert fit(4) == 0
    (RUN / "version_1" / "checkpoints").mkdir(parents=True)  # killed before its first one
    assert fit(4, "--resume=auto") == 0
    assert "no checkpoint in lightning_logs/run/version_1" in capsys.readouterr().out
    assert steps_saved(1) == [4]
    assert not (RUN / "version_2").exists()


def test_a_branch_that_is_left_does_not_come_back(capsys):
    assert fit(8) == 0
    (first,) = (RUN / "version_0" / "checkpoints").glob("step-0000004*.ckpt")
    args = [
        "--checkpoint.every_n_steps=1",
        "--checkpoint.keep_last=1",
        "--model.learning_rate=0.01",
    ]
    assert fit(6, f"--resume={first}", *args) == 0
    assert 6 in steps_saved()
    assert 8 not in steps_saved()
    assert "set aside   step-0000008" in capsys.readouterr().err
    assert fit(7, "--resume=auto", *args) == 0
    assert logged_steps() == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("--seed_everything=5", "the checkpoint has seed_everything 1337, this run has 5"),
        ("--data.batch_size=2", "has sequences a micro-batch 4, this run has 2"),
        ("--trainer.accumulate_grad_batches=2", "has micro-batches a step 1, this run has 2"),
        ("--model.decay=all", "model.decay is all, the checkpoint's matrices"),
        ("--model.config.n_embd=16", "model.config.n_embd is 16, the checkpoint's 8"),
    ],
)
@pytest.mark.parametrize("order", ["shuffled", pytest.param("nanogpt", marks=pytest.mark.slow)])
def test_another_run_is_refused_with_both_values(change, line, order, capsys):
    more = [f"--data.order={order}", "--data.seed=1"]
    assert fit(4, *more) == 0
    before = {p: p.read_bytes() for p in (RUN / "version_0" / "checkpoints").iterdir()}
    assert fit(8, *more, "--resume=auto", change) == 2
    if order == "nanogpt" and "batch_size" in change:  # one process has no global batch
        line = "has data.batch_size 4, this run has 2"
    assert line in capsys.readouterr().err
    assert {p: p.read_bytes() for p in (RUN / "version_0" / "checkpoints").iterdir()} == before


def test_a_file_outside_of_a_run_is_refused(capsys):
    assert fit(4) == 0
    for path in (RUN / "version_0" / "checkpoints").iterdir():
        path.rename(path.name)
    (copy,) = Path().glob("*.ckpt")
    assert fit(8, f"--resume={copy}") == 2
    assert "is in no run's folder checkpoints/" in capsys.readouterr().err
