"""RunRecorder: each loss and step time of a run, as it comes, and its first batches."""

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from gpt_lightning.data.loader import Batch
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.training.callbacks.speed import (
    SpeedMonitor,
    Steps,
    median_s,
    tokens_per_sec,
    without_stalls,
)
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.steps import at_step_boundary, evaluation_batches, find_callback


@dataclass(frozen=True)
class Observation:
    """One loss of a run, and the time of its step.

    Attributes:
        device: Device that computed it.
        step: Optimizer steps before it: 0 is the untrained model.
        split: `batch`, the loss of a training step; `train` or `val`, an evaluation.
        loss: Loss in nats.
        seconds: Time of the step; None for an evaluation.
        tokens: Tokens of the step.
        batches: Batches of the evaluation; None for a step.
    """

    device: torch.device
    step: int
    split: str
    loss: float
    seconds: float | None = None
    tokens: int | None = None
    batches: int | None = None


@dataclass
class RunTimings:
    """Speed of a run, measured by itself.

    Attributes:
        device: Device of the run.
        max_steps: Optimizer steps that were configured.
        seconds: Wall time by phase.
        first_step_ms: Time of the first step, with compilation.
        step_ms: Median of the other steps, without stalls.
        tokens_per_sec: Rate of the other steps, without stalls.
        mfu: Model FLOPs utilization, a fraction; None without a known peak.
        peak_flops: Peak FLOP/s that MFU is a fraction of.
        stalls: Number of steps of over ten times the median.
        attention: Attention kernel that ran.
    """

    device: torch.device
    max_steps: int
    seconds: dict[str, float]
    first_step_ms: float | None = None
    step_ms: float | None = None
    tokens_per_sec: float | None = None
    mfu: float | None = None
    peak_flops: float | None = None
    stalls: int = 0
    attention: str = ""


class RunRecorder(L.Callback):
    """Call a function with every number of a run.

    Args:
        show: Function that is called with each number as it comes.
        each_step: True: every optimizer step is synchronized and timed, from the batch on the
            device to the end of the update, as the published ladders did. False: SpeedMonitor's
            times, which need no synchronization.
        steps: Optimizer steps whose losses are shown if each_step is False; 0 is the first.
        begin: Function that is called with the module before the first number, when model,
            optimizer and data exist.

    Attributes:
        batches: First two micro-batches of this process, on the CPU.
        speed: Timings of a run that has ended.
    """

    def __init__(
        self,
        show: Callable[[Observation], None],
        each_step: bool,
        steps: Container[int] = (),
        begin: Callable[[GPTModule], None] = lambda module: None,
    ) -> None:
        self.show, self.each_step, self.steps, self.begin = show, each_step, steps, begin
        self.speed: RunTimings | None = None
        self.batches: list[Batch] = []
        self._steps: Steps = []
        self._begin = 0.0
        self._tokens = 0

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        self.begin(pl_module)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if len(self.batches) < 2:
            x, y = batch
            self.batches.append((x.cpu(), y.cpu()))
        if self.each_step and self._tokens == 0:
            synchronize(trainer.strategy.root_device)
            self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Batch, *_: Any
    ) -> None:
        self._tokens += batch[0].numel() * trainer.world_size
        step = trainer.global_step - 1
        if not self.each_step:
            if at_step_boundary(trainer) and step in self.steps:
                assert isinstance(pl_module, GPTModule)
                assert pl_module.last_loss is not None
                loss = float(pl_module.last_loss)
                self.show(Observation(pl_module.device, step, "batch", loss))
            return
        if trainer.global_step == len(self._steps):
            return
        synchronize(trainer.strategy.root_device)
        seconds = time.perf_counter() - self._begin
        loss = float(trainer.callback_metrics["train/loss"])
        self._steps.append((seconds, self._tokens))
        self.show(Observation(pl_module.device, step, "batch", loss, seconds, self._tokens))
        self._tokens = 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics, step, device = trainer.callback_metrics, trainer.global_step, pl_module.device
        sizes = evaluation_batches(trainer)
        for split, key, loader in (("train", "train/eval_loss", 1), ("val", "val/loss", 0)):
            if key in metrics:
                loss, batches = float(metrics[key]), int(sizes[loader])
                self.show(Observation(device, step, split, loss, batches=batches))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        monitor = find_callback(trainer, SpeedMonitor)
        assert monitor is not None
        timed = self._steps[1:]
        steps, stalls = (
            without_stalls(timed, median_s(timed)) if self.each_step else monitor.steps()
        )
        self.speed = RunTimings(
            device=trainer.strategy.root_device,
            max_steps=trainer.max_steps,
            attention=pl_module.attention_kernel,
            seconds=monitor.seconds(),
            stalls=len(stalls),
            first_step_ms=self._steps[0][0] * 1e3 if self._steps else None,
            step_ms=median_s(steps) * 1e3 if steps else None,
            tokens_per_sec=tokens_per_sec(steps) if steps else None,
            mfu=monitor.mfu(steps, trainer, pl_module),
            peak_flops=None if monitor.peak is None else monitor.peak.flops,
        )
