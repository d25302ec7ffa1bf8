"""RunReport: banner and summary of a run. StepProgress: a bar by optimizer step, or plain lines."""

import io
import math
import shlex
import sys
import time
from typing import Any

import torch
from jsonargparse.typing import PositiveInt
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.loggers import TensorBoardLogger
from tqdm import tqdm

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import device_name, untried_versions
from gpt_lightning.model.network import network_option
from gpt_lightning.output import wrapped
from gpt_lightning.parsing import checked, program, shell_command
from gpt_lightning.runs.logger import PAGE, RunEvents
from gpt_lightning.training import between_steps, build, run_state
from gpt_lightning.training.behaviours.step_seeds import run_seed
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.speed import SpeedMonitor, median_s, tokens_per_sec
from gpt_lightning.training.continuation import hyperparameters
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.run_state import find_callback, run_folder, total_steps

LINE_S = 60.0  # longest time between two lines of training
Facts = dict[str, str]  # name -> text of a line
# commands and an address: their lines are not broken
PASTED = ("sample", "play", "validate", "look", "in browser")
METRICS = {
    "train/loss": "loss {:.4f}",
    "perf/step_ms": "{:.1f} ms/step",
    "perf/tokens_per_sec": "{:,.0f} tokens/s",
    "perf/mfu": "MFU {:.1%}",
}


