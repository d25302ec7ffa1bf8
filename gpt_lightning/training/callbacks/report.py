"""RunReport: banner at the start of a run, summary at its end."""

import math
import shlex
import shutil
import sys
import textwrap
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from gpt_lightning.hardware.device import device_name, missing_names
from gpt_lightning.parsing import program
from gpt_lightning.runs.logger import PAGE, RunEvents
from gpt_lightning.training import steps
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.progress import evaluated_part, evaluation_line, total_steps
from gpt_lightning.training.callbacks.speed import SpeedMonitor, median_s, tokens_per_sec
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.steps import StepShape, find_callback, run_folder, stop_reason


class RunReport(L.Callback):
    """Print a banner at the start and a summary at the end, and log the hyperparameters."""

    def __init__(self) -> None:
        self.trained = False  # this session has trained

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        for logger in trainer.loggers if trainer.enable_autolog_hparams else ():
            logger.log_hyperparams(run_hyperparameters(trainer, pl_module))
        if trainer.is_global_zero:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
            for line in self._banner(trainer, pl_module):
                print(textwrap.fill(line, width, subsequent_indent=" " * 12), flush=True)

    def _banner(self, trainer: L.Trainer, module: GPTModule) -> list[str]:
        config, settings, data = module.config, module.settings, token_data(trainer)
        assert data is not None
        compiled, why = module.compiles
        k, W = trainer.accumulate_grad_batches, trainer.world_size
        products = torch.get_float32_matmul_precision()
        shape = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide"
        if module.network is not None:
            shape = f"network {module.network.class_path}"
        waits = "; the first step takes as long as compiling does" if compiled else ""
        facts = {
            "device": f"{device_name(trainer.strategy.root_device)} x {W}",
            "precision": f"{trainer.precision}, float32 products: {products}",
            "compile": f"{'on' if compiled else 'off'} ({why}){waits}",
            "attention": f"{config.attention}: {module.attention_kernel}",
            "model": f"{shape}, vocabulary {config.vocab_size:,}: "
            f"{sum(p.numel() for p in module.model.parameters()):,} parameters",
            "optimizer": f"{settings.optimizer}, learning rate {settings.learning_rate:g} "
            f"({settings.schedule})",
            "data": f"{data.address}: {data.training_tokens():,} training tokens, "
            f"{data.settings.order} order; 1 epoch = {len(data.reader.train_loader):,} batches",
            "step": str(StepShape(data.batch_size, data.block_size, k, W)),
            "run folder": str(run_folder(trainer) or "none"),
        }
        speed = find_callback(trainer, SpeedMonitor)
        facts |= module.notes | {"peak": "" if speed is None else speed.peak_line}
        facts["missing"] = "; ".join(missing_names(loaded=True))
        return [f"{name:<11} {fact}" for name, fact in facts.items() if fact]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        self.trained = True
        notes = {
            "schedule": unfinished_schedule(trainer, pl_module),
            "validation": none_due(trainer),
        }
        for name, note in notes.items():
            if note and trainer.is_global_zero:
                print(f"{name:<11} {note}", flush=True)

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        if trainer.is_global_zero and not self.trained:
            ended = f"trainer.max_steps is {trainer.max_steps:,}"
            reason = f"{stop_reason(trainer)} ends the run" if trainer.should_stop else ended
            print(f"nothing to do: the run is at step {trainer.global_step:,}, {reason}")
        elif trainer.is_global_zero:
            print("\n".join(self._summary(trainer, pl_module)), flush=True)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        split = "test" if trainer.testing else "val"
        if trainer.is_global_zero and not steps.is_fitting(trainer):
            print(evaluation_line(trainer.callback_metrics, split), flush=True)

    on_test_end = on_validation_end

    def _summary(self, trainer: L.Trainer, module: GPTModule) -> list[str]:
        metrics, steps = trainer.callback_metrics, f"{trainer.global_step:,}"
        losses = [
            f"{key} {float(metrics[key]):.4f}{evaluated_part(metrics, key.partition('/')[0])}"
            for key in ("train/loss", "val/loss")
            if key in metrics
        ]
        checkpoint = find_callback(trainer, RunCheckpoint)
        speed = find_callback(trainer, SpeedMonitor)
        if checkpoint is not None and checkpoint.best_loss < math.inf:
            losses.append(f"best val/loss {checkpoint.best_loss:.4f}")
        lines = ["", f"loss        {', '.join(losses)} after {steps} steps"]
        if speed is not None:
            lines += speed_lines(speed, trainer, module)
        folder = run_folder(trainer)
        if checkpoint is not None and checkpoint.enabled and folder is not None:
            lines.append(f"sample      {program()} sample {shlex.quote(str(folder))}")
        for events in trainer.loggers:
            if isinstance(events, TensorBoardLogger):
                logs = shlex.quote(str(events.save_dir))
                lines.append(f"look        {program('tensorboard')} --logdir {logs}")
            if isinstance(events, RunEvents):
                lines.append(f"in browser  {PAGE}")
        return lines


