"""How `bench overhead` measures a pair of loops, in the row's own process."""

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import lightning as L
import torch

from gpt_lightning.bench.core.paired import compare, interleave
from gpt_lightning.bench.core.training_step import (
    autocast,
    checked_graphs,
    compiled_graphs,
    use_dtype,
)
from gpt_lightning.data.loader import Batch
from gpt_lightning.hardware.device import Timestamp, elapsed_s, record_event, synchronize
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training import optim
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.progress import StepProgress
from gpt_lightning.training.callbacks.samples import SampleText
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.fit import quiet_lightning
from gpt_lightning.training.module import GPTModule

PRECISIONS = {"fp32": "32-true", "tf32": "32-true", "bf16": "bf16-mixed"}
LEARNING_RATE = 6e-4


def measure_overhead(
    device: str,
    dtype: str,
    compile: bool,  # noqa: A002 - the field's word
    size: str,
    shape: list[int],
    vocab_size: int,
    batch: int,
    context: int,
    a: str,
    b: str,
    steps: int,
    warmup: int,
    rounds: int,
) -> dict[str, Any]:
    """Runs two loops in turns."""
    quiet_lightning()
    where = torch.device(device)
    use_dtype(dtype, where)
    graphs = compiled_graphs()
    torch.manual_seed(0)
    n_layer, n_head, n_embd = shape
    config = GPTConfig(n_layer, n_head, n_embd, block_size=context, vocab_size=vocab_size)
    module = make_module(config, dtype, compile, where)
    x, y = (torch.randint(vocab_size, (batch, context), device=where) for _ in range(2))
    first, second = (Loop(name, module, (x, y), dtype) for name in (a, b))
    for loop in (first, second):
        loop.block(warmup=1, steps=1)  # compiles, and imports what Trainer imports late
    found = compare(
        interleave(lambda: first.block(warmup, steps), lambda: second.block(warmup, steps), rounds)
    )
    losses = {"a_loss": first.loss, "b_loss": second.loss}
    return {**found.named("a", "b"), "graphs": checked_graphs(compile, graphs), **losses}


def make_module(
    config: GPTConfig,
    dtype: str,
    compile: bool,  # noqa: A002 - the field's word
    device: torch.device,
) -> GPTModule:
    """A module with its model made, which every loop trains."""
    module = GPTModule(
        config,
        learning_rate=LEARNING_RATE,
        schedule="constant",  # a raw loop would have to do the cosine too
        fused=device.type in optim.FUSED_ADAMW_DEVICES,
        compile=compile,
        matmul_precision="high" if dtype == "tf32" else "highest",
    )
    module.configure_model()
    return module


class AskedBatches:
    """The same batch, over and over, and the moments at which it was asked for.

    Args:
        batch: Tokens and targets, int64 (B, T) each, on the device.
        n: How often.
    """

    def __init__(self, batch: Batch, n: int) -> None:
        self.batch, self.n = batch, n
        self.marks: list[Timestamp] = []

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Batch]:
        for _ in range(self.n):
            self.marks.append(record_event(self.batch[0].device))
            yield self.batch

    def milliseconds(self) -> list[float]:
        """Between a batch and the next, n - 1 values."""
        synchronize(self.batch[0].device)
        return [elapsed_s(*marks) * 1e3 for marks in itertools.pairwise(self.marks)]


class Loop:
    """Trains a module from the same weights in each block.

    Args:
        name: Of LOOPS.
        module: Of make_module, as it was initialized.
        batch: Tokens and targets, on the device.
        dtype: Of the forward pass.
    """

    def __init__(
        self,
        name: str,
        module: GPTModule,
        batch: Batch,
        dtype: str,
    ) -> None:
        self.name, self.module, self.batch, self.dtype = name, module, batch, dtype
        self.device = batch[0].device
        self.loss: float | None = None  # after the last block
        self._initial = {key: value.clone() for key, value in module.state_dict().items()}

    def block(self, warmup: int, steps: int) -> list[float]:
        """Milliseconds of each of `steps` steps, after `warmup` others."""
        self.module.load_state_dict(self._initial)
        # the last step, which no request for a batch ends, is not among those measured
        batches = AskedBatches(self.batch, warmup + steps + 1)
        if self.name in ("raw", "norm"):
            self._train_raw(batches)
        else:
            self._train_with_trainer(batches)
        self.module.to(self.device)  # Trainer has left it on the CPU
        with torch.no_grad(), autocast(self.dtype, self.device):
            self.loss = float(self.module(*self.batch))
        return batches.milliseconds()[warmup:]

    def _train_raw(self, batches: AskedBatches) -> None:
        self.module.to(self.device)
        model, module = self.module.model, self.module
        assert model is not None
        groups = optim.decay_groups(
            model.named_parameters(), module.settings.weight_decay, module.settings.decay
        )
        fused = bool(module.settings.fused)
        optimizer = optim.make_adamw(groups, LEARNING_RATE, module.settings.betas, fused)
        model.train()
        for x, y in batches:
            with autocast(self.dtype, self.device):
                loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            if self.name == "norm":
                assert optim.clip_gradients(model.parameters(), None).isfinite()
            optimizer.step()

    def _train_with_trainer(self, batches: AskedBatches) -> None:
        with_callbacks = self.name == "callbacks"
        with tempfile.TemporaryDirectory() as folder:
            trainer = L.Trainer(
                accelerator=self.device.type,
                devices=1,
                precision=PRECISIONS[self.dtype],  # type: ignore[arg-type]  # one of Trainer's
                max_steps=len(batches),
                callbacks=fit_callbacks() if with_callbacks else [],
                enable_progress_bar=with_callbacks,
                enable_checkpointing=False,
                enable_model_summary=False,
                logger=False,
                log_every_n_steps=10,  # as `fit`
                num_sanity_val_steps=0,
                use_distributed_sampler=False,
                default_root_dir=folder,
            )
            trainer.fit(self.module, train_dataloaders=batches)


def fit_callbacks() -> list[L.Callback]:
    """The callbacks of `fit` that act between two validations."""

    class Unsaved(RunCheckpoint):
        def save(self, trainer: L.Trainer) -> None:
            pass  # gigabytes a block, and none of them within a step

    return [SpeedMonitor(), StepProgress(), SampleText(max_new_tokens=0), Unsaved()]
