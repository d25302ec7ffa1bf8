"""StepProgress: a progress bar by optimizer step, and plain lines without a terminal."""

import math
import shutil
import sys
import time
from itertools import accumulate
from typing import Any

import lightning as L
from jsonargparse.typing import PositiveInt
from lightning.pytorch.callbacks import ProgressBar
from tqdm import tqdm

from gpt_lightning.parsing import checked
from gpt_lightning.training.steps import at_log_step, evaluation_batches, is_fitting

QUIET_S = 30.0  # interval of the lines that a long evaluation prints
BAR = ("train/loss", "perf/tokens_per_sec", "perf/mfu", "perf/step_ms")
LINE_S = 60.0  # longest time between two lines of training
DRAW_S = 0.1  # shortest time between two drawings of the bar
CTRL_C = 3  # columns that the bar leaves for the terminal's ^C


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
        self._bar: tqdm[Any] | None = None
        self._total = 0
        self._step = 0
        self._start: tuple[int, float] | None = None  # first step of the session, and its end
        self._evaluation = 0.0  # start of the current evaluation
        self._evaluated = 0  # its batches so far
        self._printed = 0.0  # time of the last line
        self._drawn = -math.inf  # time of the bar's last drawing
        self._known: dict[str, str] = {}  # metrics of the last log step

    def disable(self) -> None:
        self.enabled = False

    def enable(self) -> None:
        self.enabled = True

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line above the bar."""
        tqdm.write(" ".join(str(a) for a in args), file=sys.stdout)
        sys.stdout.flush()

    # ---- training ------------------------------------------------------------------------------

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._step = trainer.global_step
        self._start, self._printed = None, time.monotonic()
        self._total = total_steps(trainer)
        if not self.enabled:
            return
        if sys.stdout.isatty():
            self._bar = tqdm(
                total=self._total or None,
                initial=self._step,
                file=sys.stdout,
                dynamic_ncols=True,
                bar_format="{desc}",
            )
            self._draw(self._bar)  # the first step may take long
        if self.plain_every_n_steps is None:
            log_every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
            self.plain_every_n_steps = line_interval(self._total, log_every)

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        step = trainer.global_step
        if step == self._step or not self.enabled:
            return
        self._step = step
        now = time.monotonic()
        if self._start is None:  # the first step compiles: its time does not count
            self._start = (self._step, now)
        if self._bar is not None:
            self._bar.n = self._step
            if at_log_step(trainer, self._step):  # the device is synchronized
                self._known = format_metrics(trainer.callback_metrics)
            if now - self._drawn >= DRAW_S or self._step == self._total:
                self._drawn = now
                self._draw(self._bar)
        elif now - self._printed >= LINE_S or self._step % (self.plain_every_n_steps or 1) == 0:
            self._printed = now
            metrics = ", ".join(format_metrics(trainer.callback_metrics).values())
            self.print(" | ".join(filter(None, (self._position(), metrics, self._time_left()))))

    def _draw(self, bar: "tqdm[Any]") -> None:
        """Draw the bar: what matters most first, and blocks in the rest of the line."""
        loss, rate, mfu, step_ms = (self._known.get(key, "") for key in BAR)
        parts = [self._position(), loss, rate, self._time_left(), mfu, step_ms]
        width = shutil.get_terminal_size().columns - CTRL_C
        text = fitted([part for part in parts if part], width)
        blocks = width - len(text) - 1
        bar.bar_format = f"{{desc}} {{bar:{blocks}}}" if blocks >= 5 else "{desc}"
        bar.set_description_str(text)

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
            # overwrite the terminal's ^C
            self._bar.fp.write("\r" + " " * (shutil.get_terminal_size().columns - 1))
            self._draw(self._bar)
            self._bar.close()
            self._bar = None

    on_exception = on_train_end

    def _position(self) -> str:
        total = f"/{self._total}" if self._total else ""
        return f"step {self._step:>{len(str(self._total))}}{total}"

    def _time_left(self) -> str:
        if not self._total:
            return ""
        if self._start is None or self._start[0] == self._step:
            return "time left unknown"
        first, began = self._start
        seconds = (time.monotonic() - began) / (self._step - first) * (self._total - self._step)
        return f"{tqdm.format_interval(round(seconds))} left"


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


def format_metrics(metrics: dict[str, Any]) -> dict[str, str]:
    """Return loss, rates and MFU as text by name, without the metrics that are not logged yet."""
    formats = {
        "train/loss": "loss {:.4f}",
        "perf/step_ms": "{:.1f} ms/step",
        "perf/tokens_per_sec": "{:,.0f} tokens/s",
        "perf/mfu": "MFU {:.1%}",
    }
    return {k: text.format(float(metrics[k])) for k, text in formats.items() if k in metrics}


def fitted(parts: list[str], width: int) -> str:
    """Return the first parts that fit into a width, the first four in a shorter form if needed."""
    separator = " | "
    if len(separator.join(parts[:4])) > width:
        separator = " "
        parts = [part.replace("tokens/s", "tok/s").removeprefix("step ") for part in parts]
    lines = accumulate(parts, lambda line, part: line + separator + part)
    return max((line for line in lines if len(line) <= width), key=len, default=parts[0])


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