def speed_lines(monitor: SpeedMonitor, trainer: L.Trainer, module: GPTModule) -> list[str]:
    """Return a line with the run's speed and a line with the wall seconds by phase."""
    seconds, (steps, stalls) = monitor.seconds(), monitor.steps()
    parts = ", ".join(f"{phase} {s:.1f}" for phase, s in seconds.items())
    lines = [f"time        {sum(seconds.values()):.1f} s: {parts}"]
    if steps:
        speed = f"{tokens_per_sec(steps):,.0f} tokens/s, median step {median_s(steps) * 1e3:.1f} ms"
        if monitor.peak is not None:
            speed += f", MFU {monitor.mfu(steps, trainer, module):.1%} of {monitor.peak.label}"
        if stalls:
            speed += f"; {len(stalls)} stalls left out, the longest of {max(stalls)[0]:.1f} s"
        lines.insert(0, f"speed       {speed}")
    return lines


def unfinished_schedule(trainer: L.Trainer, module: GPTModule) -> str:
    """Return that the run ends before its schedule does, or an empty string."""
    settings, total = module.settings, total_steps(trainer)
    decay_steps = trainer.max_steps if settings.decay_steps is None else settings.decay_steps
    end = max(settings.warmup_steps, decay_steps)
    if settings.schedule == "constant" or not 0 < total < end:
        return ""
    where = f"before the {settings.schedule} decay's end at {end:,}"
    if total <= settings.warmup_steps:
        where = f"in the warm-up of {settings.warmup_steps:,} steps"
    return f"the run ends at step {total:,}, {where}"


def none_due(trainer: L.Trainer) -> str:
    """Return why the run has no validation, or an empty string if it has one."""
    if trainer.limit_val_batches == 0:
        return "none: trainer.limit_val_batches is 0"
    if not sum(trainer.num_val_batches):
        return "none: the data have no validation split"
    every, in_epoch = trainer.check_val_every_n_epoch, trainer.val_check_batch
    epoch = trainer.num_training_batches
    first = in_epoch or 0  # no number: it is a time
    if every is not None and in_epoch is not None:
        first = (every - 1) * epoch + min(in_epoch, epoch)
    micro_batches = total_steps(trainer) * trainer.accumulate_grad_batches
    if not 0 < micro_batches < first:
        return ""
    fix = f"; --trainer.val_check_interval {micro_batches} validates at its end"
    text = f"none: the first is due after {first:,} micro-batches, the run has {micro_batches:,}"
    return text + fix * ((every or 1) == 1)


def run_hyperparameters(trainer: L.Trainer, module: GPTModule) -> dict[str, Any]:
    """Return the arguments by which TensorBoard compares runs: the module's and the step's."""
    data = token_data(trainer)
    assert data is not None
    hyperparameters = module.hyperparameters()
    return {
        **{f"model/{key}": value for key, value in hyperparameters.pop("config").items()},
        **hyperparameters,
        "precision": str(trainer.precision),
        "attention_kernel": module.attention_kernel,
        "batch_size": data.batch_size,
        "accumulate": trainer.accumulate_grad_batches,
        "ranks": trainer.world_size,
        "gradient_clip_val": trainer.gradient_clip_val or 0.0,
        "max_steps": trainer.max_steps,
        "dataset": data.address,
        "seed": module.run_seed(),
        "device": f"{device_name(trainer.strategy.root_device)} x {trainer.world_size}",
    }
