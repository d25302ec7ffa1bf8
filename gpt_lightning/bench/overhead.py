"""Costs of Lightning's Trainer and our callbacks against a raw PyTorch loop.

Trainer and callbacks cost about 1 ms a step: 0.7 and 2.0 ms in two runs on two cores, whose own
scatter is 1 ms. That is no longer a goal: of the quickstart's step of 43 ms it is 2%.

Two loops train the same model on the same batch with the same optimizer, in one process, in blocks
A B A B. A step lasts from one request for a batch to the next, in every loop. ms: median over the
rounds of a block's mean step, so that work of every tenth step, such as logging, is included.
pair: A:B. difference: B - A, and ratio: B / A, medians over the rounds. raw:raw shows the noise.

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
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from gpt_lightning.bench import fits, models, timing
from gpt_lightning.bench.step import (
    Training,
    checked_graphs,
    compiled_graphs,
    prepare,
    random_batch,
)
from gpt_lightning.hardware.precision import DTYPES, autocast
from gpt_lightning.runs.logger import RunEvents, RunLogger
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import Row, Values
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.training import optim, optimizers
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.module import GPTModule

PAIRS = ("raw:raw", "raw:trainer", "norm:trainer", "trainer:callbacks", "norm:callbacks")


def train_raw(
    module: GPTModule, batches: timing.TimedBatches, dtype: str, norm: str = "none"
) -> None:
    """Train without a Trainer; norm is that of `Training`."""
    device, settings = batches.batch[0].device, module.settings
    model = module.to(device).model.train()
    optimizer = optimizers.load(settings).build(model, settings, bool(settings.fused))
    step = Training(model, batches.batch, dtype, optimizer=optimizer, norm=norm)
    model.zero_grad()  # Trainer leaves the gradients of its last step
    for _ in batches:
        step()


def train_with_trainer(
    module: GPTModule, batches: timing.TimedBatches, dtype: str, callbacks: bool = False
) -> None:
    """Train with Trainer, alone or with the callbacks and loggers of `fit`."""
    trainer = {"accelerator": batches.batch[0].device.type, "log_every_n_steps": 10}
    trainer["precision"] = DTYPES[dtype].precision
    with tempfile.TemporaryDirectory() as folder:
        if callbacks:
            run = RunLogger(Path(folder) / "runs")
            own = [SpeedMonitor(), StepProgress(), SampleText(max_new_tokens=0)]
            own.append(RunCheckpoint(enabled=False))  # gigabytes, outside of the measured steps
            trainer |= {"callbacks": own, "logger": [RunEvents(run), run]}
            trainer |= {"enable_progress_bar": True, "default_root_dir": folder}
        fits.train(batches, module, trainer)


LOOPS: dict[str, Callable[..., None]] = {
    "raw": train_raw,
    "norm": partial(train_raw, norm="check"),
    "trainer": train_with_trainer,
    "callbacks": partial(train_with_trainer, callbacks=True),
}


BENCH = Bench(
    measure="gpt_lightning.bench.overhead:measure_overhead",
    options=(
        options.DEVICE,
        options.sizes(models.SHAPES, "tiny"),
        options.contexts("64"),
        options.batches("4"),
        options.dtypes("fp32", ("fp32", "tf32", "bf16")),  # fp16's GradScaler is another loop
        options.switches("compile", "false", "Compile the model"),
        options.words("pairs", "pair", PAIRS),
        options.steps(10),
        options.warmup(12),
        options.shared("rounds", 80, "Blocks of each loop; 20 are enough for a large model."),
    ),
)


def measure_overhead(row: Row) -> Values:
    """Run two loops in turns, each block from the same weights."""
    device = prepare(row)
    graphs = compiled_graphs()
    module = GPTModule(
        models.make_config(row.size, row.context),
        learning_rate=6e-4,
        schedule="constant",  # a raw loop would have to do the cosine too
        fused=device.type in optim.FUSED_ADAMW_DEVICES,
        compile=row.compile,
        matmul_precision="high" if row.dtype == "tf32" else "highest",
    )
    module.configure_model()
    start = {key: value.clone() for key, value in module.state_dict().items()}
    batch = random_batch(row.batch, row.context, device)
    losses = {}
    loops = dict(zip("ab", row.pair.split(":"), strict=True))

    def block(side: str, warmup: int, steps: int) -> list[float]:
        module.load_state_dict(start)
        # the last step is not measured, because no request for a batch ends it
        batches = timing.TimedBatches(batch, warmup + steps + 1)
        LOOPS[loops[side]](module, batches, row.dtype)
        module.to(device)  # Trainer has left it on the CPU
        with torch.no_grad(), autocast(row.dtype, device):
            losses[f"{side}_loss"] = float(module(*batch))
        return batches.milliseconds()[warmup:]

    for side in loops:
        block(side, 1, 1)  # compiles, and triggers Trainer's late imports
    blocks = {side: partial(block, side, row.warmup, row.steps) for side in loops}
    found = timing.compare(blocks, row.rounds) | losses
    return found | {"graphs": checked_graphs(row.compile, graphs)}
