"""`gpt_lightning.fit`: run a configuration from Python."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L

from gpt_lightning.output import lasting_output
from gpt_lightning.parsing import is_number
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.speed import SpeedMonitor, tokens_per_sec
from gpt_lightning.training.fit import default_callbacks, run_cli
from gpt_lightning.training.steps import find_callback, run_folder


@dataclass(frozen=True)
class FitResult:
    """Outcome of a run.

    Attributes:
        steps: Optimizer steps, those before a resume included.
        run_folder: Folder of config.yaml, metrics.jsonl and checkpoints/; None with fast_dev_run.
        best_loss: Lowest validation loss of the run, in nats; None without a validation.
        validation_loss: Validation loss at the end, in nats; None without a validation.
        tokens_per_sec: Rate over all ranks, without warm-up and stalls; None for a shorter run.
    """

    steps: int
    run_folder: Path | None
    best_loss: float | None
    validation_loss: float | None
    tokens_per_sec: float | None


def fit(
    *configs: str | Path | Mapping[str, Any], callbacks: Sequence[L.Callback] = (), **overrides: Any
) -> FitResult:
    """Train as `gpt-lightning fit` does, and return the outcome.

    Example:
        fit("quickstart", {"trainer.max_steps": 100, "model.learning_rate": 1e-3}, run_name="short")

    Args:
        configs: Configurations, by path or by name, and mappings from keys of the command line to
            values. A later one wins.
        callbacks: Objects in addition to the callbacks of every run; config.yaml does not have
            them.
        overrides: Keys and values that win over all configs: run_name, seed_everything, resume,
            ckpt_path, and keys with a dot as `**{"data.batch_size": 8}`.

    Raises:
        UserError: Settings or data are wrong.
        MemoryExhaustedError: The run needs more memory than there is.
    """
    argv = ["fit"]
    for config in (*configs, overrides):
        if isinstance(config, Mapping):
            argv += [f"--{key}={_argument(value)}" for key, value in config.items()]
        else:
            argv.append(f"--config={config}")
    with lasting_output():
        trainer = run_cli(argv, [*default_callbacks("fit"), *callbacks]).trainer
    checkpoint, speed = find_callback(trainer, RunCheckpoint), find_callback(trainer, SpeedMonitor)
    assert checkpoint is not None
    assert speed is not None
    steps, _ = speed.steps()
    loss = trainer.callback_metrics.get("val/loss")
    return FitResult(
        steps=trainer.global_step,
        run_folder=run_folder(trainer),
        best_loss=checkpoint.best_loss if math.isfinite(checkpoint.best_loss) else None,
        validation_loss=None if loss is None else float(loss),
        tokens_per_sec=tokens_per_sec(steps) if steps else None,
    )


def _argument(value: Any) -> str:
    """Return a value as it is typed on the command line."""
    if is_number(value):
        value = value.item()
    return str(value) if isinstance(value, str | Path) else json.dumps(value)
