"""A run that trainer.should_stop has ended, or max_steps, goes on as if it had never stopped."""

import contextlib
import functools
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, Timer
from tiny_fit import TINY_MODEL

from gpt_lightning.commands.check_resume import compare, final_checkpoint
from gpt_lightning.training import fit

pytestmark = [pytest.mark.usefixtures("own_folder"), pytest.mark.slow]  # CI runs them
BASE = (
    *TINY_MODEL,
    "--data.text_file=text.txt",
    "--data.tokenizer=char",
    "--data.batch_size=32",  # 6 steps of 4 micro-batches an epoch
    "--trainer.accumulate_grad_batches=4",
    "--trainer.log_every_n_steps=1",
)
SLOW = pytest.mark.slow
STEPS = ("--trainer.max_steps=15",)
EPOCHS = ("--trainer.max_epochs=3", "--trainer.max_steps=-1", "--model.decay_steps=18")
BY_STEPS = ("--trainer.check_val_every_n_epoch=null", "--trainer.val_check_interval=12")


class Stop(L.Callback):
    """Sets trainer.should_stop at a micro-batch, in one of the hooks of a callback."""

    def __init__(self, micro_batch: int, hook: str = "on_train_batch_end") -> None:
        self.micro_batch = micro_batch
        setattr(self, hook, self._stop)

    def _stop(self, trainer, *args, **kwargs) -> None:
        trainer.should_stop |= trainer.fit_loop.total_batch_idx + 1 == self.micro_batch


class Depleted(Timer):
    """max_time that is over at a micro-batch."""

    def __init__(self, micro_batch: int) -> None:
        super().__init__(duration={"seconds": 1000})
        self.micro_batch = micro_batch

    def on_train_batch_end(self, trainer, *args, **kwargs) -> None:
        if trainer.fit_loop.total_batch_idx + 1 == self.micro_batch:
            self._offset = 2000
        super().on_train_batch_end(trainer, *args, **kwargs)


def run(name: str, *args: str, callbacks: tuple[L.Callback, ...] = ()) -> L.Trainer:
    argv = ["fit", *BASE, f"--run_name={name}", *args]
    return fit.run_cli(argv, callbacks=[*callbacks]).trainer


