"""Data loader: tokens/s by order, batch and workers, and the limit.

Sequences of 1,024 random tokens of two bytes, from files that were just read or written, so that
the loader is measured and not the disk. A loop takes batches and does nothing with them. tokens/s
derives from the mean times of ten parts of the batches, of which the median is taken, so that one
stall of the machine does not count; the batch time is a median. The first batch includes the
order's permutation and the start of the workers.

The loader writes a token as int64 three times: in the window of T + 1 tokens, as input and as
target. The floor is the time, taken alike, of the work that every loader does: a plain loop over
the mapped file that writes inputs and targets, 16 bytes per token, in one process. Several workers
can beat it.
"""

import itertools
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace

import numpy as np
import torch

from gpt_lightning.bench import timing
from gpt_lightning.data.dataset import load_manifest, random_dataset
from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.windows import DatasetWindows
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import (
    Count,
    Grouped,
    HiddenThousandths,
    Hundredths,
    Measured,
    Text,
    Thousandths,
    Values,
    Whole,
)
from gpt_lightning.tables.sweep import Bench, run_bench

VOCAB_SIZE = 50_257  # GPT-2's: two bytes per token on the disk
SEED = 1337
BLOCK_SIZE = 1024
WARMUP = 20
BATCHES = 300  # measured batches of a row
PARTS = 10  # consecutive parts of the batches
CPU = torch.device("cpu")


@dataclass
class LoaderRow(Measured):
    """Speed of the loader, and the floor."""

    order: Text
    batch_size: Count
    workers: Count
    n_tokens: Grouped
    first_batch_ms: Hundredths
    batch_ms: Thousandths
    batch_p90_ms: Thousandths
    tokens_per_sec: Whole
    floor_ms: HiddenThousandths
    floor_tokens_per_sec: Whole
    floor_share: Hundredths


BENCH = Bench(
    measure="benchmarks.data:measure_data",
    tables={"rows": LoaderRow},
    options=(
        options.words("orders", "order", ("sequential", "shuffled", "random")),
        options.numbers("batch_sizes", "batch_size", "8,32", "Sequences per batch"),
        options.numbers("workers", "workers", "0,1", "Loader processes", least=0),
        options.shared("n_tokens", 50_000_000, "Tokens of each dataset."),
    ),
)


def measure_data(row: SimpleNamespace) -> Values:
    """Take batches as training does, as fast as they come."""
    tokens = row.batch_size * BLOCK_SIZE
    dataset = random_dataset(Path("data") / f"bench-{row.n_tokens}", VOCAB_SIZE, row.n_tokens)
    stream = TokenStream(dataset, load_manifest(dataset), "train")
    windows = WindowOrder(row.order, len(stream), BLOCK_SIZE, SEED, stream.shard_tokens)
    # read_tokens 0: a batch that is read together with others has no time of its own
    loader = TrainLoader(
        DatasetWindows(stream, windows), row.batch_size, num_workers=row.workers, read_tokens=0
    )
    endless = itertools.chain.from_iterable(itertools.repeat(loader))

    def take(timer: timing.StepTimer) -> None:
        with timer.phase("batch"):
            next(endless)

    times, first = timing.record(take, CPU, WARMUP, BATCHES)
    floor = steady_mean(floor_ms(dataset, tokens, BATCHES))
    mean = steady_mean(times["total"])
    return {
        "first_batch_ms": first["total"],
        "batch_ms": median(times["total"]),
        "batch_p90_ms": float(np.quantile(times["total"], 0.9, method="nearest")),
        "tokens_per_sec": tokens / mean * 1e3,
        "floor_ms": floor,
        "floor_tokens_per_sec": tokens / floor * 1e3,
        "floor_share": floor / mean,
    }


def floor_ms(folder: Path, tokens: int, repeats: int) -> list[float]:
    """Return milliseconds of two copies of each `tokens` tokens of a dataset, front to back."""
    shard = np.load(folder / "train_00000.npy", mmap_mode="r")
    starts = itertools.count(0, tokens)
    kept: list[np.ndarray] = []  # training keeps a batch while the next one is read

    def copy(timer: timing.StepTimer) -> None:
        with timer.phase("copy"):
            start = next(starts) % (len(shard) - tokens)
            kept[:] = [shard[i : i + tokens].astype(np.int64) for i in (start, start + 1)]

    times, _ = timing.record(copy, CPU, 0, repeats)
    return times["total"]


def steady_mean(milliseconds: list[float]) -> float:
    """Return the median of the means of PARTS consecutive parts.

    Work that comes in bursts, such as the batches of several workers, is averaged within each part;
    a stall of the machine changes one part only.
    """
    size = math.ceil(len(milliseconds) / PARTS)
    starts = range(0, len(milliseconds), size)
    return median(fmean(milliseconds[i : i + size]) for i in starts)


if __name__ == "__main__":
    sys.exit(run_bench(BENCH, ["-m", "benchmarks.data", *sys.argv[1:]]))
