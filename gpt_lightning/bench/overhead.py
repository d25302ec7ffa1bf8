"""Costs of Lightning's Trainer and our callbacks against a raw PyTorch loop.

Two loops train the same model on the same batch with the same optimizer, in one process, in blocks
A B A B. A step lasts from one request for a batch to the next, in every loop. ms: median over the
rounds of a block's mean step, so that work of every tenth step, such as logging, is included.
difference: B - A, and ratio: B / A, medians over the rounds. raw against raw shows the noise.

raw: forward, backward and AdamW, nothing else. norm: raw with the norm of the gradients, checked to
be finite as GPTModule does each step. trainer: Trainer and GPTModule without callbacks and logger.
callbacks: trainer with the callbacks and loggers of `fit` (SpeedMonitor, StepProgress, SampleText,
RunCheckpoint; metrics.jsonl and TensorBoard) between two validations, where none samples or saves.

Every tenth step also writes its metrics; the first of these steps, which makes the files, is among
those before the measured ones.

loss: loss after a block. Every block starts from the same weights, so that equal losses mean equal
work.
"""

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.bench import fits, models, timing
from gpt_lightning.bench.step import (
    Norm,
    TrainingStep,
    checked_graphs,
    compiled_graphs,
    prepare,
    random_batch,
)
from gpt_lightning.data.loader import Batch
from gpt_lightning.hardware.precision import DTYPES, autocast
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.logger import RunEvents, RunLogger
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option, listed
from gpt_lightning.tables.rows import Row, Values, row_type
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.training import optim, optimizers
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.process import quiet_lightning
from gpt_lightning.training.trainer import Trainer

SIZES = ("tiny", "char", "char-cpu", *models.COURSE_SIZES)
LOOPS = ("raw", "norm", "trainer", "callbacks")
PAIRS = ("raw:raw", "raw:trainer", "norm:trainer", "trainer:callbacks", "norm:callbacks")


def read_workloads(args: Any) -> list[Values]:
    """Return the sizes of --sizes with their workloads, with --steps, ... where given."""
    given = {name: getattr(args, name) for name in ("steps", "warmup", "rounds")}
    given = {name: value for name, value in given.items() if value is not None}
    table = models.TABLE["overhead"]
    return [
        {"size": size, "shape": models.SHAPES[size], **table["all"], **table.get(size, {}), **given}
        for size in listed(args, "sizes", options.one_of(SIZES))
    ]


def pair(text: str) -> tuple[str, str]:
    """Convert A:B to the names of two loops."""
    a, colon, b = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is no pair such as raw:trainer")
    loop = options.one_of(LOOPS)
    return loop(a), loop(b)


def read_pairs(args: Any) -> list[Values]:
    """Return the two loops of each pair."""
    return [{"a": a, "b": b} for a, b in listed(args, "pairs", pair)]


BENCH = Bench(
    name="overhead",
    title="Lightning's Trainer against a raw PyTorch loop",
    row=row_type(
        "device dtype compile size batch context a b a_ms:,.3f b_ms:,.3f difference_ms:,.3f ratio "
        "ratio_std ratio_min ratio_max graphs a_loss b_loss status -note"
    ),
    measure="gpt_lightning.bench.overhead:measure_overhead",
    options=(
        options.DEVICE,
        Option("sizes", "tiny", f"Any of {', '.join(SIZES)}.", read_workloads),
        options.numbers("contexts", "context", None, "Tokens per sequence"),
        options.numbers("batches", "batch", None, "Sequences per batch"),
        options.dtypes("fp32", ("fp32", "tf32", "bf16")),  # fp16's GradScaler is another loop
        options.switches("compile", "false", "Compile the model"),
        Option("pairs", ",".join(PAIRS), f"A:B with commas, of {', '.join(LOOPS)}.", read_pairs),
        options.optional("steps", "Steps of a block; null: 10, for char 3."),
        options.optional("warmup", "Steps of a block before them; null: 12, for char 2."),
        options.optional(
            "rounds", "Blocks of each loop; null: 80, for large models 20, for char 5."
        ),
    ),
)