def folder(name: str) -> Path:
    return Path("lightning_logs") / name / "version_0"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a function that trains without a cut, once for all tests with the same options."""

    @functools.cache
    def train(*args: str, callbacks: tuple[L.Callback, ...] = ()) -> Path:
        text = Path("text.txt").read_text()
        with contextlib.chdir(tmp_path_factory.mktemp("whole")):
            Path("text.txt").write_text(text)
            run("whole", *args, callbacks=callbacks)
            return folder("whole").absolute()

    return train


def must_be(whole: Path, *args: str, callbacks: tuple[L.Callback, ...] = ()) -> None:
    """Resume the run `cut`, and compare it by bytes with one that is not cut."""
    run("cut", *args, "--resume=auto", callbacks=callbacks)
    found = compare(whole, folder("cut"))
    assert all(found.values()), found
    one, other = (final_checkpoint(path) for path in (whole, folder("cut")))
    assert one["callbacks"]["SpeedMonitor"] == other["callbacks"]["SpeedMonitor"]
    key = "epoch_progress"
    assert one["loops"]["fit_loop"][key] == other["loops"]["fit_loop"][key]


@pytest.mark.parametrize(
    ("kind", "stop", "step"),
    [
        ((*STEPS, "--trainer.accumulate_grad_batches=6"), Stop(8), 2),
        ((*STEPS, *BY_STEPS), Stop(10), 3),  # a validation is due at the step's end
        (EPOCHS, Stop(38), 10),
    ],
)
def test_a_stop_waits_for_the_end_of_the_step(kind, stop, step, whole):
    assert run("cut", *kind, callbacks=(stop,)).global_step == step
    must_be(whole(*kind), *kind)


@pytest.mark.parametrize("kind", [STEPS, (*EPOCHS, *BY_STEPS)])
@pytest.mark.parametrize(
    "stop",
    [
        Stop(1),
        Stop(12),
        Stop(12, "on_validation_end"),
        Stop(23),
        Depleted(9),
        Stop(24, "on_validation_end"),
        Stop(24, "on_train_epoch_end"),
        Stop(24, "on_train_epoch_start"),
        Stop(31, "on_train_batch_start"),
    ],
)
def test_a_stop_at_any_moment(kind, stop, whole):
    run("cut", *kind, callbacks=(stop,))
    must_be(whole(*kind), *kind)


def early_stopping(**changes) -> EarlyStopping:
    return EarlyStopping("val/loss", patience=1, min_delta=9.0, **changes)


@pytest.mark.parametrize("kind", [EPOCHS, pytest.param((*EPOCHS, *BY_STEPS), marks=SLOW)])
def test_early_stopping_ends_with_its_validation(kind, whole):
    trainer = run("cut", *kind, callbacks=(early_stopping(),))
    step = 6 if BY_STEPS[0] in kind else 12
    assert trainer.global_step == step
    must_be(whole(*kind), *kind)


@pytest.mark.parametrize("stop", [(), (Stop(5),)])
def test_an_epoch_that_ends_before_its_validation_has_no_loss_to_stop_at(stop, whole):
    steps, longer = 8 if stop else 2, "--trainer.max_steps=8"
    run("cut", f"--trainer.max_steps={steps}", callbacks=(early_stopping(), *stop))
    must_be(whole(longer), longer, callbacks=(early_stopping(),))


def test_a_stop_names_its_reason_and_the_way_on(capsys):
    run("cut", *STEPS, callbacks=(Stop(9),))
    line = "trainer.should_stop: stopped after step 3; --resume auto continues"
    assert line in capsys.readouterr().err
    run("timed", *STEPS, callbacks=(Depleted(9),))
    line = (
        "max_time: stopped after step 3; --resume auto with a larger --trainer.max_time continues"
    )
    assert line in capsys.readouterr().err
    run("early", *STEPS, *BY_STEPS, callbacks=(early_stopping(),))
    assert "EarlyStopping: Monitored metric val/loss" in capsys.readouterr().err


def test_min_steps_comes_before_a_stop(whole):
    enough = ("--trainer.min_steps=7", "--trainer.min_epochs=1")
    assert run("cut", *STEPS, *enough, callbacks=(Stop(9),)).global_step == 7
    must_be(whole(*STEPS), *STEPS)


@pytest.mark.parametrize(
    ("short", "long"),
    [
        (EPOCHS, ("--trainer.max_epochs=4", *EPOCHS[1:])),
        (("--trainer.max_steps=9",), (*STEPS, "--trainer.check_val_every_n_epoch=2")),
        pytest.param(("--trainer.max_steps=12",), STEPS, marks=SLOW),
        pytest.param(("--trainer.max_steps=10",), EPOCHS, marks=SLOW),
    ],
)
def test_a_finished_run_goes_on_as_if_it_had_not_ended(short, long, whole):
    run("cut", *long, *short)
    must_be(whole(*long), *long)


def test_a_finished_run_goes_on_from_its_own_weights_not_from_their_average(whole):
    average = ("--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.5")
    run("cut", *average, "--trainer.max_steps=7")
    must_be(whole(*STEPS, *average), *STEPS, *average)


def test_samples_are_drawn_with_the_weights_of_the_validation_loss(monkeypatch):
    seen = []

    def record(model, prompt, *args, **kwargs):
        seen.append(model.transformer.wte.weight.detach().clone())
        return prompt

    monkeypatch.setattr("gpt_lightning.model.generate.generate", record)
    average = ("--trainer.callbacks+=EMAWeightAveraging", "--trainer.callbacks.decay=0.5")
    run("cut", *average, "--trainer.max_steps=6", "--samples.max_new_tokens=1")
    saved = final_checkpoint(folder("cut"))
    name = "model.transformer.wte.weight"
    assert torch.equal(saved["state_dict"][name], seen[0])
    assert not torch.equal(saved["current_model_state"][name], seen[0])
