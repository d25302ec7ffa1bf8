"""StepProgress: a progress bar by optimizer step, and plain lines without a terminal."""

import io
import math
import sys
import time
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveInt
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from gpt_lightning.parsing import checked
from gpt_lightning.training.steps import at_log_step, evaluation_batches, is_fitting

QUIET_S = 30.0  # interval of the lines that a long evaluation prints
LINE_S = 60.0  # longest time between two lines of training
METRICS = {
    "train/loss": "loss {:.4f}",
    "perf/step_ms": "{:.1f} ms/step",
    "perf/tokens_per_sec": "{:,.0f} tokens/s",
    "perf/mfu": "MFU {:.1%}",
}


@checked("progress")
class StepProgress(ProgressBar):
    """Show optimizer steps, loss, tokens/s, MFU and the remaining time.

    Lightning's bars count micro-batches and epochs. On a terminal this is one bar; in a log file or
    a pipe it is a line every `plain_every_n_steps` steps, and after a minute without one. Both
    print a line for every validation, and for every half minute of a long one.

    Args:
        plain_every_n_steps: Steps between two lines; null: twenty lines per run, at log steps if
            there are any.
    """

    def __init__(self, plain_every_n_steps: PositiveInt | None = None) -> None:
        super().__init__()
        self.plain_every_n_steps: int | None = plain_every_n_steps
        self.enabled = True
        self._bar: tqdm[Any] | None = None  # counts and estimates without a terminal too
        self._total = self._first = self._step = 0
        self._metrics = ""  # of the last log step or line
        self._evaluation = 0.0  # start of the current evaluation
        self._evaluated = 0  # its batches so far
        self._printed = 0.0  # time of the last line

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line above the bar."""
        tqdm.write(" ".join(str(a) for a in args), file=sys.stdout)
        sys.stdout.flush()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._first = self._step = trainer.global_step
        self._total = total_steps(trainer)
        self._printed, terminal = time.monotonic(), sys.stdout.isatty()
        if self.plain_every_n_steps is None:
            log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
            self.plain_every_n_steps = line_interval(self._total, log_every)
        if self.enabled:
            self._bar = tqdm(
                desc=f"{self._position()} | ",
                total=self._total or None,
                initial=self._step,
                file=sys.stdout if terminal else io.StringIO(),
                dynamic_ncols=terminal,
                mininterval=0.1 if terminal else math.inf,
                smoothing=0,  # the mean rate, which includes validations
                bar_format="{desc}{remaining} left" + " {bar}" * terminal,
            )

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        step, bar, now = trainer.global_step, self._bar, time.monotonic()
        if step == self._step or bar is None:
            return
        if self._step == self._first:  # the first step compiles: its time does not count
            bar.initial = step
            bar.unpause()
        self._step = step
        line = not bar.dynamic_ncols and (
            now - self._printed >= LINE_S or step % (self.plain_every_n_steps or 1) == 0
        )
        if line or at_log_step(trainer, step):  # the device is synchronized
            known = trainer.callback_metrics
            parts = (text.format(float(known[k])) for k, text in METRICS.items() if k in known)
            self._metrics = "".join(f"{part} | " for part in [", ".join(parts)] if part)
        bar.set_description_str(f"{self._position()} | {self._metrics}", refresh=False)
        bar.update(step - bar.n)
        if line:
            self._printed = now
            self.print(bar)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._evaluation = self._printed = time.monotonic()
        self._evaluated = 0

    def on_validation_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        self._evaluated += 1
        now = time.monotonic()
        if not self.enabled or now - self._printed < QUIET_S:
            return
        self._printed = now
        total, done = int(sum(evaluation_batches(trainer))), self._evaluated
        left = tqdm.format_interval(round((now - self._evaluation) / done * (total - done)))
        self.print(f"{self._position()} | evaluation, batch {done}/{total} | {left} left")

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # a sanity check of the whole split is an evaluation of step 0
        partial = trainer.sanity_checking and trainer.num_sanity_val_steps != math.inf
        line = evaluation_line(trainer.callback_metrics, "val")
        if line and self.enabled and is_fitting(trainer) and not partial:
            self.print(f"{self._position()} | {line}")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    on_exception = on_train_end

    def _position(self) -> str:
        total = f"/{self._total}" if self._total else ""
        return f"step {self._step:>{len(str(self._total))}}{total}"


def total_steps(trainer: L.Trainer) -> int:
    """Return the optimizer steps of the whole run; 0 if it has no end.

    Trainer.estimated_stepping_batches drops the loader's state on a resume with max_epochs.
    """
    ends = [trainer.max_steps] if trainer.max_steps >= 0 else []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        steps_per_epoch = int(trainer.num_training_batches) // trainer.accumulate_grad_batches
        ends.append(trainer.max_epochs * steps_per_epoch)
    return min(ends, default=0)


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


def evaluation_line(metrics: dict[str, Any], split: str) -> str:
    """Return loss and perplexity of a split (val or test) as text; empty without them."""
    if f"{split}/loss" not in metrics:
        return ""
    loss, perplexity = float(metrics[f"{split}/loss"]), float(metrics[f"{split}/perplexity"])
    name = {"val": "validation"}.get(split, split)
    return f"{name} loss {loss:.4f}{evaluated_part(metrics, split)}, perplexity {perplexity:.2f}"


def evaluated_part(metrics: dict[str, Any], split: str) -> str:
    """Return " on N of M tokens" for an evaluation that was not of the whole split, else ""."""
    tokens, whole = metrics.get(f"{split}/tokens"), metrics.get(f"{split}/split_tokens")
    if tokens is None:
        return ""
    return f" on {int(tokens):,} " + (
        "random tokens" if whole is None else f"of {int(whole):,} tokens"
    )
