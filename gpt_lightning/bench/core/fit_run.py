"""Runs of `fit` on random tokens, for benches that measure whole training runs."""

from pathlib import Path
from typing import Any

from gpt_lightning.data.synthetic import random_dataset
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.precision import resolve_precision
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import RunRecorder, RunTimings

# arguments of a Trainer that trains on one device and does nothing else
TRAINING_ALONE: dict[str, Any] = {
    "devices": 1,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
    "logger": False,
    "num_sanity_val_steps": 0,
    "use_distributed_sampler": False,
}


def parse_fit(options: list[str]) -> Any:
    """Return the configuration that `fit` makes of options."""
    options = resolve_configs(options)
    training.quiet_lightning()
    config = training.training_parser().parse_args(["fit", *options]).fit
    resolve_precision(config.trainer)
    return config


def random_token_options(bench: str, vocab_size: int | None, steps: int, warmup: int) -> list[str]:
    """Return options of `fit` that train on random tokens and nothing else.

    Args:
        bench: Name of the bench, for the error message.
        vocab_size: Vocabulary of the model.
        steps: Measured optimizer steps.
        warmup: Optimizer steps before.

    Raises:
        UserError: The vocabulary is left to the data.
    """
    if vocab_size is None:
        raise UserError(
            f"model.config.vocab_size is null, but bench {bench} reads random tokens: "
            "give a number, e.g. --model.config.vocab_size 65"
        )
    return [
        f"--data.dataset={random_dataset(Path('data'), vocab_size)}",
        "--data.corpus=null",
        "--data.text_file=null",
        f"--trainer.max_steps={warmup + steps}",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_checkpointing=false",
        "--samples.max_new_tokens=0",
        f"--speed.warmup_steps={warmup}",
    ]


def timed_fit(options: list[str], folder: Path) -> RunTimings:
    """Run `fit` in a folder and return its timings, which are SpeedMonitor's."""
    recorder = RunRecorder(lambda seen: None, each_step=False)
    training.run_cli(["fit", *options], callbacks=[recorder], folder=folder)
    assert recorder.speed is not None
    return recorder.speed


def stall_note(speed: RunTimings) -> str:
    """Return the note of a row that left stalls out."""
    return f"{speed.stalls} stalls left out" if speed.stalls else ""
