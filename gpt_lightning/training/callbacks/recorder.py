"""Callbacks that hand each number of a run on as it comes: losses, step times, evaluations."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch

from gpt_lightning.data.loader import Batch
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.model import flops
from gpt_lightning.training.callbacks.speed import (
    SpeedMonitor,
    median_s,
    tokens_per_sec,
    without_stalls,
)
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.trainer_state import find_callback


@dataclass(frozen=True)
class Observation:
    """One number of our run: a loss in nats, and what the step took.

    Attributes:
        device: Where it was computed.
        step: Optimizer steps before it: 0 is the untrained model.
        split: `batch`, the loss of a training step; `train` or `val`, an evaluation.
        loss: In nats.
        seconds: Of the step; None for an evaluation.
        tokens: Of the step.
    """

    device: torch.device
    step: int
    split: str
    loss: float
    seconds: float | None = None
    tokens: int | None = None


@dataclass
class RunTimings:
    """What a run measured of itself.

    Attributes:
        device: Of the run.
        max_steps: That it was to make.
        seconds: Wall time by phase.
        first_step_ms: With compilation.
        step_ms: Median of the others, stalls left out.
        tokens_per_sec: Of the others, stalls left out.
        mfu: A fraction; None where there is no peak.
        peak_flops: That MFU is a fraction of.
        stalls: Steps of over ten times the median.
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


class RunRecorder(L.Callback):
    """Tells `show` of every number.

    Args:
        show: Called with each number as it comes.
        each_step: Waits for the device after every optimizer step and times it, from the batch on
            the device to the end of the update, as the published ladders did; otherwise
            SpeedMonitor's times are taken, which hold nothing up.
    """

    def __init__(self, show: Callable[[Observation], None], each_step: bool) -> None:
        self.show, self.each_step = show, each_step
        self.speed: RunTimings | None = None
        self._steps: list[tuple[float, int]] = []  # seconds and tokens
        self._begin = 0.0
        self._tokens = 0

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if self.each_step and self._tokens == 0:
            synchronize(trainer.strategy.root_device)
            self._begin = time.perf_counter()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Batch,
        batch_idx: int,
    ) -> None:
        self._tokens += batch[0].numel() * trainer.world_size
        if not self.each_step or trainer.global_step == len(self._steps):
            return
        synchronize(trainer.strategy.root_device)
        seconds = time.perf_counter() - self._begin
        loss = float(trainer.callback_metrics["train/loss"])
        self._steps.append((seconds, self._tokens))
        step = trainer.global_step - 1
        self.show(Observation(pl_module.device, step, "batch", loss, seconds, self._tokens))
        self._tokens = 0

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        metrics = trainer.callback_metrics
        step = trainer.global_step
        for split, key in (("train", "train/eval_loss"), ("val", "val/loss")):
            if key in metrics:
                self.show(Observation(pl_module.device, step, split, float(metrics[key])))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        monitor = find_callback(trainer, SpeedMonitor)
        assert monitor is not None
        self.speed = RunTimings(trainer.strategy.root_device, trainer.max_steps, monitor.seconds())
        timed = self._steps[1:]
        steps, stalls = (
            without_stalls(timed, median_s(timed)) if self.each_step else monitor.steps()
        )
        self.speed.stalls = len(stalls)
        if self._steps:
            self.speed.first_step_ms = self._steps[0][0] * 1e3
        if steps:
            self.speed.step_ms = median_s(steps) * 1e3
            self.speed.tokens_per_sec = tokens_per_sec(steps)
            if monitor.peak is not None:
                self.speed.peak_flops = monitor.peak.flops
                self.speed.mfu = flops.mfu(
                    self.speed.tokens_per_sec,
                    pl_module.flops_per_token,
                    monitor.peak.flops,
                    trainer.world_size,
                )
