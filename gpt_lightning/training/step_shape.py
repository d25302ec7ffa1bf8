"""StepShape: the tokens of an optimizer step as micro-batches, and equal steps of other batches.

A step has B sequences x T tokens x k micro-batches x W ranks. `data.tokens_per_step` sets the
product, and k follows: with a batch size that fits another machine's memory the optimizer sees the
same step. 524,288 tokens a step at T = 1,024 are k = 16 for B = 32 on one device, 2 on eight.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

from gpt_lightning.errors import UserError


@dataclass(frozen=True)
class StepShape:
    """Sizes of an optimizer step.

    Attributes:
        batch_size: Sequences B a micro-batch and rank.
        block_size: Tokens T a sequence.
        accumulate: Micro-batches k a step.
        ranks: Processes W.
    """

    batch_size: int
    block_size: int
    accumulate: int
    ranks: int

    @property
    def tokens(self) -> int:
        """Tokens a step, B T k W."""
        return self.sequences * self.block_size * self.ranks

    @property
    def sequences(self) -> int:
        """Sequences a step and rank, B k."""
        return self.batch_size * self.accumulate

    def with_batch_size(self, batch_size: int) -> "StepShape":
        """Return a step of as many tokens; batch_size must divide `sequences`."""
        assert self.sequences % batch_size == 0
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


def accumulation(tokens_per_step: int, batch_size: int, block_size: int, ranks: int) -> int:
    """Return the micro-batches k of a step.

    Args:
        tokens_per_step: Tokens a step, B T k W.
        batch_size: Sequences B a micro-batch and rank.
        block_size: Tokens T a sequence.
        ranks: Processes W.

    Raises:
        UserError: k is no whole number; names the nearest valid values.
    """
    micro_batch = batch_size * block_size * ranks
    if tokens_per_step % micro_batch == 0:
        return tokens_per_step // micro_batch
    whole = tokens_per_step // micro_batch
    valid = " or ".join(str(k * micro_batch) for k in (whole, whole + 1) if k)
    sequences, rest = divmod(tokens_per_step, block_size * ranks)
    divisor = "" if rest else f", or data.batch_size to {largest_divisor(sequences, batch_size)}"
    raise UserError(
        f"data.tokens_per_step {tokens_per_step} is no multiple of the {micro_batch} tokens of a "
        f"micro-batch ({batch_size} sequences x {block_size} tokens x {ranks} ranks): "
        f"set it to {valid}{divisor}"
    )


def check_accumulation(accumulate: int, interval: Any) -> None:
    """Check that no validation, and no checkpoint, falls into the middle of an optimizer step.

    The checkpoint would lose the gradients of the micro-batches so far, and their time would count
    as validation.

    Args:
        accumulate: Micro-batches a step.
        interval: Trainer's val_check_interval (an int counts micro-batches) or val_check_batch.

    Raises:
        UserError: names the nearest multiple.
    """
    if accumulate < 1:
        raise UserError(f"trainer.accumulate_grad_batches is {accumulate}; it must be at least 1")
    if isinstance(interval, int) and interval % accumulate:
        raise UserError(
            f"trainer.val_check_interval {interval} counts micro-batches and is no multiple of "
            f"trainer.accumulate_grad_batches {accumulate}: "
            f"set it to {max(1, round(interval / accumulate)) * accumulate}"
        )


def options_for(
    old: StepShape,
    batch_size: int,
    *,
    follows: bool,
    eval_batch_size: int,
    val_check_interval: Any = None,
    limit_val_batches: Any = None,
) -> list[str]:
    """Return the options of `fit` that change the micro-batch and nothing else.

    Args:
        old: Current step.
        batch_size: New batch size, a divisor of `old.sequences`.
        follows: True if data.tokens_per_step is set, so that the accumulation follows.
        eval_batch_size: Current value; the new one is no larger than `batch_size`.
        val_check_interval: Setting of the Trainer; an int counts micro-batches.
        limit_val_batches: Setting of the Trainer; an int counts batches.
    """
    new = old.with_batch_size(batch_size)
    own_eval = eval_batch_size != old.batch_size  # else it equals data.batch_size
    new_eval = min(eval_batch_size, batch_size) if own_eval else batch_size
    found = {"data.batch_size": batch_size}
    if not follows:
        found["trainer.accumulate_grad_batches"] = new.accumulate
    if own_eval and new_eval != eval_batch_size:
        found["data.eval_batch_size"] = new_eval
    if type(val_check_interval) is int and new.accumulate != old.accumulate:
        found["trainer.val_check_interval"] = val_check_interval * new.accumulate // old.accumulate
    if type(limit_val_batches) is int and limit_val_batches and new_eval != eval_batch_size:
        found["trainer.limit_val_batches"] = -(-limit_val_batches * eval_batch_size // new_eval)
    return [f"--{key} {value}" for key, value in found.items()]
