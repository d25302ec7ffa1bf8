"""RunReport: banner at the start of a run, summary at its end."""

import math
import shlex
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from gpt_lightning.hardware.peaks import device_name
from gpt_lightning.parsing import program
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.progress import evaluated_part
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.steps import StepShape, find_callback, run_folder, stop_reason


class RunReport(L.Callback):
    """Print a banner at the start and a summary at the end, and log the hyperparameters."""

    def __init__(self) -> None:
        self.trained = False  # in this session

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        for logger in trainer.loggers:
            logger.log_hyperparams(run_hyperparameters(trainer, pl_module))
        if trainer.is_global_zero:
            print("\n".join(self._banner(trainer, pl_module)), flush=True)

    def _banner(self, trainer: L.Trainer, module: GPTModule) -> list[str]:
        config, settings, data = module.config, module.settings, token_data(trainer)
        assert data is not None
        compiled, why = module.compiles
        k, W = trainer.accumulate_grad_batches, trainer.world_size
        products = torch.get_float32_matmul_precision()
        waits = "; the first step takes as long as compiling does" if compiled else ""
        facts = {
            "device": f"{device_name(trainer.strategy.root_device)} x {W}",
            "precision": f"{trainer.precision}, float32 products: {products}",
            "compile": f"{'on' if compiled else 'off'} ({why}){waits}",
            "model": f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, "
            f"vocabulary {config.vocab_size:,}: {module.model.num_params():,} parameters",
            "optimizer": f"{settings.optimizer}, learning rate {settings.learning_rate:g} "
            f"({settings.schedule})",
            "data": f"{data.address}: {data.training_tokens():,} training tokens, "
            f"{data.settings.order} order",
            "step": str(StepShape(data.settings.batch_size, data.block_size, k, W)),
            "run folder": str(run_folder(trainer) or "none"),
        }
        speed = find_callback(trainer, SpeedMonitor)
        if speed is not None:
            facts["peak"] = speed.peak_line
        return [f"{name:<11} {fact}" for name, fact in facts.items()]

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.trained = True

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, GPTModule)
        if trainer.is_global_zero and not self.trained:
            ended = f"trainer.max_steps is {trainer.max_steps:,}"
            reason = f"{stop_reason(trainer)} ends the run" if trainer.should_stop else ended
            print(f"nothing to do: the checkpoint is at step {trainer.global_step:,}, {reason}")
        elif trainer.is_global_zero:
            print("\n".join(self._summary(trainer, pl_module)), flush=True)

    def _summary(self, trainer: L.Trainer, module: GPTModule) -> list[str]:
        metrics, steps = trainer.callback_metrics, f"{trainer.global_step:,}"
        known = [key for key in ("train/loss", "val/loss") if key in metrics]
        losses = [f"{key} {float(metrics[key]):.4f}" for key in known]
        if "val/loss" in known:
            losses[-1] += evaluated_part(metrics, "val")
        checkpoint = find_callback(trainer, RunCheckpoint)
        speed = find_callback(trainer, SpeedMonitor)
        if checkpoint is not None and checkpoint.best_loss < math.inf:
            since = checkpoint.best_since_step
            since_text = f" since step {since:,}" if since else ""
            losses.append(f"best val/loss {checkpoint.best_loss:.4f}{since_text}")
        outcome = f"loss        {', '.join(losses)} after {steps} steps"
        lines = ["", outcome if losses else f"steps       {steps}, none logged in this session"]
        if speed is not None:
            lines += speed.report(trainer, module)
        folder = run_folder(trainer)
        if checkpoint is not None and checkpoint.enabled and folder is not None:
            lines.append(f"sample      {program()} sample {shlex.quote(str(folder))}")
        for events in trainer.loggers:
            if isinstance(events, TensorBoardLogger):
                logs = shlex.quote(str(events.save_dir))
                lines.append(f"look        {program('tensorboard')} --logdir {logs}")
        return lines


def run_hyperparameters(trainer: L.Trainer, module: GPTModule) -> dict[str, Any]:
    """Return the arguments by which TensorBoard compares runs: the module's and the step's."""
    data = token_data(trainer)
    assert data is not None
    hyperparameters = module.hyperparameters()
    return {
        **{f"model/{key}": value for key, value in hyperparameters.pop("config").items()},
        **hyperparameters,
        "precision": str(trainer.precision),
        "batch_size": data.settings.batch_size,
        "accumulate": trainer.accumulate_grad_batches,
        "ranks": trainer.world_size,
        "gradient_clip_val": trainer.gradient_clip_val or 0.0,
        "max_steps": trainer.max_steps,
        "dataset": data.address,
    }
