"""Watchdog over a main thread that pretends to hang."""

import gc
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from gpt_lightning.hardware.distributed import PARENT, RankLauncher
from gpt_lightning.training.callbacks import signals as watchdog_module
from gpt_lightning.training.callbacks.signals import ANSWER_S, Watchdog


class Noted(Watchdog):
    """Notes an end instead of ending the process."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.ends, self.given = [], []

    def _end(self, trainer, reason, code):
        self.ends.append((reason, code))
        self.limit_s, self.grace_s = None, 1e9

    def waits(self, seconds: float) -> list:
        until = time.monotonic() + seconds
        while not self.ends and time.monotonic() < until:
            time.sleep(0.02)
        return self.ends


@pytest.fixture
def watchdog():
    made = []

    def make(world_size=2, **settings):
        made.append(Noted(**settings))
        trainer = SimpleNamespace(world_size=world_size, global_rank=0, strategy=SimpleNamespace())
        trainer.strategy.launcher = object.__new__(RankLauncher)
        trainer.strategy.launcher.kill = made[0].given.append
        made[0].setup(trainer, None, "fit")
        return made[0]

    gc.collect()  # files that earlier tests have left open
    before = signal.signal(signal.SIGTERM, lambda *args: None)
    files = len(os.listdir("/dev/fd"))
    yield make
    made[0].teardown()
    made[0].teardown()  # Lightning calls it after an exception, too
    until = time.monotonic() + 5
    while len(os.listdir("/dev/fd")) > files and time.monotonic() < until:
        time.sleep(0.01)  # the thread closes its end
    assert len(os.listdir("/dev/fd")) == files
    signal.signal(signal.SIGTERM, before)
    assert signal.set_wakeup_fd(-1) == -1


def test_no_progress_ends_the_run(watchdog):
    assert watchdog(limit_s=0.2).waits(5) == [("no progress for 0.2 s (watchdog.limit_s)", 75)]


@pytest.mark.slow
def test_progress_does_not(watchdog):
    dog = watchdog(limit_s=0.6)
    for _ in range(6):
        dog.on_train_batch_start()
        time.sleep(0.2)
    assert dog.ends == []


def test_one_rank_and_no_limit_are_not_watched(watchdog):
    assert watchdog(world_size=1, limit_s=0.1).waits(0.7) == []


def test_a_signal_to_a_hung_batch_ends_the_run(watchdog):
    dog = watchdog(grace_s=0.3)
    dog.on_train_batch_start()
    os.kill(os.getpid(), signal.SIGTERM)
    ((reason, code),) = dog.waits(5)
    assert reason == "SIGTERM, but no batch has ended for 0 s (watchdog.grace_s)"
    assert code == 143
    assert dog.given == [signal.SIGTERM]  # to the other ranks, which this one may wait for


@pytest.mark.slow
def test_a_signal_waits_for_a_long_batch_and_for_a_save(watchdog):
    dog = watchdog(grace_s=0.1)
    dog.on_train_batch_start()
    dog._beat_s -= 1.0
    dog.on_train_batch_end()  # a batch of one second, so two are granted
    os.kill(os.getpid(), signal.SIGTERM)
    assert dog.waits(0.9) == []
    dog.on_save_checkpoint()  # rank 0 writes, the others wait for it
    assert dog.waits(1.5) == []


@pytest.mark.slow
def test_signals_of_loader_workers_are_none(watchdog):
    before = signal.signal(signal.SIGCHLD, lambda *args: None)
    try:
        dog = watchdog(grace_s=0.1)
        dog.on_train_batch_start()
        subprocess.run([sys.executable, "-c", ""], check=True)
        assert dog.waits(0.8) == []
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_the_end_prints_the_stacks_and_the_advice(monkeypatch, capfd):
    monkeypatch.setattr(os, "_exit", sys.exit)
    trainer = SimpleNamespace(global_rank=0, strategy=SimpleNamespace(launcher=None))
    with pytest.raises(SystemExit) as ended:
        Watchdog()._end(trainer, "no progress for 5 s", 75)
    assert ended.value.code == 75
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == "rank 0: no progress for 5 s; its threads:"
    assert any("in test_the_end_prints_the_stacks" in line for line in lines)
    assert lines[-1].startswith("error: no progress for 5 s (above: the stacks")
    assert lines[-1].endswith("start the same command with --resume auto to continue")


def test_a_rank_that_a_launcher_started_ends_its_launcher_when_nobody_answers(monkeypatch, capfd):
    killed, ended = [], []
    monkeypatch.setenv(PARENT, "4711")
    monkeypatch.setattr(watchdog_module.time, "sleep", lambda seconds: ended.append(seconds))
    monkeypatch.setattr(watchdog_module.os, "kill", lambda *args: killed.append(args))
    monkeypatch.setattr(watchdog_module.os, "_exit", lambda code: ended.append(code))
    trainer = SimpleNamespace(global_rank=1, strategy=SimpleNamespace(launcher=None))
    Watchdog()._end(trainer, "no progress", 75)
    assert killed == [(4711, signal.SIGKILL)]
    assert ended == [2 * ANSWER_S, 75]
    assert "rank 1: no progress; its threads:" in capfd.readouterr().err
