"""SpeedMonitor: tokens/s, step time, MFU and wall time by phase."""

import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from jsonargparse.typing import NonNegativeInt
from lightning import LightningModule, Trainer

from gpt_lightning.data.loader import tokens_and_targets
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import (
    Timestamp,
    elapsed_s,
    peak_memory_gib,
    record_event,
    synchronize,
)
from gpt_lightning.hardware.peaks import Peak, resolve_peak
from gpt_lightning.hardware.precision import product_dtype
from gpt_lightning.model import flops
from gpt_lightning.parsing import checked
from gpt_lightning.runs.history import Timeline
from gpt_lightning.training import build, run_state
from gpt_lightning.training.between_steps import StepCallback, stop_reason
from gpt_lightning.training.datamodule import token_data
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.run_state import at_log_step, find_callback, is_fitting

Interval = tuple[Timestamp, Timestamp]  # begin and end
Steps = list[tuple[float, int]]  # seconds and tokens of steps


@checked("speed")
class SpeedMonitor(StepCallback):
    """Measure optimizer steps on the device's clock and log them at log steps.

    `perf/tokens_per_sec`: tokens of all ranks over the time since the last log. `perf/step_ms`:
    median of the same steps. `perf/mfu`: a fraction, if the device's peak is known. `perf/tokens`:
    all tokens that the run has trained on, also logged with each validation loss.
    `perf/memory_gib`: peak memory so far. `perf/data_wait_ms`: mean wait of this process for
    batches, per step.

    A step lasts from the end of the previous step, so it includes the wait for its data. Every
    other phase (validation, checkpoint, samples) stops its time, so that `train` in the report is
    the sum of the measured steps. The first steps (compilation, memory pools, caches) are kept
    apart, and so are stalls: steps of more than ten times the median, such as a laptop that slept.
    The device is synchronized at log steps and between phases only.

    Args:
        peak_flops: Peak FLOP/s of one device for MFU. auto: the published dense peak in the run's
            dtype, if there is one. measure: the best matrix product measured on this device,
            cached. a100: 312e12, nanoGPT's convention. Or a number.
        warmup_steps: Optimizer steps at the start that the rates exclude.
    """

    def __init__(
        self,
        peak_flops: str | float = "auto",
        warmup_steps: NonNegativeInt = 5,
    ):
        self.peak_setting = peak_flops
        self.warmup_steps = warmup_steps
        self.clock = PhaseClock("start-up")
        self.peak: Peak | None = None
        self.peak_line = ""
        self.tokens = 0  # all ranks and sessions of the run
        self.timeline: Timeline | None = None
        self._begin_session()

    def _begin_session(self) -> None:
        self._training = ""  # the phase that training counts as; empty before the first batch
        self._begin: Timestamp | None = None  # start of the current interval of training
        self._intervals: list[Interval] = []  # parts of the current step
        self._step_tokens = 0  # the current step's
        self._measured_steps = 0
        # steps after warm-up: intervals and tokens until they are logged, then seconds and tokens
        self._window: list[tuple[list[Interval], int]] = []
        self._measured: Steps = []

    # ---- phases --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._device = device = trainer.strategy.root_device
        if stage != "fit":
            return
        if self.clock.current != "start-up":  # another fit of this process
            self.clock = PhaseClock("start-up", self.clock.now)
            self._begin_session()
        dtype = product_dtype(trainer.precision, pl_module.settings.matmul_precision, device)
        self.peak, self.peak_line = resolve_peak(self.peak_setting, device, dtype)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        self._step, ranks = trainer.global_step, trainer.world_size
        # counted once: a network of one's own takes 0.2 s
        self._mfu_terms = self.peak and (pl_module.flops_per_token, self.peak.flops, ranks)
        self._waited = (0.0, self._step)  # seconds waited for data, and steps, at the last log
        self._enter("start-up")  # a sanity check has ended
        if (logger := run_state.run_logger(trainer)) and trainer.is_global_zero:
            self.timeline = Timeline(logger.folder)
            total, peak = run_state.total_steps(trainer), self.peak and self.peak.flops
            self.timeline.write("begin", self._step, steps=total, peak_flops=peak)
            self.clock.on_end = self._note_phase

    def _note_phase(self, name: str, seconds: float) -> None:
        known = name in ("train", "start-up") or seconds < 5e-4  # begin is after the start-up
        if self.timeline and not known:
            self.timeline.write("phase", self._step, name=name, seconds=round(seconds, 3))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_timeline(trainer, stop_reason(trainer) if trainer.should_stop else None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        with suppress(UserError):  # the exception stays the reason
            self._end_timeline(trainer, exception)

    def _end_timeline(self, trainer: Trainer, reason: BaseException | str | None) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline:
            seconds = {name: round(s, 3) for name, s in self.clock.seconds().items()}
            timeline.write("tokens", trainer.global_step, **{"perf/tokens": self.tokens})
            timeline.end(trainer.global_step, reason, seconds)

    def before_validation(self, trainer: Trainer) -> None:
        """Stop the step before the loop starts the workers of the validation loader."""
        module: Any = trainer.lightning_module
        compiling = build.evaluates_compiled(module) and "validation" not in self.clock.seconds()
        self._enter("compile and warm-up" if compiling else "validation")

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.before_validation(trainer)  # a sanity check, or one in the middle of a step

    def on_validation_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self.clock.current != "validation":  # the first batch has compiled the evaluation
            self._enter("validation")

    def between_batches(self, trainer: Trainer) -> None:
        """Continue the step's time after a validation, before its data are read."""
        if self._training:
            self._continue_step()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._enter("wrap-up")
        if self._training:  # what followed the last step is in none
            self.clock.move(total_s(self._intervals), self._training, "wrap-up")
        self._drain_window()

    def _enter(self, phase: str) -> None:
        """Begin a phase when the device has done its work; a step that goes on is interrupted."""
        if self._begin is not None:
            self._intervals.append((self._begin, record_event(self._device)))
            self._begin = None
        synchronize(self._device)
        self.clock.switch(phase)

    def _continue_step(self) -> None:
        if self._begin is None:
            self._enter(self._training)
            self._begin = record_event(self._device)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Interrupt the current phase, and the current step, by the phase `name`."""
        outer, in_step = self.clock.current, self._begin is not None
        self._enter(name)
        yield
        self._enter(outer)
        if in_step:
            self._begin = record_event(self._device)

    # ---- steps ---------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if not self._training:
            self._training = "compile and warm-up" if self.warmup_steps else "train"
        self._continue_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, *_: Any
    ) -> None:
        self._step_tokens += tokens_and_targets(batch)[0].numel() * trainer.world_size
        step = trainer.global_step
        if step == self._step:
            return  # the step goes on
        self._step = step
        end = record_event(self._device)
        self._measured_steps += 1
        if self._measured_steps > self.warmup_steps:
            self._window.append(([*self._intervals, (self._begin, end)], self._step_tokens))
        elif self._measured_steps == self.warmup_steps:
            self._training = "train"
            self._enter("train")
            end = record_event(self._device)  # a step begins inside its phase
        self.tokens += self._step_tokens
        self._step_tokens = 0
        self._begin, self._intervals = end, []
        if at_log_step(trainer, step):
            self._log(pl_module)

    def _log(self, module: GPTModule) -> None:
        self._log_tokens(module)
        module.log("perf/memory_gib", peak_memory_gib(self._device))
        if (data := token_data(module.trainer)) is not None:
            waited_s, step = self._waited
            self._waited = data.reader.train_loader.wait_s, self._step
            mean_s = (self._waited[0] - waited_s) / (self._step - step)
            module.log("perf/data_wait_ms", mean_s * 1e3)
        synchronize(self._device)
        window, stalls = without_stalls(self._drain_window(), median_s(self._measured[-100:]))
        for seconds, _ in stalls:
            self._note_phase("stall", seconds)
        if not window:
            return  # still warming up
        module.log("perf/step_ms", median_s(window) * 1e3)
        module.log("perf/tokens_per_sec", tokens_per_sec(window))
        if (mfu := self.mfu(window)) is not None:
            module.log("perf/mfu", mfu)

    def _log_tokens(self, module: LightningModule) -> None:
        # Lightning would make it a float32, which counts to 2^24
        module.log("perf/tokens", torch.tensor(self.tokens, dtype=torch.float64), batch_size=1)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if is_fitting(trainer):
            self._log_tokens(pl_module)  # the validation loss has its tokens too

    def _drain_window(self) -> Steps:
        """Return seconds and tokens of the steps since the last log, which are synchronized."""
        window = [(total_s(intervals), tokens) for intervals, tokens in self._window]
        self._measured += window
        self._window.clear()
        return window

    def mfu(self, steps: Steps) -> float | None:
        """Return the MFU of steps, a fraction of the peak; None without a step or a known peak."""
        if not steps or not self._mfu_terms:
            return None
        return flops.mfu(tokens_per_sec(steps), *self._mfu_terms)

    # ---- results -------------------------------------------------------------------------------

    def steps(self) -> tuple[Steps, Steps]:
        """Return the steps after warm-up, and the stalls."""
        return without_stalls(self._measured, median_s(self._measured))

    def seconds(self) -> dict[str, float]:
        """Return wall seconds by phase, stalls apart from training."""
        seconds = self.clock.seconds()
        stalled = sum(s for s, _ in self.steps()[1])
        if stalled:
            seconds["train"] -= stalled
            seconds["stalls"] = stalled
        return seconds

    def state_dict(self) -> Fields:
        return {"tokens": self.tokens}

    def load_state_dict(self, state_dict: Fields) -> None:
        self.tokens = state_dict["tokens"]


class PhaseClock:
    """Assign every moment to exactly one phase, so that the phases add up to the wall time.

    Args:
        phase: Phase that begins now.
        now: Clock, in seconds, monotonic.

    Attributes:
        on_end: Function that is called with the name and the seconds of a phase at its end.
    """

    def __init__(self, phase: str, now: Callable[[], float] = time.perf_counter):
        self.now = now
        self._since = self._began = now()
        self.current = phase
        self.on_end: Callable[[str, float], None] = lambda phase, seconds: None
        self._seconds: dict[str, float] = {}

    def switch(self, phase: str) -> None:
        """End the current phase and begin another, or continue one."""
        now = self.now()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        if phase != self.current:
            self.on_end(self.current, now - self._began)
            self._began = now
        self._since, self.current = now, phase

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count seconds of one phase as another."""
        self._seconds[source] -= seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def seconds(self) -> dict[str, float]:
        """Return seconds by phase, the current one up to now, in order of first appearance."""
        self.switch(self.current)
        return dict(self._seconds)


@contextmanager
def phase(trainer: Trainer, name: str) -> Iterator[None]:
    """Count the time inside as the phase `name`, if the run has a SpeedMonitor."""
    monitor = find_callback(trainer, SpeedMonitor)
    with monitor.phase(name) if monitor else nullcontext():
        yield


def total_s(intervals: list[Interval]) -> float:
    """Return the seconds of intervals; the device must have passed them."""
    return sum(elapsed_s(begin, end) for begin, end in intervals)


def median_s(steps: Steps) -> float:
    """Return the median seconds of steps; infinite if there are none."""
    return statistics.median([seconds for seconds, _ in steps] or [math.inf])


def without_stalls(steps: Steps, median_s: float) -> tuple[Steps, Steps]:
    """Split steps into those and stalls, of over ten times the median."""
    longest_s = 10 * median_s
    stalls = [step for step in steps if step[0] > longest_s]
    return [step for step in steps if step[0] <= longest_s], stalls


def tokens_per_sec(steps: Steps) -> float:
    """Return tokens over seconds of steps: a mean over time, not of rates."""
    return sum(tokens for _, tokens in steps) / sum(seconds for seconds, _ in steps)
