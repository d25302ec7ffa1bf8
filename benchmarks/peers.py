"""Training speed of our GPT-2 and transformers' GPT-2, with the same weights and batch.

Both models have the same weights, batch, loss function and AdamW, and no dropout; theirs keeps no
cache of keys and values. One process runs blocks of training steps of ours, theirs, ours, ... ms:
median over the rounds of a block's mean step. ratio: theirs over ours, median over the rounds, with
its spread; ours is faster where it is above 1.

loss: loss of the first step, before any update, so that equal losses mean equal models.
graphs: graphs that torch.compile made.
"""

import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import torch

from gpt_lightning.bench import models, timing
from gpt_lightning.bench.step import Training, prepare, random_batch
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import (
    Count,
    Flag,
    HiddenThousandths,
    Hundredths,
    Loss,
    Measured,
    Text,
    Thousandths,
    Values,
    Whole,
)
from gpt_lightning.tables.sweep import Bench, run_bench


@dataclass
class PeersRow(Measured):
    """Speed of both models."""

    device: Text
    dtype: Text
    compile: Flag
    size: Text
    batch: Count
    context: Count
    ours_ms: Hundredths
    theirs_ms: Hundredths
    ours_tokens_per_sec: Whole
    theirs_tokens_per_sec: Whole
    ratio: Thousandths
    ratio_std: Thousandths
    ratio_min: HiddenThousandths
    ratio_max: HiddenThousandths
    ours_graphs: Count
    theirs_graphs: Count
    ours_loss: Loss
    theirs_loss: Loss


BENCH = Bench(
    measure="benchmarks.peers:measure_peers",
    tables={"rows": PeersRow},
    options=(
        options.DEVICE,
        options.sizes(("tiny", *models.COURSE_SIZES), "small"),
        options.contexts("256"),
        options.batches("4"),
        options.dtypes("fp32,bf16"),
        options.switches("compile", "false,true", "Compile both models"),
        options.steps(3),
        options.warmup(1),
        options.shared("rounds", 5, "Blocks of each model."),
    ),
    timeout_s=1200.0,
)


def measure_peers(row: SimpleNamespace) -> Values:
    """Train both models in turns."""
    device = prepare(row)
    model = GPT(models.make_config(row.size, row.context))
    peer = models.Peer(model)  # compilation renames parameters
    batch = random_batch(row.batch, row.context, device)
    both = {}
    for name, module in (("ours", model), ("theirs", peer)):
        adamw = torch.optim.AdamW(module.to(device).parameters(), lr=1e-4)
        both[name] = Training(module, batch, row.dtype, row.compile, optimizer=adamw, clip=False)
        both[name].block(warmup=0, steps=1)
    blocks = {name: partial(t.block, row.warmup, row.steps) for name, t in both.items()}
    found = timing.compare(blocks, row.rounds)
    for name, training in both.items():
        found[f"{name}_tokens_per_sec"] = row.batch * row.context / found[f"{name}_ms"] * 1e3
        found[f"{name}_graphs"] = training.graphs
        found[f"{name}_loss"] = training.loss
    return found


if __name__ == "__main__":
    sys.exit(run_bench(BENCH, ["-m", "benchmarks.peers", *sys.argv[1:]]))