def measure_overhead(row: Row) -> Values:
    """Run two loops in turns."""
    quiet_lightning()
    device = prepare(row)
    graphs = compiled_graphs()
    config = models.make_config(row.shape, row.context, row.vocab_size)
    module = make_module(config, row.dtype, row.compile, device)
    batch = random_batch(row.batch, row.context, device, row.vocab_size)
    loops = {"a": Loop(row.a, module, batch, row.dtype), "b": Loop(row.b, module, batch, row.dtype)}
    for loop in loops.values():
        loop.block(warmup=1, steps=1)  # compiles, and triggers Trainer's late imports
    blocks = {name: partial(loop.block, row.warmup, row.steps) for name, loop in loops.items()}
    return {
        **timing.compare(blocks, row.rounds),
        "graphs": checked_graphs(row.compile, graphs),
        "a_loss": loops["a"].loss,
        "b_loss": loops["b"].loss,
    }


def make_module(config: GPTConfig, dtype: str, compiled: bool, device: torch.device) -> GPTModule:
    """Make the module that every loop trains, with its model."""
    module = GPTModule(
        config,
        learning_rate=6e-4,
        schedule="constant",  # a raw loop would have to do the cosine too
        fused=device.type in optim.FUSED_ADAMW_DEVICES,
        compile=compiled,
        matmul_precision="high" if dtype == "tf32" else "highest",
    )
    module.configure_model()
    return module


class Loop:
    """Trains a module from the same weights in each block.

    Args:
        name: Name of the loop, one of LOOPS.
        module: Module of `make_module`, as it was initialized.
        batch: Tokens and targets, int64 (B, T) each, on the device.
        dtype: Dtype of the forward pass.
    """

    def __init__(self, name: str, module: GPTModule, batch: Batch, dtype: str) -> None:
        self.name, self.module, self.batch, self.dtype = name, module, batch, dtype
        self.device = batch[0].device
        self.loss: float | None = None  # loss of the last block
        self._initial = {key: value.clone() for key, value in module.state_dict().items()}

    def block(self, warmup: int, steps: int) -> list[float]:
        """Return the milliseconds of each of `steps` steps, after `warmup` others."""
        self.module.load_state_dict(self._initial)
        # the last step is not measured, because no request for a batch ends it
        batches = timing.TimedBatches(self.batch, warmup + steps + 1)
        if self.name in ("raw", "norm"):
            self._train_raw(batches)
        else:
            self._train_with_trainer(batches)
        self.module.to(self.device)  # Trainer has left it on the CPU
        with torch.no_grad(), autocast(self.dtype, self.device):
            self.loss = float(self.module(*self.batch))
        return batches.milliseconds()[warmup:]

    def _train_raw(self, batches: timing.TimedBatches) -> None:
        self.module.to(self.device)
        model, settings = self.module.model, self.module.settings
        optimizer = optimizers.build(model, settings, bool(settings.fused))
        norm: Norm = "check" if self.name == "norm" else "none"
        step = TrainingStep(model, self.device, self.dtype, optimizer, norm)
        model.train()
        model.zero_grad()  # Trainer leaves the gradients of its last step
        for x, y in batches:
            step(x, y)

    def _train_with_trainer(self, batches: timing.TimedBatches) -> None:
        with_callbacks = self.name == "callbacks"
        with tempfile.TemporaryDirectory() as folder:
            run = RunLogger(Path(folder) / "runs")
            loggers = {"logger": [RunEvents(run), run]} if with_callbacks else {}
            precision: Any = DTYPES[self.dtype].precision
            trainer = Trainer(
                accelerator=self.device.type,
                precision=precision,
                max_steps=len(batches),
                callbacks=fit_callbacks() if with_callbacks else [],
                log_every_n_steps=10,  # the default of `fit`
                default_root_dir=folder,
                **fits.TRAINING_ALONE | {"enable_progress_bar": with_callbacks} | loggers,
            )
            trainer.fit(self.module, train_dataloaders=batches)


def fit_callbacks() -> list[SpeedMonitor | StepProgress | SampleText | RunCheckpoint]:
    """Return the callbacks of `fit` that act between two validations."""

    class Unsaved(RunCheckpoint):
        def save(self, trainer: Any) -> None:
            pass  # gigabytes in each block, and outside of the measured steps

    return [SpeedMonitor(), StepProgress(), SampleText(max_new_tokens=0), Unsaved()]
