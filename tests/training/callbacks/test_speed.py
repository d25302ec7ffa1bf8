"""SpeedMonitor in a real training loop on a clock of our own: every number can be worked out."""

import math

import lightning as L
import pytest
import torch

from gpt_lightning.model import flops
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training.callbacks import speed
from gpt_lightning.training.callbacks.speed import (
    PhaseClock,
    SpeedMonitor,
    median_s,
    without_stalls,
)
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule

MS = 1e-3


class FakeTime:
    """A clock that only work moves: training 10 ms a micro-batch, validation 1 s, a file 5 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Work(GPTModule):
    def __init__(self, time: FakeTime, slow_step: int = -1, slow_s: float = 1.0) -> None:
        super().__init__(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=16, vocab_size=None))
        self.time = time
        self.slow_step, self.slow_s = slow_step, slow_s

    def training_step(self, batch, batch_idx):
        self.time.now += 10 * MS
        if self.trainer.global_step == self.slow_step:
            self.time.now += self.slow_s
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.time.now += 1.0
        super().validation_step(batch, batch_idx)


class SlowFile(L.Callback):
    """Stands for what saves a checkpoint after a validation."""

    def __init__(self, time: FakeTime) -> None:
        self.time = time

    def on_validation_end(self, trainer, pl_module):
        with speed.phase(trainer, "checkpoint"):
            self.time.now += 5.0


class Rows(L.Callback):
    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step % trainer.log_every_n_steps == 0:
            metrics = {k: float(v) for k, v in trainer.callback_metrics.items()}
            self.rows[trainer.global_step] = metrics


def run(text_file, monkeypatch, monitor=None, slow_step=-1, slow_s=1.0, max_steps=8, accumulate=1):
    time = FakeTime()
    monkeypatch.setattr(speed, "record_event", lambda device: time())
    monitor = monitor or SpeedMonitor(peak_flops=1e9, warmup_steps=2)
    monitor.clock = PhaseClock("start-up", now=time)
    rows, module = Rows(), Work(time, slow_step, slow_s)
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=max_steps,
        log_every_n_steps=4,
        accumulate_grad_batches=accumulate,
        val_check_interval=3 * accumulate,
        check_val_every_n_epoch=None,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[monitor, rows, SlowFile(time)],
    )
    data = TokenDataModule(
        text_file=str(text_file),
        data_dir=str(text_file.parent),
        tokenizer="char",
        block_size=16,
        batch_size=4,
    )
    trainer.fit(module, data)
    return trainer, module, monitor, rows.rows, time


@pytest.mark.parametrize("accumulate", [1, 3])
def test_rates_count_steps_and_nothing_else(text_file, monkeypatch, accumulate):
    _, module, monitor, rows, _ = run(text_file, monkeypatch, accumulate=accumulate)
    step_tokens = 4 * 16 * accumulate
    for step in (4, 8):  # validation (1 s) and the file (5 s) after steps 3 and 6 are left out
        assert rows[step]["perf/step_ms"] == pytest.approx(10 * accumulate)
        assert rows[step]["perf/tokens_per_sec"] == pytest.approx(64 / (10 * MS))
        assert rows[step]["perf/tokens"] == step * step_tokens
        expected = flops.mfu(6400.0, module.flops_per_token, 1e9)
        assert rows[step]["perf/mfu"] == pytest.approx(expected)
    assert monitor.tokens == 8 * step_tokens


def test_rates_are_of_all_ranks_and_mfu_is_of_all_their_peaks(text_file, monkeypatch):
    _, module, alone, one, _ = run(text_file, monkeypatch)
    monkeypatch.setattr(L.Trainer, "world_size", property(lambda self: 4))
    _, _, monitor, rows, _ = run(text_file, monkeypatch)
    for step in (4, 8):
        assert rows[step]["perf/tokens"] == 4 * one[step]["perf/tokens"]
        assert rows[step]["perf/tokens_per_sec"] == pytest.approx(4 * 6400)
        assert rows[step]["perf/mfu"] == pytest.approx(
            flops.mfu(6400.0, module.flops_per_token, 1e9)
        )
    assert monitor.tokens == 4 * alone.tokens


def test_the_median_hides_no_slow_step_from_the_rate(text_file, monkeypatch):
    _, _, _, rows, _ = run(text_file, monkeypatch, slow_step=6, slow_s=0.08)
    assert rows[8]["perf/step_ms"] == pytest.approx(10)  # steps of 10, 10, 90 and 10 ms
    assert rows[8]["perf/tokens_per_sec"] == pytest.approx(4 * 64 / 0.12)


def test_a_stall_is_no_part_of_the_rate(text_file, monkeypatch):
    _, _, monitor, rows, _ = run(text_file, monkeypatch, slow_step=6, slow_s=1.0)
    assert rows[8]["perf/tokens_per_sec"] == pytest.approx(3 * 64 / 0.03)
    assert monitor.seconds()["stalls"] == pytest.approx(1.01)


def test_warm_up_is_kept_apart(text_file, monkeypatch):
    _, _, monitor, rows, _ = run(text_file, monkeypatch, slow_step=1)
    assert rows[4]["perf/tokens_per_sec"] == pytest.approx(6400)
    assert monitor.clock.seconds()["compile and warm-up"] == pytest.approx(1.02)


def test_the_phases_add_up_to_the_wall_time(text_file, monkeypatch):
    _, _, monitor, _, time = run(text_file, monkeypatch)
    seconds = monitor.clock.seconds()
    assert seconds["validation"] == pytest.approx(2.0)
    assert seconds["checkpoint"] == pytest.approx(10.0)
    assert seconds["train"] == pytest.approx(6 * 10 * MS)
    assert sum(seconds.values()) == pytest.approx(time.now)


def test_the_report_names_rate_median_and_phases(text_file, monkeypatch):
    trainer, module, monitor, _, _ = run(text_file, monkeypatch)
    rate, split = monitor.report(trainer, module)
    assert "6,400 tokens/s, median step 10.0 ms, MFU" in rate
    assert "validation 2.0" in split
    assert "checkpoint 10.0" in split


def test_without_a_peak_there_is_no_mfu_but_a_reason(text_file, monkeypatch):
    monitor = SpeedMonitor(peak_flops="auto", warmup_steps=0)
    _, _, monitor, rows, _ = run(text_file, monkeypatch, monitor)
    assert "perf/mfu" not in rows[4]
    assert monitor.peak_line.startswith("no MFU")


def test_the_token_count_survives_a_checkpoint():
    monitor, other = SpeedMonitor(), SpeedMonitor()
    monitor.tokens = 12345
    other.load_state_dict(monitor.state_dict())
    assert other.tokens == 12345


def test_model_flops_are_those_of_the_runs_context():
    module = GPTModule(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=64, vocab_size=50))
    module.configure_model()
    n = module.model.num_params(embeddings=False)
    assert module.flops_per_token == 6 * n + 12 * 2 * 32 * 64
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_stall_is_over_ten_times_the_median_and_counts_for_nothing():
    steps = [(0.1, 100)] * 20 + [(1.01, 100), (0.99, 100), (1967.0, 100)]
    kept, stalls = without_stalls(steps, median_s(steps))
    assert stalls == [(1.01, 100), (1967.0, 100)]
    assert len(kept) == 21
    assert median_s([]) == math.inf  # nothing to compare with: nothing is a stall


def test_the_report_keeps_stalls_out_of_the_rates_and_apart_in_time():
    monitor = SpeedMonitor()
    monitor.clock = PhaseClock("train", now=iter([0.0, 30.0]).__next__)
    monitor._measured = [(0.5, 100)] * 40 + [(10.0, 100)]
    lines = monitor.report(None, None)
    assert lines[0] == (
        "speed       200 tokens/s, median step 500.0 ms; 1 stalls left out, the longest of 10.0 s"
    )
    assert lines[1] == "time        30.0 s: train 20.0, stalls 10.0"
