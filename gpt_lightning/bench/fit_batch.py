"""The largest micro-batch of a configuration that fits into memory, with the same tokens per step.

batch: sequences of a micro-batch on one rank. A trial runs optimizer steps of `fit` on random
tokens. Where the configuration accumulates, a step has two micro-batches, because the gradients of
the first exist while the second makes its activations. Trials use one device: memory that several
devices add, such as DDP's buckets of the gradients' size, is not included.

memory: torch.cuda.max_memory_reserved on CUDA, which is what the allocator has taken from the
device; torch.mps.driver_allocated_memory on MPS; highest resident memory of the trial's own process
on a CPU. limit: memory limit of a trial on a CPU, which Linux alone enforces.

The search begins at the configured batch, doubles or halves it, then halves the gap until it is an
eighth. The settings keep the configuration's tokens per step, so that their batch divides the
sequences of a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean
from types import SimpleNamespace

import torch
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench import fits, timing
from gpt_lightning.bench.memory_meter import limit_memory
from gpt_lightning.bench.step import random_batch
from gpt_lightning.errors import UserError
from gpt_lightning.hardware.device import peak_memory_gib
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option
from gpt_lightning.tables.rows import (
    Count,
    HiddenHundredths,
    Hundredths,
    Measured,
    Text,
    Values,
    Whole,
)
from gpt_lightning.tables.sweep import Bench, Sweep, read_options
from gpt_lightning.training.step_shape import LESS_MEMORY, largest_divisor, options_for

SHARE = 0.8  # default limit of a trial: share of the machine's available memory


@dataclass
class BatchRow(Measured):
    """Trial of a micro-batch."""

    device: Text
    precision: Text
    batch: Count
    context: Count
    accumulate: Count
    peak_memory_gib: Hundredths
    limit_gib: HiddenHundredths
    micro_batch_ms: Hundredths
    tokens_per_sec: Whole


BENCH = Bench(
    measure="gpt_lightning.bench.fit_batch:measure_batch",
    tables={"rows": BatchRow},
    options=(
        options.optional("config", "Configuration of `fit`.", str),
        options.optional(
            "limit_gib",
            f"Memory limit of a trial on a CPU, in GiB; null: {SHARE:.0%} of the free memory.",
            options.PositiveFinite,
        ),
        options.optional("max_batch", "null: the sequences of a step."),
        Option("steps", 2, "Measured steps of a trial, after the first.", type=PositiveInt),
    ),
    takes_fit_options=True,
)


def run(argv: list[str]) -> int:
    """Run `bench fit-batch ...`.

    Returns:
        0: Settings were found; 1: not one sequence fits.

    Raises:
        UserError: Options contradict each other, or a trial failed for another reason than memory.
    """
    args, _ = read_options(BENCH, argv[2:])
    if args.config is None:
        raise UserError("give bench fit-batch --config FILE: the configuration to fit")
    config = fits.parse_fit([f"--config={args.config}", *args.fit_options])
    step = fits.step_of(config)
    trial = fits.plain_training(config, step) | {"accumulate": min(2, step.accumulate)}
    trial |= {"context": step.block_size, "steps": args.steps, "limit_gib": args.limit_gib}
    trial |= {"device": trial["trainer"]["accelerator"], "precision": trial["trainer"]["precision"]}
    most = args.max_batch or step.sequences
    first = min(step.batch_size, most)
    sweep = Sweep(BENCH, [trial | {"batch": first}], argv, args)

    def enough(batch: int) -> bool:
        row = sweep.measure(trial | {"batch": batch})
        if row.status not in ("ok", "out of memory"):
            raise UserError(
                f"the trial of {batch} sequences failed ({row.status}: {row.note}), not for lack "
                "of memory: correct the cause, then continue with --resume"
            )
        return row.status == "ok"

    largest, refused = search(enough, most, first)
    row = sweep.rows[0]
    lines = [f"not one sequence fits ({row.status}, {row.note}): try {LESS_MEMORY}"]
    if largest:
        refusal = f"; {refused} does not" if refused else ""
        batch, tokens = largest_divisor(step.sequences, largest), step.block_size
        lines = [
            f"largest     {largest} sequences x {tokens} tokens per micro-batch fit{refusal}",
            f"settings    {' '.join(options_for(step, batch, config.data, config.trainer))}",
            f"step        {step.with_batch_size(batch)}",
        ]
    print("\n" + "\n".join(lines))
    sweep.finish(lines)
    return int(largest == 0)


def search(fits: Callable[[int], bool], most: int, first: int = 1) -> tuple[int, int | None]:
    """Double or halve the first batch, then halve the gap until it is an eighth.

    Args:
        fits: Function that tries a batch; it is called once for each batch.
        most: Largest useful batch.
        first: Batch to begin with.

    Returns:
        The largest batch that fits, or 0, and the smallest batch that does not, if any.
    """
    good, bad, batch = 0, None, min(first, most)
    while good < batch < (bad or most + 1):
        if fits(batch):
            good, batch = batch, min(2 * batch, most)
        else:
            bad, batch = batch, batch // 2
    while bad is not None and bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad


# ---- in the trial's own process ------------------------------------------------------------------


def measure_batch(row: SimpleNamespace) -> Values:
    """Train some optimizer steps of a micro-batch on random tokens."""
    device = torch.device(row.trainer["accelerator"])
    limit = limit_memory(device, row.limit_gib, SHARE)
    torch.manual_seed(0)
    data = random_batch(row.batch, row.context, device, row.model["config"]["vocab_size"])
    # the first step compiles; the last is not measured, because no request for a batch ends it
    batches = timing.TimedBatches(data, (row.steps + 2) * row.accumulate)
    fits.train(batches, row.model, row.trainer, row.accumulate)
    measured = batches.milliseconds()[row.accumulate : (row.steps + 1) * row.accumulate]
    milliseconds = fmean(measured)
    return {
        "peak_memory_gib": peak_memory_gib(device, reserved=True),
        "limit_gib": limit,
        "micro_batch_ms": milliseconds,
        "tokens_per_sec": row.batch * row.context / milliseconds * 1e3,
    }
