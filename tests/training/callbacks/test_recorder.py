"""RunRecorder in a real run on a clock of our own: each number can be worked out."""

from types import SimpleNamespace

import pytest
import torch
from tiny_fit import quiet_trainer, tiny_config, tiny_data

from gpt_lightning.model import flops
from gpt_lightning.training.callbacks import recorder
from gpt_lightning.training.callbacks.recorder import RunRecorder
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.module import GPTModule

CONFIG = tiny_config()
B, T = 4, 16


class Work(GPTModule):
    """A micro-batch takes 10 ms; that of a slow step takes a second more."""

    def __init__(self, slow_step: int) -> None:
        super().__init__(CONFIG, schedule="constant")
        self.now, self.slow_step = 0.0, slow_step

    def training_step(self, batch, batch_idx):
        self.now += 0.01 + (self.trainer.global_step == self.slow_step)
        return super().training_step(batch, batch_idx)


def run(text_file, monkeypatch, each_step=True, accumulate=1, slow_step=-1, max_steps=6, **more):
    module, seen = Work(slow_step), []
    monkeypatch.setattr(recorder, "time", SimpleNamespace(perf_counter=lambda: module.now))
    # Lightning moves a module to the CPU before on_fit_end; here it goes on from there
    monkeypatch.setattr(Work, "cpu", lambda module: module.to("meta"))
    callback = RunRecorder(seen.append, each_step, **more)
    trainer = quiet_trainer(
        max_steps=max_steps,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=1,
        val_check_interval=3 * accumulate,
        limit_val_batches=1,
        num_sanity_val_steps=0,
        callbacks=[SpeedMonitor(peak_flops=1e6, warmup_steps=1), callback],
    )
    trainer.fit(module, tiny_data(text_file))
    return seen, callback.speed, module, trainer


@pytest.mark.parametrize("accumulate", [1, 3])
def test_each_step_has_its_loss_its_time_and_its_tokens(text_file, monkeypatch, accumulate):
    seen, timings, module, trainer = run(text_file, monkeypatch, accumulate=accumulate)
    steps = [one for one in seen if one.split == "batch"]
    assert [one.step for one in steps] == [0, 1, 2, 3, 4, 5]
    for one in steps:
        assert one.seconds == pytest.approx(0.01 * accumulate)
        assert one.tokens == B * T * accumulate
    assert steps[-1].loss == float(trainer.callback_metrics["train/loss"])
    evaluations = [(one.step, one.split, one.batches) for one in seen if one.split != "batch"]
    assert evaluations == [(3, "val", 1), (6, "val", 1)]
    assert seen[-1].loss == float(trainer.callback_metrics["val/loss"])
    assert (seen[-1].seconds, seen[-1].tokens) == (None, None)
    rate = B * T / 0.01
    assert (timings.max_steps, timings.device.type) == (6, "cpu")
    assert timings.step_ms == pytest.approx(10 * accumulate)
    assert timings.tokens_per_sec == pytest.approx(rate)
    assert timings.mfu == pytest.approx(flops.mfu(rate, module.flops_per_token, 1e6))
    assert timings.stalls == 0


def test_the_first_step_and_stalls_are_apart_from_the_rate(text_file, monkeypatch):
    _, timings, _, _ = run(text_file, monkeypatch, slow_step=0)
    assert timings.step_ms == pytest.approx(10)
    _, timings, _, _ = run(text_file, monkeypatch, slow_step=4)
    assert timings.stalls == 1
    assert timings.tokens_per_sec == pytest.approx(B * T / 0.01)


def test_without_the_time_of_each_step_the_times_are_the_monitors(text_file, monkeypatch):
    seen, timings, _, _ = run(text_file, monkeypatch, each_step=False)
    assert [one.split for one in seen] == ["val", "val"]
    assert timings.tokens_per_sec > 0
    assert timings.step_ms > 0
    assert set(timings.seconds) >= {"train", "validation"}


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_losses_of_some_steps_are_those_of_each(text_file, monkeypatch, accumulate):
    torch.manual_seed(0)
    every, _, _, _ = run(text_file, monkeypatch, accumulate=accumulate)
    torch.manual_seed(0)
    losses = {one.step: one.loss for one in every if one.split == "batch"}
    seen, _, module, _ = run(
        text_file, monkeypatch, each_step=False, accumulate=accumulate, steps={0, 3}
    )
    some = [(one.step, one.loss, one.seconds) for one in seen if one.split == "batch"]
    assert some == [(0, losses[0], None), (3, losses[3], None)]
    assert float(module.last_loss) == losses[5]
    assert GPTModule(CONFIG).last_loss is None


def test_it_begins_before_the_first_step(text_file, monkeypatch):
    begun = []

    def begin(module):
        (optimizer,) = module.trainer.optimizers
        begun.append((module.trainer.global_step, len(optimizer.state)))

    run(text_file, monkeypatch, each_step=False, begin=begin)
    assert begun == [(0, 0)]  # AdamW has made no update
