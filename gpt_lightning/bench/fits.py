"""Runs of `fit` on random tokens, for benches that measure whole training runs."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.data.dataset import random_dataset
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import device_kind
from gpt_lightning.hardware.precision import product_dtype, resolve_precision
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.tables.worker import SkippedError
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import RunRecorder, RunTimings
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.memory_advice import options_for
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.process import quiet_lightning
from gpt_lightning.training.steps import StepShape, accumulation
from gpt_lightning.training.trainer import Trainer

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
    quiet_lightning()
    config = training.training_parser().parse_args(["fit", *options]).fit
    resolve_precision(config.trainer)
    return config


def size_options(size: str) -> list[str]:
    """Return the options of `fit` for a size of configs/gpu."""
    return ["--config=gpt2_124m", f"--config=gpu/gpt2_{size}", "--data.seed=1"]


def step_of(config: Any) -> StepShape:
    """Return the optimizer step of a parsed configuration of `fit`.

    Raises:
        UserError: The machine has no such device, or no such step is possible.
    """
    trainer, data = config.trainer, config.data
    machine = {name: trainer[name] for name in ("accelerator", "devices", "num_nodes")}
    probe = Trainer(**machine, logger=False, enable_checkpointing=False)
    ranks = probe.num_devices * probe.num_nodes
    T = data.block_size or config.model.config.block_size
    k = trainer.accumulate_grad_batches
    if data.tokens_per_step is not None:
        k = accumulation(data.tokens_per_step, data.batch_size, T, ranks)
    return StepShape(data.batch_size, T, k, ranks)


def batch_options(config: Any, step: StepShape, batch: int) -> list[str]:
    """Return the options of `fit` that split its step into other micro-batches.

    Args:
        config: Parsed configuration of `fit`.
        step: Its step.
        batch: Sequences of a micro-batch, a divisor of those of the step.
    """
    return options_for(step, batch, config.data, config.trainer)


def plain_training(config: Any, step: StepShape) -> dict[str, Any]:
    """Return the arguments of `train` that a configuration sets, as plain values.

    Raises:
        UserError: Settings of the model contradict each other.
    """
    model = config.model.as_dict()
    if model["config"]["vocab_size"] is None:
        data = TokenDataModule(**config.data.as_dict())
        data.prepare_data()
        model["config"]["vocab_size"] = data.vocab_size
    # memory and time depend neither on weights nor on rates, and a run is shorter than a warm-up
    model |= {"init_from": None, "warmup_steps": 0}
    GPTModule(**model)  # raises here, not in a row
    return {
        "device": device_kind(str(config.trainer.accelerator)),
        "precision": str(config.trainer.precision or "32-true"),
        "model": model | {"betas": list(model["betas"])},
        "clip": [config.trainer.gradient_clip_val, config.trainer.gradient_clip_algorithm],
        "accumulate": step.accumulate,
    }


def train(
    batches: Any, device: str, precision: Any, model: dict[str, Any], clip: Any, accumulate: int
) -> GPTModule:
    """Train on batches, a whole number of steps, with Trainer and GPTModule alone.

    Args:
        batches: Batches on the device, with a length.
        device: Accelerator of the Trainer.
        precision: Precision of the Trainer.
        model: Arguments of GPTModule.
        clip: Value and algorithm of gradient clipping.
        accumulate: Micro-batches per step.
    """
    quiet_lightning()
    trainer = Trainer(
        accelerator=device,
        precision=precision,
        max_steps=len(batches) // accumulate,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip[0],
        gradient_clip_algorithm=clip[1],
        **TRAINING_ALONE,
    )
    module = GPTModule(**model)
    trainer.fit(module, train_dataloaders=batches)
    return module


def dtype_of(config: Any, device: torch.device) -> str:
    """Return the dtype of a configuration's matrix products, one of DTYPES.

    Raises:
        SkippedError: No bench has such a training beside `fit`.
    """
    precision = str(config.trainer.precision or "32-true")
    if precision not in ("bf16-mixed", "16-mixed", "32-true"):
        raise SkippedError(f"trainer.precision {precision} is a mode of `fit` alone")
    return product_dtype(precision, config.model.matmul_precision, device)


def random_token_options(
    bench: str, vocab_size: int | None, steps: int, warmup: int, n_tokens: int = 2_000_000
) -> list[str]:
    """Return options of `fit` that train on random tokens and nothing else.

    Args:
        bench: Name of the bench, for the error message.
        vocab_size: Vocabulary of the model.
        steps: Measured optimizer steps.
        warmup: Optimizer steps before.
        n_tokens: Tokens of the dataset.

    Raises:
        UserError: The vocabulary is left to the data.
    """
    if vocab_size is None:
        raise UserError(
            f"model.config.vocab_size is null, but bench {bench} reads random tokens: "
            "give a number, e.g. --model.config.vocab_size 65"
        )
    return [
        f"--data.dataset={random_dataset(Path('data'), vocab_size, n_tokens)}",
        "--data.corpus=null",
        "--data.text_file=null",
        f"--trainer.max_steps={warmup + steps}",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_checkpointing=false",
        "--samples.max_new_tokens=0",
        f"--speed.warmup_steps={warmup}",
    ]


def timed_fit(options: list[str]) -> RunTimings:
    """Run `fit` in a temporary folder and return its timings, which are SpeedMonitor's."""
    recorder = RunRecorder(lambda seen: None, each_step=False)
    with tempfile.TemporaryDirectory() as folder:
        training.run_cli(["fit", *options], callbacks=[recorder], folder=Path(folder))
    assert recorder.speed is not None
    return recorder.speed


def stall_note(speed: RunTimings) -> str:
    """Return the note of a row that left stalls out."""
    return f"{speed.stalls} stalls left out" if speed.stalls else ""
