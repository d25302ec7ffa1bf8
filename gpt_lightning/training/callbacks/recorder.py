"""RunRecorder: losses and times of a run as they come. TokenLosses: the file of `predict`."""

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from gpt_lightning.data.loader import Batch
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, replacement
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.training import run_state
from gpt_lightning.training.callbacks import speed
from gpt_lightning.training.module import GPTModule

LOSSES_FILE = "token_losses.npy"


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
        step_ms: Median of the steps after the first, without stalls.
        tokens_per_sec: Rate of the same steps.
        mfu: Model FLOPs utilization, a fraction; None without a known peak.
        stalls: Number of steps of over ten times the median.
        attention: Attention kernel that ran.
    """

    device: torch.device
    max_steps: int
    seconds: dict[str, float]
    step_ms: float | None = None
    tokens_per_sec: float | None = None
    mfu: float | None = None
    stalls: int = 0
    attention: str = ""


@dataclass(eq=False)
class RunRecorder(Callback):
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
        speed: Timings of a run that has ended.
    """

    show: Callable[[Observation], None]
    each_step: bool
    steps: Container[int] = ()
    begin: Callable[[GPTModule], None] = lambda module: None

    def __post_init__(self) -> None:
        self.speed: RunTimings | None = None
        self._steps: speed.Steps = []
        self._begin = 0.0
        self._tokens = 0

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.begin(pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        if self.each_step and self._tokens == 0:
            synchronize(pl_module.device)
            self._begin = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Batch, *_: Any
    ) -> None:
        self._tokens += batch[0].numel() * trainer.world_size
        step, loss = trainer.global_step - 1, pl_module.last_loss
        if not run_state.at_step_boundary(trainer):
            return
        if self.each_step:
            synchronize(pl_module.device)
            timing = time.perf_counter() - self._begin, self._tokens
            loss = trainer.callback_metrics["train/loss"]  # the mean of all ranks
            self.show(Observation(pl_module.device, step, "batch", float(loss), *timing))
            self._steps.append(timing)
            self._tokens = 0
        elif step in self.steps:
            self.show(Observation(pl_module.device, step, "batch", float(loss)))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics, step, device = trainer.callback_metrics, trainer.global_step, pl_module.device
        sanity = trainer.sanity_checking
        sizes = trainer.num_sanity_val_batches if sanity else trainer.num_val_batches
        for split, key, loader in (("train", "train/eval_loss", 1), ("val", "val/loss", 0)):
            if key in metrics:
                loss, batches = float(metrics[key]), int(sizes[loader])
                self.show(Observation(device, step, split, loss, batches=batches))

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        monitor: Any = run_state.find_callback(trainer, speed.SpeedMonitor)
        kept, stalls = monitor.steps()
        if self.each_step:
            timed = self._steps[1:]
            kept, stalls = speed.without_stalls(timed, speed.median_s(timed))
        self.speed = RunTimings(
            device=trainer.strategy.root_device,  # the module is on the CPU by now
            max_steps=trainer.max_steps,
            attention=pl_module.attention_kernel,
            seconds=monitor.seconds(),
            stalls=len(stalls),
            step_ms=speed.median_s(kept) * 1e3 if kept else None,
            tokens_per_sec=speed.tokens_per_sec(kept) if kept else None,
            mfu=monitor.mfu(kept),
        )


class TokenLosses(BasePredictionWriter):
    """Write each token's loss on the validation split to the run folder's `token_losses.npy`.

    Entry i, float32 in nats, is the negative log-likelihood of the split's token i + 1 given those
    before it in its window; a split of n tokens has n - 1 entries, and their mean is `val/loss`.
    With trainer.limit_predict_batches the file has the first entries.
    """

    def __init__(self) -> None:
        super().__init__(write_interval="epoch")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "predict" and trainer.world_size > 1:
            raise UserError(
                f"predict on {trainer.world_size} devices would mix up the order: "
                "use --trainer.devices 1"
            )

    def write_on_epoch_end(
        self, trainer: Trainer, pl_module: LightningModule, predictions: Sequence[Any], *_: Any
    ) -> None:
        whole = len(trainer.predict_dataloaders.dataset.stream) - 1  # type: ignore[union-attr]
        # what is beyond the split is padding
        losses = torch.cat([batch.flatten() for batch in predictions]).numpy()[:whole]
        part = "" if losses.size == whole else f" of {whole:,}"
        text = f"{losses.size:,}{part} token losses, mean {losses.mean(dtype=np.float64):.4f} nats"
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # it leaves no files
            print(f"fast_dev_run: no file of {text}")
            return
        path = (run_state.run_folder(trainer) or Path()) / LOSSES_FILE
        with explained("write", path), replacement(path) as temporary, temporary.open("wb") as file:
            np.save(file, losses)
        print(f"{path}: {text}")
