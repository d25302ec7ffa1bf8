"""Costs of Lightning's Trainer and our callbacks against a raw PyTorch loop.

Two loops train the same model on the same batch with the same optimizer, in one process, in blocks
A B A B. A step lasts from one request for a batch to the next, in every loop. ms: median over the
rounds of a block's mean step, so that work of every tenth step, such as logging, is included. B - A
and B/A: medians over the rounds. raw against raw shows the noise.

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

from gpt_lightning.bench.core import fit_run, paired, timing, training_step
from gpt_lightning.bench.core.training_step import VOCABULARY
from gpt_lightning.data.loader import Batch
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs.logger import RunEvents, RunLogger
from gpt_lightning.tables import options
from gpt_lightning.tables.options import COURSE_SIZES, Option, Values, listed
from gpt_lightning.tables.rows import column, sweep_row
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.training import optim, optimizers
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.progress import StepProgress
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.process import quiet_lightning
from gpt_lightning.training.trainer import Trainer

# fp16 needs a GradScaler, which is another loop
PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed"}


# measured steps of a block, those before them, and blocks of each loop
BLOCKS: Values = {"steps": 10, "warmup": 12, "rounds": 20}
WORKLOAD: Values = BLOCKS | {"batch": 4, "context": 64, "vocab_size": VOCABULARY}
# nanoGPT's baby GPT and its preset for CPUs, by shape; without dropout, which would make the losses
# differ from loop to loop
CHAR: Values = {"batch": 64, "context": 256, "vocab_size": 65}
CHAR |= {"steps": 3, "warmup": 2, "rounds": 5}
WORKLOADS = {
    "tiny": WORKLOAD | {"shape": (2, 2, 64), "rounds": 80},
    "char": CHAR | {"shape": (6, 6, 384)},
    "char-cpu": WORKLOAD | {"shape": (4, 4, 128), "batch": 12, "vocab_size": 65, "rounds": 80},
} | {name: WORKLOAD | {"shape": shape} for name, shape in COURSE_SIZES.items()}
LOOPS = ("raw", "norm", "trainer", "callbacks")
PAIRS = ("raw:raw", "raw:trainer", "norm:trainer", "trainer:callbacks", "norm:callbacks")


@sweep_row
class OverheadRow(training_step.ModelRow):
    """Two loops over the same steps, B against A."""

    a: str = column("A", width=9)
    b: str = column("B", width=9)
    a_ms: float | None = column("A ms", ",.3f", 9)
    b_ms: float | None = column("B ms", ",.3f", 9)
    difference_ms: float | None = column("B - A ms", ",.3f")
    ratio: float | None = column("B/A", ".3f", 6)
    ratio_std: float | None = column("std", ".3f", 6)
    ratio_min: float | None = column("min", ".3f", 6)
    ratio_max: float | None = column("max", ".3f", 6)
    graphs: int | None = column("graphs", "d")
    a_loss: float | None = column("A loss", ".5f", 8)
    b_loss: float | None = column("B loss", ".5f", 8)


def read_workloads(args: Any) -> list[Values]:
    """Return the workloads of --sizes, with --steps and --rounds where given."""
    given = {name: vars(args)[name] for name in BLOCKS if vars(args)[name] is not None}
    sizes = listed(args, "sizes", options.one_of(WORKLOADS))
    return [{"size": size, **WORKLOADS[size], **given} for size in sizes]


def read_pairs(args: Any) -> list[Values]:
    """Return the two loops of each pair."""
    return [{"a": a, "b": b} for a, b in listed(args, "pairs", pair)]


def pair(text: str) -> tuple[str, str]:
    """Convert A:B to the names of two loops."""
    a, colon, b = text.partition(":")
    if not colon:
        raise ValueError(f"{text!r} is no pair such as raw:trainer")
    loop = options.one_of(LOOPS)
    return loop(a), loop(b)


BENCH = Bench(
    name="overhead",
    title="Lightning's Trainer against a raw PyTorch loop",
    row=OverheadRow,
    measure="gpt_lightning.bench.overhead:measure_overhead",
    options=(
        options.DEVICE,
        Option("sizes", "tiny", f"Any of {', '.join(WORKLOADS)}.", read_workloads),
        options.numbers("contexts", "context", None, "Tokens per sequence"),
        options.numbers("batches", "batch", None, "Sequences per batch"),
        options.dtypes("fp32", list(PRECISIONS)),
        options.switches("compile", "false", "Compile the model"),
        Option("pairs", ",".join(PAIRS), f"A:B with commas, of {', '.join(LOOPS)}.", read_pairs),
        options.optional("steps", "Steps of a block; null: 10, for char 3."),
        options.optional("warmup", "Steps of a block before them; null: 12, for char 2."),
        options.optional(
            "rounds", "Blocks of each loop; null: 80, for large models 20, for char 5."
        ),
    ),
)


def measure_overhead(
    row: OverheadRow, shape: list[int], vocab_size: int, steps: int, warmup: int, rounds: int
) -> dict[str, Any]:
    """Run two loops in turns."""
    quiet_lightning()
    device = training_step.prepare(row)
    graphs = training_step.compiled_graphs()
    n_layer, n_head, n_embd = shape
    config = GPTConfig(n_layer, n_head, n_embd, row.context, vocab_size)
    module = make_module(config, row.dtype, row.compile, device)
    data = training_step.random_batch(row.batch, row.context, device, vocab_size)
    first, second = (Loop(name, module, data, row.dtype) for name in (row.a, row.b))
    for loop in (first, second):
        loop.block(warmup=1, steps=1)  # compiles, and triggers Trainer's late imports
    blocks = {"a": partial(first.block, warmup, steps), "b": partial(second.block, warmup, steps)}
    return {
        **paired.compare(blocks, rounds),
        "graphs": training_step.checked_graphs(row.compile, graphs),
        "a_loss": first.loss,
        "b_loss": second.loss,
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
        self.loss: float | None = None  # after the last block
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
        with torch.no_grad(), training_step.autocast(self.dtype, self.device):
            self.loss = float(self.module(*self.batch))
        return batches.milliseconds()[warmup:]

    def _train_raw(self, batches: timing.TimedBatches) -> None:
        self.module.to(self.device)
        model, settings = self.module.model, self.module.settings
        optimizer = optimizers.build(model, settings, bool(settings.fused))
        norm: training_step.Norm = "check" if self.name == "norm" else "none"
        step = training_step.TrainingStep(model, self.device, self.dtype, optimizer, norm)
        model.train()
        model.zero_grad()  # Trainer leaves the gradients of its last step
        for x, y in batches:
            step(x, y)

    def _train_with_trainer(self, batches: timing.TimedBatches) -> None:
        with_callbacks = self.name == "callbacks"
        with tempfile.TemporaryDirectory() as folder:
            run = RunLogger(Path(folder) / "runs")
            loggers = {"logger": [RunEvents(run), run]} if with_callbacks else {}
            trainer = Trainer(
                accelerator=self.device.type,
                precision=PRECISIONS[self.dtype],  # type: ignore[arg-type]  # one of the Trainer's
                max_steps=len(batches),
                callbacks=fit_callbacks() if with_callbacks else [],
                log_every_n_steps=10,  # as `fit`
                default_root_dir=folder,
                **fit_run.TRAINING_ALONE | {"enable_progress_bar": with_callbacks} | loggers,
            )
            trainer.fit(self.module, train_dataloaders=batches)


def fit_callbacks() -> list[SpeedMonitor | StepProgress | SampleText | RunCheckpoint]:
    """Return the callbacks of `fit` that act between two validations."""

    class Unsaved(RunCheckpoint):
        def save(self, trainer: Any) -> None:
            pass  # gigabytes in each block, and outside of the measured steps

    return [SpeedMonitor(), StepProgress(), SampleText(max_new_tokens=0), Unsaved()]
