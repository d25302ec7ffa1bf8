"""Whole runs on a device: published losses, scaler, Muon, ranks, waits of the host, resume."""

import collections
import os
import subprocess
import sys
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from tiny_fit import TINY_FIT, rows

from gpt_lightning.cli import main
from gpt_lightning.training import fit

pytestmark = pytest.mark.gpu
TINY = [
    *(option for option in TINY_FIT if "limit" not in option),
    "--model.config.n_layer=2",
    "--model.config.n_head=2",
    "--model.config.n_embd=64",
    "--model.config.block_size=32",
    "--model.compile=false",
    "--data.batch_size=4",
    "--trainer.log_every_n_steps=1",
]


def train(device: str, *options: str, name: str) -> list[dict[str, float]]:
    """Return the rows of a run."""
    accelerator = f"--trainer.accelerator={device}"
    assert main(["fit", *TINY, accelerator, *options, f"--run_name={name}"]) == 0
    return rows(name)


def losses(logged: list[dict[str, float]]) -> list[float]:
    return [row["train/loss"] for row in logged if "train/loss" in row]


@pytest.mark.parametrize(
    "command",
    [
        ["lecture-ladder", "--rungs", "gpt2-init", "--accelerator", "gpu"],
        ["precision-ladder", "--rungs", "gpu-fp32,gpu-tf32,gpu-bf16,gpu-bf16-compile"],
    ],
    ids=["lecture", "precision"],
)
@pytest.mark.timeout(400)
def test_published_losses(command, cuda, tinyshakespeare, monkeypatch):
    monkeypatch.setenv("GPT_LIGHTNING_DATA", str(tinyshakespeare.parents[1]))
    assert main(["reproduce", *command]) == 0


def test_the_scaler_clips_what_it_has_unscaled(cuda, text_file):
    steps = ["--trainer.max_steps=30", "--trainer.gradient_clip_val=1.0"]
    plain = train("cuda", *steps, "--trainer.precision=32-true", name="plain")
    scaled = train("cuda", *steps, "--trainer.precision=16-mixed", name="scaled")
    # products of 11 significant bits, and a step or two that the scaler skips while it is too large
    assert losses(scaled)[-1] == pytest.approx(losses(plain)[-1], rel=0.1)
    assert max(row.get("optim/grad_norm") or 0.0 for row in scaled) < 100  # null: skipped


def test_muon_learns_what_it_learns_on_a_cpu(device, text_file):
    options = ["--trainer.max_steps=20", "--model.optimizer=muon", "--trainer.precision=32-true"]
    theirs = losses(train("cpu", *options, name="cpu"))
    ours = losses(train(device, *options, name="device"))
    assert ours == pytest.approx(theirs, rel=2e-2)  # Newton-Schulz in bfloat16


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_over_nccl(ranks, strategy, cuda, text_file):
    """A tensor of the CPU in a reduction fails here and nowhere else: validations log a number."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"this machine has {torch.cuda.device_count()} GPU")
    options = [f"--trainer.strategy={strategy}", f"--trainer.devices={ranks}"]
    options += ["--trainer.max_steps=8"]
    options += ["--trainer.val_check_interval=4", "--trainer.check_val_every_n_epoch=null"]
    command = [sys.executable, "-m", "gpt_lightning", "fit", *TINY, *options, "--run_name=ranks"]
    command += ["--trainer.accelerator=cuda", "--trainer.precision=32-true"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([row for row in rows("ranks") if "val/loss" in row]) == 2
    single = train("cpu", "--trainer.max_steps=1", "--trainer.precision=32-true", name="single")
    if ranks == 1:
        assert losses(rows("ranks"))[0] == pytest.approx(losses(single)[0], rel=1e-4)


class Waits(L.Callback):
    """Counts what CUDA reports as a synchronization, by file and line, from step 10 on."""

    def __init__(self) -> None:
        self.seen: collections.Counter[str] = collections.Counter()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if trainer.global_step == 10:
            torch.cuda.set_sync_debug_mode("warn")

    def on_train_end(self, trainer, pl_module) -> None:
        torch.cuda.set_sync_debug_mode("default")

    def show(self, message, category, filename, line, *args) -> None:
        if "called a synchronizing" in str(message):  # not in the note that this may not see all
            self.seen[f"{Path(filename).name}:{line}"] += 1


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_no_step_waits_for_the_device(optimizer, precision, cuda, text_file, monkeypatch):
    waits = Waits()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        monkeypatch.setattr(warnings, "showwarning", waits.show)
        options = [f"--model.optimizer={optimizer}", f"--trainer.precision={precision}"]
        options += ["--trainer.max_steps=30", "--trainer.limit_val_batches=0"]
        options += ["--trainer.logger=false", "--trainer.enable_checkpointing=false"]
        options += ["--trainer.accelerator=cuda", "--trainer.log_every_n_steps=1000"]
        fit.run_cli(["fit", *TINY, *options], callbacks=[waits])
    assert not waits.seen


@pytest.mark.parametrize("compiled", ["false", "true"])
@pytest.mark.timeout(400)
def test_a_killed_run_is_the_same_run_with_deterministic(compiled, device, text_file):
    config = Path("killed.yaml")
    config.write_text("trainer: {deterministic: true, val_check_interval: 6}\n")
    # cuBLAS asks for a workspace of its own where PyTorch is to be deterministic
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    command = [sys.executable, "-m", "gpt_lightning", "doctor", "--resume", "--config", str(config)]
    options = [option for option in TINY if not option.startswith("--model.compile")]
    options += [f"--model.compile={compiled}", f"--trainer.accelerator={device}"]
    options += ["--trainer.check_val_every_n_epoch=null"]
    done = subprocess.run(
        [*command, "--steps=12", "--kills=2", "--seed=1", *options],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
