"""SpeedMonitor in a real training loop on a clock of our own: every number can be worked out."""

import math
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.loops import evaluation_loop, fit_loop, training_epoch_loop
from tiny_fit import quiet_trainer, tiny_config, tiny_data
from torch.utils.data import DataLoader

from gpt_lightning.data.loader import EvalBatches, TrainBatches
from gpt_lightning.model import flops
from gpt_lightning.runs.history import read_events
from gpt_lightning.training.between_steps import StepCallback
from gpt_lightning.training.callbacks import speed
from gpt_lightning.training.callbacks.speed import (
    PhaseClock,
    SpeedMonitor,
    median_s,
    without_stalls,
)
from gpt_lightning.training.module import GPTModule

MS = 1e-3


class FakeTime:
    """A clock that only work moves.

    Reading a batch takes 2 ms, training on it 8 ms, writing a log 3 ms, starting the workers of a
    validation 0.5 s, a validation batch 1 s, and a file 5 s.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.workers_s, self.file_s = 0.5, 5.0

    def __call__(self) -> float:
        return self.now


class Work(GPTModule):
    def __init__(self, time: FakeTime, slow_step: int = -1, slow_s: float = 1.0) -> None:
        super().__init__(tiny_config())
        self.time = time
        self.slow_step, self.slow_s = slow_step, slow_s

    def training_step(self, batch, batch_idx):
        self.time.now += 8 * MS
        if self.trainer.global_step == self.slow_step:
            self.time.now += self.slow_s
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.time.now += 1.0
        super().validation_step(batch, batch_idx)


class SlowFile(StepCallback):
    """Stands for what saves a checkpoint, after a validation or between two steps."""

    def __init__(self, time: FakeTime, every_n_steps: int = 0) -> None:
        self.time, self.every_n_steps = time, every_n_steps
        self.saved = 0

    def on_validation_end(self, trainer, pl_module):
        if not self.every_n_steps:
            self._save(trainer)

    def between_batches(self, trainer):
        step = trainer.global_step
        if self.every_n_steps and step % self.every_n_steps == 0 and step > self.saved:
            self.saved = step
            self._save(trainer)

    def _save(self, trainer):
        with speed.phase(trainer, "checkpoint"):
            self.time.now += self.time.file_s


class SlowLogs(Logger):
    """Takes 3 ms to write a row."""

    name, version = "slow", 0

    def __init__(self, time: FakeTime) -> None:
        super().__init__()
        self.time, self.rows = time, []

    def log_metrics(self, metrics, step=None):
        self.time.now += 3 * MS
        self.rows.append(metrics)

    def log_hyperparams(self, *args):
        pass


class Rows(L.Callback):
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % trainer.log_every_n_steps == 0:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
            self.rows[trainer.global_step] = metrics


@pytest.fixture
def time(monkeypatch):
    """The clock of SpeedMonitor, of Lightning's time-based validation, and of the loaders."""
    time, in_order, begin = FakeTime(), TrainBatches.in_order, DataLoader.__iter__

    def slow_reads(batches, *args):
        for batch in in_order(batches, *args):
            time.now += 2 * MS
            yield batch

    def slow_begin(loader):
        time.now += time.workers_s if isinstance(loader.dataset, EvalBatches) else 0.0
        return begin(loader)

    monkeypatch.setattr(TrainBatches, "in_order", slow_reads)
    monkeypatch.setattr(DataLoader, "__iter__", slow_begin)
    monkeypatch.setattr(speed, "record_event", lambda device: time())
    for loop in (fit_loop, training_epoch_loop, evaluation_loop):
        monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=time))
    return time


def run(
    text_file,
    time,
    monitor=None,
    slow_step=-1,
    slow_s=1.0,
    accumulate=1,
    every_n_steps=0,
    time_interval=None,
    **trainer,
):
    monitor = monitor or SpeedMonitor(peak_flops=1e9, warmup_steps=2)
    if monitor.clock.now is not time:
        monitor.clock = PhaseClock("start-up", now=time)
    rows, module = Rows(), Work(time, slow_step, slow_s)
    settings = {
        "max_steps": 8,
        "val_check_interval": 3 * accumulate,
        "check_val_every_n_epoch": None,
        "limit_val_batches": 1,
        "num_sanity_val_steps": 0,
    }
    loop = quiet_trainer(
        **settings | trainer,
        log_every_n_steps=4,
        accumulate_grad_batches=accumulate,
        logger=SlowLogs(time),
        use_distributed_sampler=False,
        callbacks=[SlowFile(time, every_n_steps), monitor, rows],
    )
    loop._val_check_time_interval = time_interval
    loop.fit(module, tiny_data(text_file))
    return loop, module, monitor, rows.rows


