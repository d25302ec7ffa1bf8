"""Optimizer steps: their shape, the moment between two of them, and accessors of the Trainer.

A step has B sequences x T tokens x k micro-batches x W ranks. `data.tokens_per_step` sets the
product, and k follows: with a batch size that fits another machine's memory the optimizer sees the
same step. 524,288 tokens per step at T = 1,024 are k = 16 for B = 32 on one device, 2 on eight.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from lightning import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.trainer.states import TrainerFn

from gpt_lightning.data.loader import Batch, limited
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import program
from gpt_lightning.runs.logger import RunLogger
from gpt_lightning.training.sharding import ShardedStrategy

# settings that need less memory, if a batch of one sequence does not fit
LESS_MEMORY = (
    "--model.config.checkpointing true, --model.config.loss_chunk 256, a smaller "
    "--data.block_size, or a smaller model"
)
CallbackT = TypeVar("CallbackT", bound=Callback)


# ---- the shape of a step ------------------------------------------------------------------------


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


# ---- a step in less memory ----------------------------------------------------------------------


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


# ---- between two steps --------------------------------------------------------------------------


class BetweenSteps:
    """Training loader that calls a function before it reads each batch.

    Lightning asks the loader for a batch only when all work on the last one is done, and it has no
    hook at that moment: its own hooks run before the update, before the validation or before the
    metrics are written. The sequence of one micro-batch is

        next(loader)             -> hook(): RunCheckpoint saves or stops here, if it is time to
          inner loader              reads the batch; its position moves by one batch
        on_train_batch_start
        training_step, backward     and the optimizer's step at the last micro-batch of a step
        on_train_batch_end          metrics are logged and written
        validation, if it is due    on_validation_end: the loss for the checkpoint's file name
        next(loader)             -> hook(): nothing is in flight, no further batch has been read

    A checkpoint that is saved in hook() is therefore the run after `step` whole steps: the position
    of the loader, the weights, the optimizer and the metrics files agree, and a resume reads the
    very next batch. docs/resume.md states the law.

    Lightning needs `__len__` (a resume through a loader without a length skips a batch) and the two
    state_dict methods (checkpoints hold what they return); they are those of the inner loader, if
    it has them. A resume through another one starts its epoch from the first batch.

    Args:
        loader: Loader of training batches, ours or a subclass's own.
        hook: Function to call before each batch is read; False ends the batches.
    """

    def __init__(self, loader: Any, hook: Callable[[], bool]):
        self.loader, self.hook = loader, hook
        if hasattr(loader, "state_dict"):
            self.state_dict, self.load_state_dict = loader.state_dict, loader.load_state_dict

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while self.hook() and (batch := next(batches, None)) is not None:
            yield batch


def with_hook(make_loader: Callable[[], Any], trainer: Trainer) -> Any:
    """Return the loader that a subclass's train_dataloader makes, with BetweenSteps around it."""
    loader = make_loader()
    if isinstance(loader, BetweenSteps) or not hasattr(loader, "__iter__"):  # or for Lightning
        return loader
    return BetweenSteps(loader, functools.partial(call_between_batches, trainer))


class StepCallback(Callback):
    """Callback with hooks at moments for which Lightning has none."""

    def before_batches(self, trainer: Trainer) -> None:
        """Act between two micro-batches, before `between_batches` of any callback.

        All ranks enter `between_batches` with what is exchanged here.
        """

    def between_batches(self, trainer: Trainer) -> None:
        """Act between two micro-batches, when nothing is in flight; see BetweenSteps."""

    def before_validation(self, trainer: Trainer) -> None:
        """Act before the loader of a validation, which follows a step, starts its workers."""


def step_callbacks(trainer: Trainer) -> list[StepCallback]:
    """Return the callbacks with hooks between two steps, in order."""
    run: Any = trainer
    return [callback for callback in run.callbacks if isinstance(callback, StepCallback)]


