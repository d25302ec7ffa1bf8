"""Options that need less memory for the same optimizer step, for the out-of-memory error."""

from typing import Any

import lightning as L

from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.parsing import program
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.steps import StepShape, largest_divisor


def out_of_memory_line(
    command: str, trainer: L.Trainer, module: GPTModule, data: TokenDataModule
) -> str:
    """Return the error message: where memory ran out, and options that need less.

    Args:
        command: fit, validate, test or predict.
        trainer: Trainer of the run that ended.
        module: Module of the run.
        data: Data of the run.
    """
    if command != "fit":
        batch = data.eval_batch_size
        less = f"set --data.eval_batch_size {batch // 2}"
        fix = less if batch > 1 else "set a smaller --data.block_size"
        return f"out of memory with {batch} sequences per batch: {fix}"
    step = StepShape(
        data.settings.batch_size,
        data.block_size,
        trainer.accumulate_grad_batches,
        trainer.num_devices * trainer.num_nodes,
    )
    options = options_for(step, smaller_batch(step.batch_size), data.settings, trainer)
    if step.batch_size == 1:
        device = trainer.strategy.root_device.type
        options = memory_options(module.config, step.block_size, device)
    if trainer.global_step and options:
        options.append("--resume auto")
    if trainer.global_step and step.batch_size > 1:  # the checkpoint has other micro-batches
        options.append("--data.allow_changes true")
    way_out = (
        f"compute the same {step.tokens:,} tokens per step with {' '.join(options)}"
        if options
        else "set a smaller --data.block_size or take a smaller model"
    )
    return (
        f"out of memory in step {trainer.global_step + 1} with {step.batch_size} x "
        f"{step.block_size} tokens per micro-batch: {way_out}; "
        f"{program()} bench fit-batch finds the largest batch that fits"
    )


def options_for(old: StepShape, batch_size: int, data: Any, trainer: Any) -> list[str]:
    """Return the options of `fit` that change the micro-batch and nothing else.

    Args:
        old: Current step.
        batch_size: New batch size, a divisor of `old.sequences`.
        data: Settings of the data; with tokens_per_step the accumulation follows.
        trainer: Trainer or its settings; val_check_interval counts micro-batches, and
            limit_val_batches batches, if they are integers.
    """
    eval_batch_size = data.eval_batch_size or old.batch_size
    val_check_interval = getattr(trainer, "val_check_interval", None)
    limit_val_batches = getattr(trainer, "limit_val_batches", None)
    new = old.with_batch_size(batch_size)
    own_eval = eval_batch_size != old.batch_size  # else it equals data.batch_size
    new_eval = min(eval_batch_size, batch_size) if own_eval else batch_size
    found = {"data.batch_size": batch_size}
    if data.tokens_per_step is None:
        found["trainer.accumulate_grad_batches"] = new.accumulate
    if own_eval and new_eval != eval_batch_size:
        found["data.eval_batch_size"] = new_eval
    if type(val_check_interval) is int and new.accumulate != old.accumulate:
        found["trainer.val_check_interval"] = val_check_interval * new.accumulate // old.accumulate
    if type(limit_val_batches) is int and limit_val_batches and new_eval != eval_batch_size:
        found["trainer.limit_val_batches"] = -(-limit_val_batches * eval_batch_size // new_eval)
    return [f"--{key} {value}" for key, value in found.items()]


def smaller_batch(batch_size: int) -> int:
    """Return half the sequences, or the largest divisor below; 1 for 1."""
    return largest_divisor(batch_size, max(1, batch_size // 2))


def memory_options(config: GPTConfig, block_size: int, device: str) -> list[str]:
    """Return the switches that are off and would save memory on a device: cuda, mps or cpu."""
    options = []
    if config.loss_chunk is None:
        options.append(f"--model.config.loss_chunk {max(1, block_size // 4)}")
    if not config.checkpointing and not (config.dropout and device == "mps"):
        options.append("--model.config.checkpointing true")
    return options
