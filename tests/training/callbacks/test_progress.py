"""StepProgress: the time that is left, and the steps at which it prints a line."""

import math
import os
import pty
import select
import struct
import sys
import termios
from fcntl import ioctl
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.trainer.states import TrainerFn
from tqdm import tqdm

from gpt_lightning.training.callbacks import report as module
from gpt_lightning.training.callbacks.report import StepProgress


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """A clock that stands at clock.now, tqdm's too."""
    time = SimpleNamespace(now=1000.0)
    time.monotonic = lambda: time.now
    monkeypatch.setattr(module, "time", time)
    monkeypatch.setattr("tqdm.std.time", lambda: time.now)
    return time


def trainer_of(**changes) -> SimpleNamespace:
    settings = {
        "global_step": 0,
        "is_global_zero": True,
        "callback_metrics": {},
        "log_every_n_steps": 1,
        "max_steps": 40,
        "max_epochs": None,
        "sanity_checking": False,
        "num_sanity_val_steps": 2,
        "num_sanity_val_batches": [2],
        "num_val_batches": [50, 50],
        "val_dataloaders": None,
        "state": SimpleNamespace(fn=TrainerFn.FITTING),
    }
    return SimpleNamespace(**settings | changes)


def trained(progress: StepProgress, trainer: SimpleNamespace, steps: int) -> None:
    progress.on_train_start(trainer, None)
    for _ in range(steps):
        progress.on_train_batch_end(trainer, None, None, None, 0)  # a micro-batch of no step
        trainer.global_step += 1
        progress.on_train_batch_end(trainer, None, None, None, 0)


@pytest.mark.parametrize(
    ("every", "log_every", "max_steps", "expected"),
    [
        (None, 3, 120, list(range(6, 121, 6))),  # twenty lines
        (None, 50, 40, list(range(2, 41, 2))),  # no log in the run
        (7, 1, 40, [7, 14, 21, 28, 35]),
    ],
)
def test_lines_without_a_terminal(clock, capsys, every, log_every, max_steps, expected):
    trainer = trainer_of(log_every_n_steps=log_every, max_steps=max_steps)
    trained(StepProgress(every), trainer, max_steps)
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == expected
    width = len(str(max_steps))
    assert lines[0].startswith(f"step {expected[0]:>{width}}/{max_steps} | ")


def test_a_resumed_run_counts_from_its_step(clock, capsys):
    trainer, progress = trainer_of(global_step=30), StepProgress(5)
    progress.on_train_start(trainer, None)
    for _ in range(5):
        clock.now += 2.0
        trainer.global_step += 1
        progress.on_train_batch_end(trainer, None, None, None, 0)
    assert capsys.readouterr().out == "step 35/40 | 00:10 left\n"


def test_a_switched_off_bar_prints_nothing(clock, capsys):
    progress, trainer = StepProgress(1), trainer_of()
    progress.disable()
    trained(progress, trainer, 3)
    clock.now += 100
    progress.on_validation_end(trainer, None)
    assert capsys.readouterr().out == ""


def test_a_sanity_check_of_some_batches_has_no_result(clock, capsys):
    metrics = {"val/loss": 2.0, "val/perplexity": 7.389}
    progress = StepProgress(100)
    checking = {"callback_metrics": metrics, "sanity_checking": True}
    progress.on_validation_end(trainer_of(**checking), None)
    assert capsys.readouterr().out == ""
    progress.on_validation_end(trainer_of(**checking, num_sanity_val_steps=math.inf), None)
    assert "2.0000" in capsys.readouterr().out
    progress.on_validation_end(trainer_of(callback_metrics={}), None)
    assert capsys.readouterr().out == ""


def test_a_minute_without_a_line_ends_with_one(clock, capsys):
    progress, trainer = StepProgress(100), trainer_of(max_steps=400)
    progress.on_train_start(trainer, None)
    for _ in range(200):
        clock.now += 7.0
        trainer.global_step += 1
        progress.on_train_batch_end(trainer, None, None, None, 0)
    steps = [int(line.split("/")[0].split()[1]) for line in capsys.readouterr().out.splitlines()]
    # 9 steps of 7 s are the first that take a minute, and a line at 100 begins another one
    assert steps == [*range(9, 100, 9), 100, *range(109, 200, 9), 200]


class Terminal:
    """A terminal of some columns in place of sys.stdout."""

    def __init__(self, monkeypatch, columns: int) -> None:
        tqdm._instances.clear()  # bars of other tests, below which this one would be
        self.outer, inner = pty.openpty()
        ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        monkeypatch.setattr(sys, "stdout", os.fdopen(inner, "w"))  # pytest has set it before

    def drawn(self) -> str:
        found = b""
        while select.select([self.outer], [], [], 0)[0]:
            found += os.read(self.outer, 4096)
        return found.decode()


METRICS = {
    "train/loss": 1.2051,
    "perf/tokens_per_sec": 71974.0,
    "perf/mfu": 0.303,
    "perf/step_ms": 28.3,
}


@pytest.mark.parametrize("columns", [20, 50, 120])
def test_the_bar_shows_first_what_matters_most(clock, monkeypatch, columns):
    screen = Terminal(monkeypatch, columns)
    progress, trainer = StepProgress(), trainer_of(max_steps=2400, callback_metrics=METRICS)
    trained(progress, trainer, 1)
    clock.now += 2
    trainer.global_step += 1
    progress.on_train_batch_end(trainer, None, None, None, 0)
    drawn = screen.drawn().split("\r")[-1]
    progress.on_train_end()  # another bar would be drawn below it
    line = "step    2/2400 | 1:19:56 left, loss 1.2051, 28.3 ms/step, 71,974 tokens/s, MFU 30.3%"
    assert drawn.startswith(line[: columns - 1])
    assert len(drawn.rstrip()) < columns


def test_on_a_terminal_there_is_one_bar(clock, monkeypatch):
    screen = Terminal(monkeypatch, 120)
    progress = StepProgress()
    trainer = trainer_of(max_steps=10, callback_metrics={"train/loss": 1.5})
    progress.on_train_start(trainer, None)
    assert "step  0/10 | ? left" in screen.drawn()
    own = L.LightningModule()
    own.trainer = trainer_of(progress_bar_callback=progress, is_global_zero=True)
    own.print("said")
    assert "\rsaid\r\n" in screen.drawn()
    progress.on_train_end()
    trained(progress, trainer, 10)
    progress.on_train_end(trainer, None)
    assert "step 10/10 | ? left, loss 1.5000" in screen.drawn()