class RunReport(Callback):
    """Print a banner at the start and a summary at the end, and log the hyperparameters."""

    def __init__(self) -> None:
        self.facts: Facts = {}  # the banner
        self.trained = False  # this session has trained
        self.validated = 0  # step of the last validation

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.facts = self._banner(trainer, pl_module)
            print_facts(trainer, self.facts)

    def _banner(self, trainer: Trainer, module: GPTModule) -> Facts:
        config, settings = module.config, module.settings
        data: Any = token_data(trainer)
        compiled, why = build.compiles(module)
        products = torch.get_float32_matmul_precision()
        shape = f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide"
        if module.network:
            shape = f"network {module.network.class_path}"
        rates = f"{settings.learning_rate:g}"
        if settings.optimizer == "muon":
            rates = f"{settings.muon_learning_rate:g}, of AdamW {rates}"
        waits = "; the first step includes compilation" if compiled else ""
        facts = {
            "device": f"{device_name(trainer.strategy.root_device)} x {trainer.world_size}",
            "precision": f"{trainer.precision}, float32 products: {products}",
            "compile": f"{'on' if compiled else 'off'} ({why}){waits}",
            "attention": f"{config.attention}: {module.attention_kernel}",
            "model": f"{shape}, vocabulary {config.vocab_size:,}: "
            f"{sum(p.numel() for p in module.model.parameters()):,} parameters",
            "optimizer": f"{settings.optimizer}, learning rate {rates} ({settings.schedule})",
            "data": f"{data.address}: {data.training_tokens():,} training tokens, "
            f"{data.settings.order} order; 1 epoch = {len(data.reader.train_loader):,} batches",
            "step": str(data.step_shape),
            "run folder": str(run_folder(trainer) or "none"),
        }
        if not data.makes("train"):
            facts |= {"data": f"train_dataloader of {type(data).__name__}", "step": ""}
        if module.overrides("configure_optimizers"):
            facts["optimizer"] = f"configure_optimizers of {type(module).__name__}"
        speed = find_callback(trainer, SpeedMonitor)
        facts |= module.notes | {"peak": speed.peak_line if speed else ""}
        return facts | {"not tried": ", ".join(untried_versions())}

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.trained = True
        for logger in trainer.loggers if trainer.enable_autolog_hparams else ():
            logger.log_hyperparams(run_hyperparameters(trainer, pl_module))
        if trainer.is_global_zero:
            schedule = unfinished_schedule(pl_module, total_steps(trainer))
            print_facts(trainer, {"schedule": schedule, "validation": none_due(trainer)})

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.is_global_zero and not self.trained:
            name = "max_steps" if trainer.max_steps > 0 else "max_epochs"
            most, step = getattr(trainer, name), trainer.global_step
            least = step if name == "max_steps" else 0
            more = [f"--trainer.{name}", str(2 * max(most, least))]
            more += network_option(pl_module.network)
            again = shell_command(["resume", str(folder := run_folder(trainer)), *more])
            reason = f"trainer.{name} is {most:,}" + f"; train on with `{again}`" * bool(folder)
            if trainer.should_stop:
                reason = f"{between_steps.stop_reason(trainer)} ends the run"
            elif not trainer.num_training_batches:
                raise UserError("the training data have no batch: give a loader with one")
            print(f"nothing to do: the run is at step {step:,}, {reason}")
        elif trainer.is_global_zero:
            print()
            print_facts(trainer, self._summary(trainer, pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.validated = trainer.global_step
        split = "test" if trainer.testing else "val"
        if trainer.is_global_zero and not run_state.is_fitting(trainer):
            line = evaluation_line(trainer.callback_metrics, split)
            bits = trainer.callback_metrics.get(f"{split}/bits_per_byte")
            print(line if bits is None else f"{line}, {float(bits):.4f} bits per byte", flush=True)

    on_test_end = on_validation_end

    def _summary(self, trainer: Trainer, module: GPTModule) -> Facts:
        metrics = trainer.callback_metrics
        checkpoint = find_callback(trainer, RunCheckpoint)
        losses = [
            f"{key} {float(metrics[key]):.4f}{evaluated_part(metrics, key.partition('/')[0])}"
            for key in ("train/loss", "val/loss")
            if key in metrics
        ]
        if "val/bits_per_byte" in metrics:
            losses.append(f"{float(metrics['val/bits_per_byte']):.4f} bits per byte")
        if checkpoint and checkpoint.best_loss < math.inf:
            losses.append(f"best val/loss {checkpoint.best_loss:.4f}")
        facts = {"loss": f"{', '.join(losses)} after {trainer.global_step:,} steps"}
        if speed := find_callback(trainer, SpeedMonitor):
            facts |= speed_facts(speed, module)
        folder = run_folder(trainer)
        if checkpoint and checkpoint.enabled and folder:
            run = [str(folder), *network_option(module.network)]
            facts["sample"] = shell_command(["sample", *run])
            facts["play"] = shell_command(["play", *run])
            if self.validated < trainer.global_step and any(trainer.num_val_batches):
                facts["validate"] = shell_command(["validate", *run, "--ckpt_path", "last"])
        for events in trainer.loggers:
            if isinstance(events, TensorBoardLogger):
                facts["look"] = f"{program('tensorboard')} --logdir {shlex.quote(events.save_dir)}"
            if isinstance(events, RunEvents):
                facts["in browser"] = PAGE
        return facts


def print_facts(trainer: Trainer, facts: Facts) -> None:
    """Print each fact that is not empty, above the progress bar, in lines of a terminal's width."""
    bar = find_callback(trainer, StepProgress)
    write = bar.print if bar else print
    terminal = sys.stdout.isatty()
    for name, fact in facts.items():
        line = f"{name:<11} {fact}"
        if fact:
            write(wrapped(line, 12) if terminal and name not in PASTED else line)
    sys.stdout.flush()


def speed_facts(monitor: SpeedMonitor, module: GPTModule) -> Facts:
    """Return the run's speed, and the wall seconds by phase."""
    seconds, (steps, stalls) = monitor.seconds(), monitor.steps()
    parts, speed = ", ".join(f"{phase} {s:.1f}" for phase, s in seconds.items()), ""
    if steps:
        speed = f"{tokens_per_sec(steps):,.0f} tokens/s, median step {median_s(steps) * 1e3:.1f} ms"
    if steps and monitor.peak:
        speed += f", MFU {monitor.mfu(steps):.1%} of {monitor.peak.label}"
    if stalls:
        speed += f"; {len(stalls)} stalls left out, the longest of {max(stalls)[0]:.1f} s"
    return {"speed": speed, "time": f"{sum(seconds.values()):.1f} s: {parts}"}


def unfinished_schedule(module: GPTModule, total: int) -> str:
    """Return that a run of `total` steps ends before its schedule does, or an empty string."""
    settings = module.settings
    end = max(settings.warmup_steps, module.schedule.decay_steps if module.schedule else 0)
    if settings.schedule == "constant" or not 0 < total < end:
        return ""
    ends = f"the {settings.schedule} schedule at {end:,}, its warm-up at {settings.warmup_steps:,}"
    return f"the run ends at step {total:,}, {ends}"


def none_due(trainer: Trainer) -> str:
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


def run_hyperparameters(trainer: Trainer, module: GPTModule) -> Fields:
    """Return the arguments by which TensorBoard compares runs: the module's and the step's."""
    data: Any = token_data(trainer)
    arguments = hyperparameters(module)
    return {
        **{f"model/{key}": value for key, value in arguments.pop("config").items()},
        **arguments,
        "precision": str(trainer.precision),
        "attention_kernel": module.attention_kernel,
        "batch_size": data.settings.batch_size,
        "accumulate": trainer.accumulate_grad_batches,
        "ranks": trainer.world_size,
        "gradient_clip_val": trainer.gradient_clip_val or 0.0,
        "max_steps": trainer.max_steps,
        "dataset": data.address,
        "seed": run_seed(module),
        "device": f"{device_name(trainer.strategy.root_device)} x {trainer.world_size}",
    }


# ---- progress ------------------------------------------------------------------------------------


@checked("progress")
class StepProgress(ProgressBar):
    """Show optimizer steps, loss, tokens/s, MFU and the remaining time.

    Lightning's bars count micro-batches and epochs. On a terminal this is one bar; in a log file or
    a pipe it is a line every `plain_every_n_steps` steps, and after a minute without one. Both
    print a line for every validation.

    Args:
        plain_every_n_steps: Steps between two lines; null: twenty lines per run, at log steps if
            there are any.
    """

    def __init__(self, plain_every_n_steps: PositiveInt | None = None):
        super().__init__()
        self.plain_every_n_steps = plain_every_n_steps
        self.is_enabled = True
        self._bar: tqdm[Any] | None = None  # counts and estimates without a terminal too
        self._total = self._first = self._step = self._every = 0
        self._printed = 0.0  # time of the last line

    def disable(self) -> None:
        self.is_enabled = False

    def enable(self) -> None:
        self.is_enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line above the bar."""
        # tqdm.write iterates over all bars, and garbage collection may remove one meanwhile
        bar = tqdm(disable=True) if self._bar is None else self._bar
        bar.clear()
        print(*args, flush=True)
        bar.refresh()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = self._step = trainer.global_step
        self._total = total_steps(trainer)
        self._printed, terminal = time.monotonic(), sys.stdout.isatty()
        log_every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        self._every = self.plain_every_n_steps or line_interval(self._total, log_every)
        if self.is_enabled:
            self._bar = tqdm(
                desc=f"{self._position()} | ",
                total=self._total or None,
                initial=self._step,
                file=sys.stdout if terminal else io.StringIO(),
                dynamic_ncols=terminal,
                mininterval=0.1 if terminal else math.inf,
                smoothing=0,  # the mean rate, which includes validations
                bar_format="{desc}{remaining} left{postfix}" + " {bar}" * terminal,
            )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        step, bar, now = trainer.global_step, self._bar, time.monotonic()
        if step == self._step or bar is None:
            return
        if self._step == self._first:  # the first step compiles: its time does not count
            bar.initial = step
            bar.unpause()
        self._step = step
        due = now - self._printed >= LINE_S or step % self._every == 0
        line = due and not bar.dynamic_ncols
        if line or run_state.at_log_step(trainer, step):  # the device is synchronized
            known = trainer.callback_metrics
            parts = [text.format(float(known[k])) for k, text in METRICS.items() if k in known]
            bar.set_postfix_str(", ".join(parts), refresh=False)
        bar.set_description_str(f"{self._position()} | ", refresh=False)
        bar.update(step - bar.n)
        if line:
            self._printed = now
            self.print(bar)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # a sanity check of the whole split is an evaluation of step 0
        partial = trainer.sanity_checking and trainer.num_sanity_val_steps != math.inf
        line = evaluation_line(trainer.callback_metrics, "val")
        if line and self.is_enabled and run_state.is_fitting(trainer) and not partial:
            self.print(f"{self._position()} | {line}")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    on_exception = on_train_end

    def _position(self) -> str:
        total = f"/{self._total}" if self._total else ""
        return f"step {self._step:>{len(str(self._total))}}{total}"


def line_interval(total: int, log_every: int) -> int:
    """Return the steps between two lines: about a twentieth of a run, and a multiple of the logs.

    Args:
        total: Steps of the run; 0 if it has no end.
        log_every: Steps between two logs; without a log in the run the lines ignore it.
    """
    twentieth = max(1, total // 20) if total else 100
    if not 0 < log_every <= (total or log_every):
        return twentieth
    return log_every * max(1, twentieth // log_every)


def evaluation_line(metrics: Fields, split: str) -> str:
    """Return loss and perplexity of a split (val or test) as text; empty without a loss."""
    if f"{split}/loss" not in metrics:
        return ""
    line = "validation" if split == "val" else split
    line += f" loss {float(metrics[f'{split}/loss']):.4f}{evaluated_part(metrics, split)}"
    perplexity = metrics.get(f"{split}/perplexity")  # a step of a subclass may log the loss alone
    return line if perplexity is None else f"{line}, perplexity {float(perplexity):.2f}"


def evaluated_part(metrics: Fields, split: str) -> str:
    """Return " on N of M tokens" for an evaluation that was not of the whole split, else ""."""
    tokens = metrics.get(f"{split}/tokens")
    whole = metrics.get(f"{split}/split_tokens")
    if tokens is None:
        return ""
    part = "random" if whole is None else f"of {int(whole):,}"
    return f" on {int(tokens):,} {part} tokens"
