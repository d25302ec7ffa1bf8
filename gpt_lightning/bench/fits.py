"""Runs of `fit` on random tokens, for benches that measure whole training runs."""

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gpt_lightning.bench.step import compiled_graphs
from gpt_lightning.data.dataset import random_dataset
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, yaml_beside
from gpt_lightning.hardware.device import device_kind
from gpt_lightning.hardware.precision import product_dtype, resolve_precision
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.tables.worker import SkippedError
from gpt_lightning.training import fit as training
from gpt_lightning.training.callbacks.recorder import RunRecorder
from gpt_lightning.training.command import quiet_lightning
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.step_shape import StepShape, accumulation
from gpt_lightning.training.trainer import Trainer

TRAINING_ALONE = yaml_beside(__file__)  # arguments of a Trainer that does nothing else


def parse_fit(options: list[str]) -> Any:
    """Return the configuration that `fit` makes of options."""
    options = resolve_configs(options)
    quiet_lightning()
    config = training.training_parser().parse_args(["fit", *options]).fit
    resolve_precision(config.trainer)
    return config


def row_options(row: SimpleNamespace) -> list[str]:
    """Return the options of `fit` for a row: its size, its `fit_options` and its device."""
    machine = [f"--trainer.accelerator={row.device}", "--trainer.devices=1"]
    return [*size_options(row.size), *row.fit_options, *machine]


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


def plain_training(config: Any, step: StepShape) -> Fields:
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
    trainer = {
        "precision": str(config.trainer.precision or "32-true"),
        "accelerator": device_kind(str(config.trainer.accelerator)),
        "gradient_clip_val": config.trainer.gradient_clip_val,
        "gradient_clip_algorithm": config.trainer.gradient_clip_algorithm,
    }
    model["betas"] = list(model["betas"])
    return {"model": model, "trainer": trainer, "accumulate": step.accumulate}


def train(
    batches: Any, model: GPTModule | Fields, trainer: Fields, accumulate: int = 1
) -> GPTModule:
    """Train on batches, a whole number of steps, with Trainer and GPTModule alone.

    Args:
        batches: Batches on the device, with a length.
        model: Module, or the arguments of one.
        trainer: Arguments of the Trainer.
        accumulate: Micro-batches per step.
    """
    quiet_lightning()
    module = GPTModule(**model) if isinstance(model, dict) else model
    steps = {"max_steps": len(batches) // accumulate, "accumulate_grad_batches": accumulate}
    Trainer(**TRAINING_ALONE | steps | trainer).fit(module, train_dataloaders=batches)
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
    vocab_size: int | None, steps: int, warmup: int, n_tokens: int = 2_000_000
) -> list[str]:
    """Return options of `fit` that train on random tokens and nothing else.

    Args:
        vocab_size: Vocabulary of the model.
        steps: Measured optimizer steps.
        warmup: Optimizer steps before.
        n_tokens: Tokens of the dataset.

    Raises:
        UserError: The vocabulary is left to the data.
    """
    if vocab_size is None:
        raise UserError("model.config.vocab_size is null, but random tokens need a number")
    return [
        f"--data.dataset={random_dataset(Path('data'), vocab_size, n_tokens)}",
        "--data.corpus=null",
        "--data.text_file=null",
        f"--trainer.max_steps={warmup + steps}",
        "--trainer.limit_val_batches=0",
        "--trainer.enable_checkpointing=false",
        "--samples.max_new_tokens=0",
        "--progress.plain_every_n_steps=1000000",  # no lines where there is no bar
        f"--speed.warmup_steps={warmup}",
    ]


def timed_fit(options: list[str]) -> Fields:
    """Run `fit` in a temporary folder; return SpeedMonitor's times, and facts of the run."""
    recorder = RunRecorder(lambda seen: None, each_step=False)
    graphs = compiled_graphs()
    with tempfile.TemporaryDirectory() as folder:
        training.run_cli(["fit", *options], callbacks=[recorder], folder=Path(folder))
    speed = recorder.speed
    assert speed is not None
    return {
        **{name: getattr(speed, name) for name in ("step_ms", "tokens_per_sec", "mfu")},
        "warmup_s": speed.seconds.get("compile and warm-up"),
        "graphs": compiled_graphs() - graphs,
        "attention": speed.attention,
        "note": f"{speed.stalls} stalls left out" if speed.stalls else "",
    }
