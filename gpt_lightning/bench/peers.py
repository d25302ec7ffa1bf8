"""Training speed of our GPT-2 and transformers' GPT-2, with the same weights and batch.

Both models have the same weights, batch, loss function and AdamW, and no dropout; theirs keeps no
cache of keys and values. One process runs blocks of training steps of ours, theirs, ours, ... ms:
median over the rounds of a block's mean step; for forward and backward the median of all steps.
theirs/ours: median over the rounds, with its spread; ours is faster where it is above 1.

loss: loss of the first step, before any update, so that equal losses mean equal models. first:
first step, with compilation. graphs: graphs that torch.compile made.
"""

from functools import partial
from typing import Any

import torch

from gpt_lightning.bench.core import paired, timing, training_step
from gpt_lightning.bench.core.peer import make_peer
from gpt_lightning.data.loader import Batch
from gpt_lightning.model.fast.compilation import compile_in_place
from gpt_lightning.tables import options
from gpt_lightning.tables.options import COURSE_SIZES
from gpt_lightning.tables.rows import column, sweep_row
from gpt_lightning.tables.sweep import Bench


@sweep_row
class PeerRow(training_step.ModelRow):
    """Configuration, and the steps of both models."""

    ours_ms: float | None = column("ours ms", ",.2f", 9)
    theirs_ms: float | None = column("theirs ms", ",.2f", 9)
    ours_forward_ms: float | None = column("ours forward ms", ",.2f", console=False)
    theirs_forward_ms: float | None = column("theirs forward ms", ",.2f", console=False)
    ours_backward_ms: float | None = column("ours backward ms", ",.2f", console=False)
    theirs_backward_ms: float | None = column("theirs backward ms", ",.2f", console=False)
    ours_tokens_per_sec: float | None = column("ours tokens/s", ",.0f")
    theirs_tokens_per_sec: float | None = column("theirs tokens/s", ",.0f")
    ratio: float | None = column("theirs/ours", ".3f")
    ratio_std: float | None = column("std", ".3f", 6)
    ratio_min: float | None = column("min", ".3f", 6, console=False)
    ratio_max: float | None = column("max", ".3f", 6, console=False)
    ours_first_step_s: float | None = column("ours first s", ",.1f", console=False)
    theirs_first_step_s: float | None = column("theirs first s", ",.1f", console=False)
    ours_graphs: int | None = column("our graphs", "d")
    theirs_graphs: int | None = column("their graphs", "d")
    ours_loss: float | None = column("our loss", ".5f")
    theirs_loss: float | None = column("their loss", ".5f")
    ours_attention: str = column("our attention", default="", console=False)
    attention: str = column("their attention", default="", console=False)
    transformers: str = column("transformers", default="", console=False)


BENCH = Bench(
    name="peers",
    title="The same GPT-2 through transformers' GPT2LMHeadModel and ours",
    row=PeerRow,
    measure="gpt_lightning.bench.peers:measure_peers",
    options=(
        options.DEVICE,
        options.named_sizes({"tiny": (2, 2, 64)} | COURSE_SIZES, "small"),
        options.contexts("256"),
        options.batches(),
        options.dtypes("fp32,bf16"),
        options.switches("compile", "false,true", "Compile both models"),
        options.steps(3),
        options.warmup(1),
        options.shared("rounds", 5, "Blocks of each model."),
    ),
    timeout_s=1200.0,
)


def measure_peers(
    row: PeerRow, shape: list[int], steps: int, warmup: int, rounds: int
) -> dict[str, Any]:
    """Train both models in turns."""
    device = training_step.prepare(row)
    model = training_step.make_model(shape, row.context)
    peer = make_peer(model)  # before compilation renames anything
    data = training_step.random_batch(row.batch, row.context, device)
    ours = Contestant(model.to(device), row.compile, data, row.dtype)
    theirs = Contestant(peer.to(device), row.compile, data, row.dtype)
    both = {"ours": ours, "theirs": theirs}
    blocks = {name: partial(c.block, warmup, steps) for name, c in both.items()}
    found = paired.compare(blocks, rounds)
    for name, contestant in both.items():
        rate = row.batch * row.context / found[f"{name}_ms"] * 1e3
        facts = {"tokens_per_sec": rate, **contestant.facts()}
        found |= {f"{name}_{key}": value for key, value in facts.items()}
    kernel = training_step.kernel_of(model, device, row.dtype, row.context)
    return {
        **found,
        "ours_attention": kernel,
        "attention": peer.attention,
        "transformers": peer.version,
    }


class Contestant:
    """Model in training, after its first step.

    Args:
        model: Model that maps tokens and targets to the loss, on the device.
        compiled: Compile the model.
        batch: Tokens and targets, int64 (B, T) each, on the device.
        dtype: Dtype of the forward pass.
    """

    def __init__(self, model: torch.nn.Module, compiled: bool, batch: Batch, dtype: str) -> None:
        self.batch, self.device = batch, batch[0].device
        if compiled:
            compile_in_place(model, self.device.type)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.step = training_step.TrainingStep(model, self.device, dtype, optimizer, norm="none")
        self.phases: dict[str, list[float]] = {}
        graphs = training_step.compiled_graphs()
        _, first = timing.record(self.train, self.device, warmup=0, steps=1)
        self.loss, self.first_step_s = float(self.last_loss), first["total"] / 1e3
        self.graphs = training_step.checked_graphs(compiled, graphs)

    def train(self, timer: timing.StepTimer) -> None:
        """Train on the batch."""
        self.last_loss = self.step(*self.batch, timer.phase)

    def block(self, warmup: int, steps: int) -> list[float]:
        """Return the milliseconds of each of `steps` steps, after `warmup` others."""
        times, _ = timing.record(self.train, self.device, warmup, steps)
        for phase, values in times.items():
            self.phases.setdefault(phase, []).extend(values)
        return times["total"]

    def facts(self) -> dict[str, Any]:
        """Return the model's own columns of the row."""
        return {
            "forward_ms": timing.stats(self.phases["forward"]).median,
            "backward_ms": timing.stats(self.phases["backward"]).median,
            "first_step_s": self.first_step_s,
            "graphs": self.graphs,
            "loss": self.loss,
        }
