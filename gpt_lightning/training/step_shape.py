"""The shape of an optimizer step, and a step of the same tokens in less memory.

A step has B sequences x T tokens x k micro-batches x W ranks. `data.tokens_per_step` sets the
product, and k follows: with a batch size that fits another machine's memory the optimizer sees the
same step. 524,288 tokens per step at T = 1,024 are k = 16 for B = 32 on one device, 2 on eight.
"""

import dataclasses
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from lightning import Trainer

from gpt_lightning.data.loader import limited
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import program

# settings that need less memory, if a batch of one sequence does not fit
LESS_MEMORY = (
    "--model.config.checkpointing true, --model.config.loss_chunk 256, a smaller "
    "--data.block_size, or a smaller model"
)


@dataclass(frozen=True)
class StepShape:
    """Sizes of an optimizer step.

    Attributes:
        batch_size: Sequences B per micro-batch and rank.
        block_size: Tokens T per sequence.
        accumulate: Micro-batches k per step.
        ranks: Processes W.
    """

    batch_size: int
    block_size: int
    accumulate: int
    ranks: int

    @property
    def tokens(self) -> int:
        """Tokens per step, B T k W."""
        return self.sequences * self.block_size * self.ranks

    @property
    def sequences(self) -> int:
        """Sequences per step and rank, B k."""
        return self.batch_size * self.accumulate

    def with_batch_size(self, batch_size: int) -> "StepShape":
        """Return a step of as many tokens; batch_size must divide `sequences`."""
        return dataclasses.replace(
            self, batch_size=batch_size, accumulate=self.sequences // batch_size
        )

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens = {self.batch_size} sequences x {self.block_size} tokens "
            f"x {self.accumulate} accumulated x {self.ranks} ranks"
        )


def largest_divisor(n: int, most: int) -> int:
    """Return the largest divisor of n that is at most `most`."""
    return next(d for d in range(min(n, most), 0, -1) if n % d == 0)


def nearest_multiples(number: int, unit: int) -> str:
    """Return the multiples of a unit around a number, as words: "6 or 9"; 0 and 2**63 are not."""
    below = number // unit * unit
    return " or ".join(f"{multiple}" for multiple in (below, below + unit) if 0 < multiple < 2**63)


def accumulation(tokens_per_step: int, batch_size: int, block_size: int, ranks: int) -> int:
    """Return the micro-batches k of a step.

    Args:
        tokens_per_step: Tokens per step, B T k W.
        batch_size: Sequences B per micro-batch and rank.
        block_size: Tokens T per sequence.
        ranks: Processes W.

    Raises:
        UserError: k is no whole number; the message has the nearest valid values.
    """
    micro_batch = batch_size * block_size * ranks
    if tokens_per_step % micro_batch == 0:
        return tokens_per_step // micro_batch
    sequences, rest = divmod(tokens_per_step, block_size * ranks)
    divisor = "" if rest else f", or data.batch_size to {largest_divisor(sequences, batch_size)}"
    raise UserError(
        f"data.tokens_per_step {tokens_per_step} is not a multiple of the {micro_batch} tokens of "
        f"a micro-batch ({batch_size} sequences x {block_size} tokens x {ranks} ranks): "
        f"set it to {nearest_multiples(tokens_per_step, micro_batch)}{divisor}"
    )


def check_accumulation(accumulate: int, interval: Any) -> None:
    """Check that no validation, and no checkpoint, falls into the middle of an optimizer step.

    The checkpoint would lose the gradients of the micro-batches so far, and their time would count
    as validation.

    Args:
        accumulate: Micro-batches per step.
        interval: Trainer's val_check_interval (an int counts micro-batches) or val_check_batch.

    Raises:
        UserError: The interval is no multiple of a step; the message has the nearest multiple.
    """
    if isinstance(interval, str | dict | timedelta):
        raise UserError(
            "trainer.val_check_interval is a time, which may end in the middle of a step: set it "
            f"to a multiple of {accumulate} micro-batches"
        )
    if isinstance(interval, int) and interval % accumulate:
        raise UserError(
            f"trainer.val_check_interval {interval} counts micro-batches and is not a multiple of "
            f"trainer.accumulate_grad_batches {accumulate}: set it to "
            f"{nearest_multiples(interval, accumulate)}"
        )


def check_epoch(trainer: Trainer, batches: int) -> None:
    """Check that an epoch ends with a whole step, and not before a validation.

    Lightning would make a step of the remaining micro-batches of limit_train_batches or
    overfit_batches, and weight each as in a whole step.

    Args:
        trainer: Trainer with its limit. fast_dev_run, which saves no model, is not checked.
        batches: Micro-batches of the whole epoch, a multiple of the accumulation.

    Raises:
        UserError: The epoch is no multiple of a step; the message has the nearest multiples. Or
            it is shorter than trainer.val_check_interval, which counts within epochs.
    """
    run: Any = trainer
    used = limited(batches, run.limit_train_batches)
    steps = run.accumulate_grad_batches
    if used % steps and not run.fast_dev_run:
        key = "overfit" if run.overfit_batches else "limit_train"
        raise UserError(
            f"trainer.{key}_batches {run.limit_train_batches} means epochs of {used} micro-batches,"
            f" and a step has {steps}: set it to {nearest_multiples(used, steps)}"
        )
    interval = getattr(trainer, "val_check_interval", None)  # a time is elsewhere
    within = run.check_val_every_n_epoch is not None and run.limit_val_batches > 0
    if isinstance(interval, int) and within and 0 < used < interval:
        raise UserError(
            f"trainer.val_check_interval {interval} is above the {used} micro-batches of an epoch: "
            f"set --trainer.val_check_interval {used}, or --trainer.check_val_every_n_epoch null, "
            "which counts across epochs"
        )


def out_of_memory_line(command: str, module: Any, data: Any) -> str:
    """Return the error message: where memory ran out, and options that need less.

    Args:
        command: fit, validate, test or predict.
        module: GPTModule of the run that ended.
        data: TokenDataModule of the run.
    """
    if command != "fit":
        batch = data.eval_batch_size
        fix = f"--data.eval_batch_size {batch // 2}" if batch > 1 else "a smaller --data.block_size"
        return f"out of memory with {batch} sequences per batch: set {fix}"
    step, trainer = data.step_shape, module.trainer
    way_out = f"set {LESS_MEMORY}"
    if smaller := step.batch_size // 2:
        batch = largest_divisor(step.batch_size, smaller)
        options = options_for(step, batch, data.settings, trainer)
        if trainer.global_step:  # the checkpoint has other micro-batches
            options += ["--resume auto", "--data.allow_changes true"]
        way_out = f"compute the same {step.tokens:,} tokens per step with {' '.join(options)}"
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
    new = old.with_batch_size(batch_size)
    interval = getattr(trainer, "val_check_interval", None)
    limit, evaluated = getattr(trainer, "limit_val_batches", None), data.eval_batch_size
    found = {"data.batch_size": batch_size}
    if data.tokens_per_step is None:
        found["trainer.accumulate_grad_batches"] = new.accumulate
    old_eval = evaluated or old.batch_size
    new_eval = min(evaluated or batch_size, batch_size)
    if evaluated and new_eval != evaluated:
        found["data.eval_batch_size"] = new_eval
    if type(interval) is int and new.accumulate != old.accumulate:
        found["trainer.val_check_interval"] = interval * new.accumulate // old.accumulate
    if type(limit) is int and limit and new_eval != old_eval:
        found["trainer.limit_val_batches"] = -(-limit * old_eval // new_eval)
    return [f"--{key} {value}" for key, value in found.items()]
