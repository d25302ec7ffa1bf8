"""The summary of a run prints commands that work."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_fit import TINY_FIT

from gpt_lightning.cli import main
from gpt_lightning.hardware.device import device_name
from gpt_lightning.parsing import program
from gpt_lightning.training.callbacks.report import print_facts, run_hyperparameters
from gpt_lightning.training.fit import run_cli

pytestmark = pytest.mark.usefixtures("own_folder")

TINY = [*TINY_FIT, "--data.batch_size=4", "--trainer.max_steps=2", "--run_name=a run"]


def test_the_command_to_sample_works_as_it_is_printed(capsys):
    assert main(["fit", *TINY]) == 0
    printed = re.search(r"^sample +(.*)$", capsys.readouterr().out, re.M)[1]
    name, *arguments = shlex.split(printed)
    assert name == program()
    assert main([*arguments, "--max_new_tokens=3"]) == 0
    assert Path("lightning_logs/a run/version_0/config.yaml").is_file()


def test_on_a_terminal_lines_are_broken_between_words_and_commands_not_at_all(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    trainer = SimpleNamespace(callbacks=[])
    command = "gpt-lightning sample 'lightning_logs/a  run/version_0'"
    speed = "1 tokens/s, MFU 35.2% of measured bf16 matrix-product peak"
    print_facts(trainer, {"speed": speed, "sample": command, "look": ""})
    expected = [
        "speed       1 tokens/s, MFU 35.2% of",
        "            measured bf16 matrix-product",
        "            peak",
        f"sample      {command}",
    ]
    assert capsys.readouterr().out.splitlines() == expected


def test_without_checkpoints_there_is_nothing_to_sample_from(capsys):
    assert main(["fit", *TINY, "--trainer.enable_checkpointing=false"]) == 0
    out = capsys.readouterr().out
    assert "\nlook        " in out
    assert "\nsample" not in out


def best(out: str) -> str:
    return re.search(r"best val/loss (.*) after \d+ steps$", out, re.M)[1]


@pytest.mark.slow
def test_the_best_loss_is_of_all_sessions(capsys, monkeypatch):
    run = [*TINY, "--trainer.val_check_interval=2"]
    assert main(["fit", *run]) == 0
    first = best(capsys.readouterr().out)
    worse = [*run, "--resume=auto", "--trainer.max_steps=4", "--model.learning_rate=10"]
    assert main(["fit", *worse]) == 0
    out = capsys.readouterr().out
    assert f" val/loss {first}" not in out.partition("best")[0]
    assert best(out) == first


def test_the_banner_and_the_summary_are_facts_of_the_run(capsys):
    args = ["--trainer.max_steps=6", "--trainer.log_every_n_steps=2", "--trainer.devices=1"]
    more = ["--trainer.accumulate_grad_batches=3", "--trainer.val_check_interval=9"]
    every = ["--trainer.check_val_every_n_epoch=null", "--model.learning_rate=2.5e-3"]
    argv = [*args, *more, *every, "--data.order=sequential"]
    trainer = run_cli(["fit", *TINY, *argv]).trainer
    out = capsys.readouterr().out
    lines = [line for line in out.splitlines() if " | " not in line]  # no progress
    facts = {line[:11].strip(): line[12:] for line in lines if line[11:12] == " "}
    module, data = trainer.lightning_module, trainer.datamodule
    n_parameters = sum(p.numel() for p in {*module.model.parameters()})
    assert facts["device"] == f"{device_name(torch.device('cpu'))} x 1"
    assert facts["precision"].startswith("32-true, float32 products: ")
    assert facts["compile"].startswith("off (")
    assert facts["model"] == (
        f"1 layers, 1 heads, 8 wide, vocabulary {data.vocab_size}: {n_parameters:,} parameters"
    )
    assert facts["optimizer"] == "adamw, learning rate 0.0025 (constant)"
    assert (
        facts["data"]
        == f"{data.address}: {data.training_tokens():,} training tokens, sequential order; "
        f"1 epoch = {(data.training_tokens() - 1) // 16 // 4 // 3 * 3} batches"
    )
    assert facts["step"] == "192 tokens = 4 sequences x 16 tokens x 3 accumulated x 1 ranks"
    assert facts["run folder"] == "lightning_logs/a run/version_0"
    metrics, held_out = trainer.callback_metrics, len(data.reader.stream("val")) - 1
    losses = {key: float(metrics[key]) for key in ("train/loss", "val/loss")}
    bits, best = (
        float(metrics["val/bits_per_byte"]),
        min(row["val/loss"] for row in logged() if "val/loss" in row),
    )
    assert facts["loss"] == (
        f"train/loss {losses['train/loss']:.4f}, "
        f"val/loss {losses['val/loss']:.4f} on 64 of {held_out:,} tokens, "
        f"{bits:.4f} bits per byte, best val/loss {best:.4f} after 6 steps"
    )
    assert out.index("\nrun folder") < out.index("\nloss ") < out.index("\nsample ")
    found = run_hyperparameters(trainer, module)
    assert found["model/n_embd"] == 8
    assert found["learning_rate"] == 2.5e-3
    assert {key: found[key] for key in ("batch_size", "accumulate", "ranks", "max_steps")} == {
        "batch_size": 4, "accumulate": 3, "ranks": 1, "max_steps": 6,
    }  # fmt: skip
    assert (found["precision"], found["dataset"]) == ("32-true", data.address)
    assert (found["seed"], found["device"]) == (1337, facts["device"])
    assert found["gradient_clip_val"] == (trainer.gradient_clip_val or 0.0)


def test_a_run_that_is_over_prints_one_line(capsys):
    assert main(["fit", *TINY]) == 0
    capsys.readouterr()
    assert main(["fit", *TINY, "--resume=auto"]) == 0
    out = capsys.readouterr().out
    assert "nothing to do: the run is at step 2, trainer.max_steps is 2" in out
    assert "\nloss " not in out


def logged() -> list[dict]:
    file = Path("lightning_logs/a run/version_0/metrics.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]