def call_between_batches(trainer: Trainer) -> bool:
    """Call `before_batches`, then `between_batches`, of every StepCallback, in order.

    Returns:
        False if the run stops here because trainer.should_stop was set.
    """
    for callback in step_callbacks(trainer):
        callback.before_batches(trainer)
    for callback in step_callbacks(trainer):
        callback.between_batches(trainer)
    if not stop_due(trainer):
        return True
    trainer.should_stop = True  # Lightning ends a run without a further batch
    return False


def stop_due(trainer: Trainer) -> bool:
    """Return whether the run stops now, between two steps, for trainer.should_stop.

    Lightning obeys should_stop after any micro-batch, and validates once more. A resume would then
    lose a part of a step, and have a row that an uninterrupted run does not have. Therefore
    GPTModule stores the request, and the run stops here.
    """
    requested = getattr(trainer.lightning_module, "stop_requested", False)
    if not requested or not at_step_boundary(trainer):
        return False
    loop: Any = trainer.fit_loop
    epochs, steps = loop.epoch_progress.current.processed, trainer.global_step
    return epochs >= (loop.min_epochs or 0) and steps >= (loop.min_steps or 0)


def stop_reason(trainer: Trainer) -> str:
    """Return the name of the setting or callback that has set trainer.should_stop."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, Timer):
            remaining_s = callback.time_remaining()
            if remaining_s is not None and remaining_s <= 0:
                return "max_time"
        if isinstance(callback, EarlyStopping) and callback.stopping_reason_message:
            return f"EarlyStopping: {callback.stopping_reason_message}"
    return "trainer.should_stop"


# ---- accessors for Trainer attributes that Lightning leaves untyped ----------------------------


def total_steps(trainer: Trainer, batches: float | None = None) -> int:
    """Return the optimizer steps of the whole run; 0 if it has no end.

    Trainer.estimated_stepping_batches drops the loader's state on a resume with max_epochs.

    Args:
        trainer: Trainer with max_steps, max_epochs or both.
        batches: Micro-batches of an epoch; None: those of the loader that is set up.
    """
    ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        epoch = trainer.num_training_batches if batches is None else batches
        ends.append(trainer.max_epochs * (int(epoch) // trainer.accumulate_grad_batches))
    return min(ends, default=0)


def at_log_step(trainer: Trainer, step: int) -> bool:
    """Return whether an optimizer step is logged (1 is the first)."""
    every = trainer.log_every_n_steps  # type: ignore[attr-defined]  # 0 logs nothing
    return every > 0 and step % every == 0


def at_step_boundary(trainer: Trainer) -> bool:
    """Return whether the optimizer has used all micro-batches so far."""
    return not getattr(trainer.lightning_module, "micro_batches", 0)


def unfinished_micro_batches(trainer: Trainer) -> int:
    """Return the micro-batches that were read since the last optimizer step ended."""
    batches: Any = trainer.fit_loop.epoch_loop.batch_progress.current
    counted = getattr(trainer.lightning_module, "micro_batches", 0)
    return counted or batches.ready - batches.processed


def find_callback(trainer: Trainer, kind: type[CallbackT]) -> CallbackT | None:
    """Return the run's first callback of a class, or None."""
    run: Any = trainer
    return next((c for c in run.callbacks if isinstance(c, kind)), None)


def set_logged_steps(trainer: Trainer, steps: int) -> None:
    """Set Lightning's counter of steps for loggers.

    After a resume from the end of a run this counter is one too high, and rows would be logged a
    step early (training_epoch_loop.py, reset). An evaluation does not restore it.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = steps


def run_logger(trainer: Trainer) -> RunLogger | None:
    """Return the owner of the run folder; None with a Trainer that has no RunLogger."""
    return next((logger for logger in trainer.loggers if isinstance(logger, RunLogger)), None)


def run_folder(trainer: Trainer) -> Path | None:
    """Return the run folder, if any."""
    return getattr(run_logger(trainer), "folder", None)


def is_fitting(trainer: Trainer) -> bool:
    """Return whether the command is `fit`, also while it validates."""
    return trainer.state.fn == TrainerFn.FITTING


def is_sharded(trainer: Trainer) -> bool:
    """Return whether ranks have shards of the weights (sharding.py), not all of them."""
    return isinstance(getattr(trainer, "strategy", None), ShardedStrategy)
