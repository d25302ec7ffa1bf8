"""model.skip_spikes: steps that are outliers are skipped and counted, also after a resume."""

import math
from pathlib import Path

import lightning as L
import pytest
import torch
from tiny_fit import TINY_FIT, rows

from gpt_lightning.commands.check_resume import compare
from gpt_lightning.training.fit import run_cli
from gpt_lightning.training.optim import WINDOW, SpikeGuard

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]  # CI runs them
BASE = (
    *TINY_FIT,
    "--data.batch_size=4",
    "--trainer.max_steps=80",
    "--trainer.log_every_n_steps=1",
    "--trainer.limit_val_batches=0",
)


class Planted(L.Callback):
    """A spike of the gradient norm, or of the loss; notes weights and state around each step."""

    def __init__(self, step: int, of: str = "norm", stop: int | None = None) -> None:
        self.step, self.of, self.stop = step, of, stop
        self.unchanged: list[int] = []  # steps that have changed nothing
        self._before: list[torch.Tensor] = []

    def on_train_batch_start(self, trainer, module, batch, *args) -> None:
        if trainer.global_step + 1 == self.step and self.of == "loss":
            batch[1].fill_(3)  # a rare character

    def on_before_optimizer_step(self, trainer, module, optimizer) -> None:
        if trainer.global_step + 1 == self.step and self.of == "norm":
            for p in module.parameters():
                p.grad *= 1000
        self._before = self._tensors(trainer)

    def on_train_batch_end(self, trainer, *args) -> None:
        after = self._tensors(trainer)
        pairs = zip(self._before, after, strict=False)
        if len(self._before) == len(after) and all(torch.equal(a, b) for a, b in pairs):
            self.unchanged.append(trainer.global_step)
        self._before = []
        trainer.should_stop |= trainer.global_step == self.stop

    def _tensors(self, trainer) -> list[torch.Tensor]:
        states = trainer.optimizers[0].state.values()
        state = [value for held in states for value in held.values() if torch.is_tensor(value)]
        return [t.detach().clone() for t in (*trainer.lightning_module.parameters(), *state)]


def run(*args: str, name: str = "run", planted: Planted | None = None):
    callbacks = [] if planted is None else [planted]
    return run_cli(["fit", *BASE, f"--run_name={name}", *args], callbacks=callbacks)


@pytest.mark.parametrize(
    ("of", "sigmas", "kind"),
    [
        ("norm", 20, ("--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=1.0")),
        ("norm", 20, ()),
        ("loss", 6, ("--model.optimizer=muon", "--data.batch_size=64")),
    ],
)
def test_a_planted_spike_is_skipped_and_counted(of, sigmas, kind, capsys):
    planted = Planted(70, of)
    run(f"--model.skip_spikes={sigmas}", *kind, planted=planted)
    assert planted.unchanged == [70]
    err = capsys.readouterr().err
    assert "step 70 skipped: " in err
    assert err.count("skipped:") == 1
    counts = [row["optim/skipped_steps"] for row in rows()]
    assert counts == [0.0] * 69 + [1.0] * 11


@pytest.mark.parametrize("stop", [66, 70])
def test_a_resumed_run_skips_the_same_steps(stop, capsys):
    options = ("--model.skip_spikes=0.5", "--model.config.dropout=0.1", "--model.compile=false")
    whole, first, second = Planted(0), Planted(0, stop=stop), Planted(0)
    run(*options, name="whole", planted=whole)
    run(*options, planted=first)
    run(*options, "--resume=auto", planted=second)
    assert first.unchanged + second.unchanged == whole.unchanged
    assert len(whole.unchanged) > 1  # half a standard deviation is often exceeded
    found = compare(*(Path("lightning_logs") / name / "version_0" for name in ("whole", "run")))
    assert all(found.values()), found


def test_the_guards_law():
    guard = SpikeGuard(3.0, {})
    values = [1.0 + 0.1 * math.sin(step) for step in range(200)]
    assert not any(guard.spike(value, 1.0 + value) for value in values)
    assert guard.spike(math.nan, 1.0) == guard.spike(1.0, math.inf) == ""
    same = SpikeGuard(3.0, guard.state())
    window = values[-WINDOW:]
    mean = sum(window) / WINDOW
    sigma = math.sqrt(sum((value - mean) ** 2 for value in window) / WINDOW)
    for found in (guard, same):
        assert found.spike(mean + 2.99 * sigma, 2.0) == ""
        assert found.spike(mean + 3.2 * sigma, 2.0).startswith("loss 1.2")
        assert found.spike(1.0, 9.0).startswith("gradient norm 9 is more than 3 standard")
        assert found.skipped == 2
    for _ in range(WINDOW):  # a new level is accepted
        guard.spike(5.0, 2.0)
    assert guard.skipped < WINDOW // 2