@pytest.mark.parametrize(
    "other",
    [
        {},
        {"every_n_steps": 1},
        {"every_n_steps": 3},
        {"every_n_steps": 2, "limit_val_batches": 0},
        {"num_sanity_val_steps": 1},
        {"time_interval": 0.015},  # validations by time: after every second step
        {"limit_train_batches": 3, "val_check_interval": 1.0, "check_val_every_n_epoch": 1},
        {"accumulate": 3},
        {"accumulate": 3, "every_n_steps": 1},
    ],
    ids=str,
)
def test_rates_count_steps_and_nothing_else(text_file, time, other):
    accumulate = other.get("accumulate", 1)
    _, module, monitor, rows = run(text_file, time, **other)
    step_tokens, step_ms = 4 * 16 * accumulate, 10 * accumulate
    for step, steps, total_ms in ((4, 2, 2 * step_ms), (8, 4, 4 * step_ms + 3)):  # 3: of the log
        rate = steps * step_tokens / (total_ms * MS)
        assert rows[step]["perf/step_ms"] == pytest.approx(step_ms)
        assert rows[step]["perf/tokens_per_sec"] == pytest.approx(rate)
        assert rows[step]["perf/tokens"] == step * step_tokens
        assert rows[step]["perf/mfu"] == pytest.approx(flops.mfu(rate, module.flops_per_token, 1e9))
    seconds = monitor.seconds()
    assert min(seconds.values()) >= 0
    assert sum(seconds.values()) == pytest.approx(time.now)
    assert seconds["train"] == pytest.approx((6 * step_ms + 3) * MS)
    assert "stalls" not in seconds


def test_rates_are_of_all_ranks_and_mfu_is_of_all_their_peaks(text_file, time, monkeypatch):
    _, module, alone, one = run(text_file, time)
    monkeypatch.setattr(L.Trainer, "world_size", property(lambda self: 4))
    monkeypatch.setattr("gpt_lightning.training.ranks.compare_data", lambda *args: None)
    _, _, monitor, rows = run(text_file, time)
    for step in (4, 8):
        for key in ("perf/tokens", "perf/tokens_per_sec"):
            assert rows[step][key] == pytest.approx(4 * one[step][key])
        assert rows[step]["perf/mfu"] == pytest.approx(one[step]["perf/mfu"])
    assert rows[4]["perf/mfu"] == pytest.approx(flops.mfu(6400.0, module.flops_per_token, 1e9))
    assert monitor.tokens == 4 * alone.tokens


def test_a_validation_in_the_middle_of_a_step_is_no_part_of_it(text_file, time):
    """A rate is of whole steps, whichever micro-batch Lightning validates after."""
    time.workers_s = 0.0
    _, _, monitor, rows = run(text_file, time, accumulate=4, time_interval=0.03)
    assert rows[8]["perf/step_ms"] == pytest.approx(40)
    seconds = monitor.seconds()
    assert seconds["validation"] > 5.0
    assert seconds["train"] == pytest.approx((6 * 40 + 3) * MS)
    assert sum(seconds.values()) == pytest.approx(time.now)


def test_the_median_hides_no_slow_step_from_the_rate(text_file, time):
    _, _, _, rows = run(text_file, time, slow_step=6, slow_s=0.08)
    assert rows[8]["perf/step_ms"] == pytest.approx(11.5)  # steps of 13, 10, 90 and 10 ms
    assert rows[8]["perf/tokens_per_sec"] == pytest.approx(4 * 64 / 0.123)


def test_a_stall_is_no_part_of_the_rate(text_file, time):
    _, _, monitor, rows = run(text_file, time, slow_step=6, slow_s=1.0)
    assert rows[8]["perf/tokens_per_sec"] == pytest.approx(3 * 64 / 0.033)
    assert monitor.seconds()["stalls"] == pytest.approx(1.01)


