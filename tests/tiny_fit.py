"""A `fit` that takes a second, on the command line and in Python: the smallest GPT on the CPU."""

import json
from pathlib import Path
from typing import Any

import lightning as L

from gpt_lightning.cli import main
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training.datamodule import TokenDataModule

TINY_MODEL = [
    "--model.config.n_layer=1",
    "--model.config.n_head=1",
    "--model.config.n_embd=8",
    "--model.config.block_size=16",
    "--model.config.vocab_size=null",
    "--model.schedule=constant",
    "--trainer.accelerator=cpu",
    "--trainer.limit_val_batches=1",
    "--samples.max_new_tokens=0",
]
# in a folder with the fixture `text_file`
TINY_FIT = [*TINY_MODEL, "--data.text_file=text.txt", "--data.tokenizer=char"]
TINY_RUN = [
    *TINY_FIT,
    "--trainer.val_check_interval=4",
    "--trainer.check_val_every_n_epoch=null",
    "--run_name=run",
]
RUN = Path("lightning_logs/run/version_0")


def tiny_config(n_embd: int = 8) -> GPTConfig:
    return GPTConfig(n_layer=1, n_head=1, n_embd=n_embd, block_size=16, vocab_size=None)


def tiny_data(text_file: Path, **settings: Any) -> TokenDataModule:
    known = {"data_dir": str(text_file.parent), "tokenizer": "char", "batch_size": 4}
    return TokenDataModule(text_file=str(text_file), **known | {"block_size": 16} | settings)


def quiet_trainer(**settings: Any) -> L.Trainer:
    """Trainer on the CPU that prints and saves nothing."""
    parts = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return L.Trainer(accelerator="cpu", **dict.fromkeys(parts, False) | settings)


def fit(steps: int, *args: str) -> int:
    """Train for some steps, each of them logged."""
    options = ["--data.batch_size=4", "--trainer.log_every_n_steps=1"]
    return main(["fit", *TINY_RUN, *options, f"--trainer.max_steps={steps}", *args])


def rows(run: Path | str = RUN) -> list[dict]:
    """Return the rows of the metrics.jsonl of a run: its folder, or its name."""
    folder = Path("lightning_logs", run, "version_0") if isinstance(run, str) else run
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def logged_steps(run: Path | str = RUN) -> list[int]:
    """Return the steps with a training loss."""
    return [row["step"] for row in rows(run) if "train/loss" in row]
