"""Data loader: tokens/s by order, block size, batch and workers, and the limit.

Random tokens of two bytes from files that were just read or written, so that the loader is measured
and not the disk. A loop takes batches and does nothing with them. tokens/s derives from the mean
times of ten parts of the batches, of which the median is taken, so that one stall of the machine
does not count; the batch time is a median. The first batch includes the order's permutation and the
start of the workers.

The loader writes a token as int64 three times: in the window of T + 1 tokens, as input and as
target. The floor is the time, taken alike, of the work that every loader does: a plain loop over
the mapped file that writes inputs and targets, 16 bytes per token, in one process. Several workers
can beat it.
"""

import itertools
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench import timing
from gpt_lightning.data.dataset import load_manifest, random_dataset
from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.windows import DatasetWindows
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import Row, Values
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError

VOCAB_SIZE = 50_257  # GPT-2's: two bytes per token on the disk
ORDERS = ("sequential", "shuffled", "random")
SEED = 1337


BENCH = Bench(
    measure="gpt_lightning.bench.data:measure_data",
    options=(
        options.DEVICE,
        options.words("orders", "order", ORDERS),
        options.numbers("block_sizes", "block_size", "1024", "Tokens per sequence"),
        options.numbers("batch_sizes", "batch_size", "8,32", "Sequences per batch"),
        options.numbers("workers", "workers", "0,1", "Loader processes", least=0),
        options.shared("n_tokens", 50_000_000, "Tokens of each dataset."),
        options.shared("batches", 300, "Measured batches of a row."),
        options.warmup(20, type=PositiveInt),
    ),
)


def measure_data(row: Row) -> Values:
    """Take batches as training does, as fast as they come.

    Raises:
        SkippedError: A batch is longer than the dataset.
    """
    device, tokens = torch.device(row.device), row.batch_size * row.block_size
    if tokens + 1 >= row.n_tokens:
        raise SkippedError(f"--n_tokens is {row.n_tokens}; a batch takes {tokens + 2:,}")
    dataset = random_dataset(Path("data") / f"bench-{row.n_tokens}", VOCAB_SIZE, row.n_tokens)
    stream = TokenStream(dataset, load_manifest(dataset), "train")
    windows = WindowOrder(row.order, len(stream), row.block_size, SEED, stream.shard_tokens)
    # read_tokens 0: a batch that is read together with others has no time of its own
    loader = TrainLoader(
        DatasetWindows(stream, windows),
        row.batch_size,
        num_workers=row.workers,
        pin_memory=device.type == "cuda",
        read_tokens=0,
    )
    endless = itertools.chain.from_iterable(itertools.repeat(loader))

    def take(timer: timing.StepTimer) -> None:
        x, y = next(endless)
        timer.end("batch")
        if device.type != "cpu":
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            timer.end("copy")

    times, first = timing.record(take, device, row.warmup, row.batches)
    floor = timing.steady_mean(floor_ms(dataset, tokens, row.batches))
    tokens_per_sec = tokens / timing.steady_mean(times["total"]) * 1e3
    return {
        "first_batch_ms": first["total"],
        **timing.columns("batch", times["batch"], "p90"),
        "copy_ms": median(times["copy"]) if "copy" in times else None,
        "tokens_per_sec": tokens_per_sec,
        "floor_ms": floor,
        "floor_tokens_per_sec": tokens / floor * 1e3,
        "floor_share": tokens_per_sec * floor / tokens / 1e3,
    }


def floor_ms(folder: Path, tokens: int, repeats: int) -> list[float]:
    """Return milliseconds of two copies of each `tokens` tokens of a dataset, front to back."""
    shard = np.load(folder / "train_00000.npy", mmap_mode="r")
    starts = itertools.count(0, tokens)
    kept: list[Any] = []  # training keeps a batch while the next one is read

    def copy(timer: timing.StepTimer) -> None:
        start = next(starts) % (len(shard) - tokens)
        kept[:] = [shard[i : i + tokens].astype(np.int64) for i in (start, start + 1)]
        timer.end("copy")

    times, _ = timing.record(copy, torch.device("cpu"), 0, repeats)
    return times["total"]