def test_warm_up_is_kept_apart(text_file, time):
    _, _, monitor, rows = run(text_file, time, slow_step=1)
    assert rows[4]["perf/tokens_per_sec"] == pytest.approx(6400)
    assert monitor.clock.seconds()["compile and warm-up"] == pytest.approx(1.018)


def test_the_phases_add_up_to_the_wall_time(text_file, time):
    _, _, monitor, _ = run(text_file, time)
    expected = {
        "start-up": 2 * MS,  # the first batch
        "compile and warm-up": 2 * 10 * MS - 2 * MS,
        "train": 6 * 10 * MS + 3 * MS,
        "validation": 2 * (1.5 + 3 * MS),  # with the log of its loss
        "checkpoint": 10.0,
        "wrap-up": 3 * MS,  # the last log
    }
    assert monitor.seconds() == pytest.approx(expected)
    assert time.now == pytest.approx(sum(expected.values()))


def test_the_timeline_has_the_phases_and_the_stalls(text_file, time, monkeypatch, tmp_path):
    monkeypatch.setattr(
        speed.run_state, "run_logger", lambda trainer: SimpleNamespace(folder=tmp_path)
    )
    _, _, monitor, _ = run(text_file, time, slow_step=6, slow_s=1.0)
    begin, *phases, tokens, end = read_events(tmp_path)
    assert tokens["perf/tokens"] == monitor.tokens
    assert (begin["event"], begin["step"], begin["steps"]) == ("begin", 0, 8)
    assert (end["event"], end["step"], end["state"]) == ("end", 8, "finished")
    seconds: dict = {}
    for row in phases:
        seconds[row["name"]] = seconds.get(row["name"], 0.0) + row["seconds"]
    expected = monitor.seconds()
    del expected["train"], expected["start-up"], expected["wrap-up"]
    expected["stall"] = expected.pop("stalls")
    assert seconds == pytest.approx(expected, abs=1e-3 * len(phases))


def test_the_logged_token_count_is_exact_beyond_float32(text_file, time):
    monitor = SpeedMonitor(peak_flops="auto")
    monitor.load_state_dict({"tokens": 3 * 16_777_217})
    trainer, *_ = run(text_file, time, monitor)
    logged = [row["perf/tokens"] for row in trainer.logger.rows if "perf/tokens" in row]
    # also with the validations after the steps 3 and 6
    assert logged == [3 * 16_777_217 + step * 64 for step in (3, 4, 6, 8)]


def test_a_second_session_of_a_process_has_rates_of_its_own(text_file, time):
    _, _, monitor, _ = run(text_file, time, slow_step=4, slow_s=0.08)
    first = time.now
    time.now += 100.0
    _, _, _, rows = run(text_file, time, monitor)
    assert rows[4]["perf/tokens_per_sec"] == pytest.approx(6400)  # a warm-up of its own
    assert len(monitor.steps()[0]) == 6
    assert sum(monitor.seconds().values()) == pytest.approx(time.now - first - 100.0)


def test_every_moment_belongs_to_one_phase():
    time = FakeTime()
    clock = PhaseClock("start-up", now=time)
    for phase, seconds in (("start-up", 1), ("train", 2), ("checkpoint", 4), ("train", 16)):
        clock.switch(phase)
        time.now += seconds
    assert clock.seconds() == {"start-up": 1, "train": 18, "checkpoint": 4}


def test_a_stall_is_over_ten_times_the_median_and_counts_for_nothing():
    steps = [(0.1, 100)] * 20 + [(1.01, 100), (0.99, 100), (1967.0, 100)]
    kept, stalls = without_stalls(steps, median_s(steps))
    assert stalls == [(1.01, 100), (1967.0, 100)]
    assert len(kept) == 21
    assert median_s([]) == math.inf  # nothing to compare with: nothing is a stall


def test_the_device_has_finished_before_the_phase_changes(text_file, time, monkeypatch):
    """Without the wait a GPU's work would count as the phase after it."""
    order, switch = [], PhaseClock.switch

    def noted(clock, phase):
        order.append(phase)
        switch(clock, phase)

    monkeypatch.setattr(PhaseClock, "switch", noted)
    monkeypatch.setattr(speed, "synchronize", lambda device: order.append("wait"))
    run(text_file, time)
    phases = [place for place, word in enumerate(order) if word != "wait"]
    assert {order[place] for place in phases} >= {"validation", "train", "wrap-up"}
    assert all(order[place - 1] == "wait" for place in phases)
