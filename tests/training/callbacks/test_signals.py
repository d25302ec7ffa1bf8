"""StopSignals in one process: a signal within a step, and how the run ends."""

import os
import shlex
import signal
import stat
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.parsing import program
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import find_checkpoint
from gpt_lightning.training.callbacks import signals
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.report import StepProgress
from gpt_lightning.training.fit import run_cli
from gpt_lightning.training.ranks import LoopbackEnvironment


class Sender(L.Callback):
    """Send signals to this process in the third step's batch, some seconds apart."""

    def __init__(self, *numbers: int, apart_s: float = 0.0) -> None:
        self.numbers, self.apart_s = numbers, apart_s

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 2:
            for number in self.numbers:
                os.kill(os.getpid(), number)
                time.sleep(self.apart_s)


def fit_until(sender: Sender, *args: str) -> int:
    with pytest.raises(SystemExit) as ended:
        run_cli(["fit", *TINY_RUN, "--trainer.max_steps=9", *args], callbacks=[sender])
    return ended.value.code


@pytest.fixture
def workdir(text_file, tmp_path, monkeypatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.startswith("SLURM"):
            monkeypatch.delenv(name)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    yield tmp_path
    signal.signal(signal.SIGHUP, before)


def saved(workdir: Path) -> list[str]:
    return [path.name for path in workdir.glob("lightning_logs/run/version_0/checkpoints/*.ckpt")]


def test_a_signal_saves_and_ends_with_128_and_its_number(workdir, capsys):
    number = signal.SIGHUP
    before = signal.getsignal(number)
    assert fit_until(Sender(number)) == 128 + number
    assert saved(workdir) == ["step-0000003.ckpt"]
    line, command = capsys.readouterr().err.splitlines()
    assert line == f"{number.name}: stopped after step 3; to continue:"
    words = shlex.split(command)
    assert words == [program(), "resume", "lightning_logs/run/version_0"]
    assert main(words[1:]) == 0
    assert read_checkpoint(find_checkpoint(workdir / "lightning_logs/run", last=True)).step == 9
    assert signal.getsignal(number) == before


def test_a_signal_ends_a_run_without_checkpoints(workdir, capsys, monkeypatch):
    def close(*args, **kwargs):
        print("the bar is closed", file=sys.stderr)

    monkeypatch.setattr(StepProgress, "on_train_end", close)
    assert fit_until(Sender(signal.SIGTERM), "--trainer.enable_checkpointing=false") == 143
    assert saved(workdir) == []
    assert capsys.readouterr().err == "the bar is closed\nSIGTERM: stopped after step 3\n"


def test_a_hangup_stays_ignored_under_nohup(workdir, capsys):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run_cli(["fit", *TINY_RUN, "--trainer.max_steps=4"], callbacks=[Sender(signal.SIGHUP)])
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(saved(workdir)) == 1


def test_ctrl_c_twice_at_once_saves(workdir, capsys):
    assert fit_until(Sender(signal.SIGINT, signal.SIGINT, apart_s=0.02)) == 130
    assert saved(workdir) == ["step-0000003.ckpt"]


@pytest.mark.slow
def test_a_second_ctrl_c_later_does_not_wait(workdir, capsys, monkeypatch):
    monkeypatch.setattr(signals, "TWICE_S", 0.2)
    assert fit_until(Sender(signal.SIGINT, signal.SIGINT, apart_s=0.3)) == 1  # Lightning's own
    assert saved(workdir) == []


class SenderOfEvaluations(L.Callback):
    def on_validation_batch_start(self, *args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start


@pytest.mark.parametrize("command", ["validate", "predict"])
def test_sigterm_ends_an_evaluation_at_once(workdir, command):
    run_cli(["fit", *TINY_RUN, "--trainer.max_steps=1"])
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        run_cli(
            [command, *TINY_RUN, "--ckpt_path=lightning_logs/run/version_0"],
            callbacks=[SenderOfEvaluations()],
        )
    assert ended.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_run_in_another_thread_leaves_the_handlers_alone():
    """Python lets the main thread alone set them."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    loop = SimpleNamespace(epoch_loop=SimpleNamespace())
    state = SimpleNamespace(fn="validate")
    trainer = SimpleNamespace(strategy=None, state=state, fit_loop=loop)
    errors = []

    def run() -> None:
        callback = signals.StopSignals()
        try:
            callback.on_train_start(trainer, None)
            callback.on_validation_start(trainer, None)
        except ValueError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert errors == []
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_cluster_chooses_the_signal_that_requeues_and_whether_it_does():
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    usr = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGUSR2)}
    environment = SimpleNamespace(requeue_signal=signal.SIGUSR2, auto_requeue=False)
    loop = SimpleNamespace(epoch_loop=SimpleNamespace())
    strategy = SimpleNamespace(cluster_environment=environment)
    trainer = SimpleNamespace(strategy=strategy, fit_loop=loop)
    callback = signals.StopSignals()
    try:
        callback.on_train_start(trainer, None)
        assert signal.getsignal(signal.SIGUSR2) == callback._on_signal
        assert signal.getsignal(signal.SIGUSR1) == usr[signal.SIGUSR1]
        assert not callback.requeue
    finally:
        for number, handler in (kept | usr).items():
            signal.signal(number, handler)


def test_the_command_to_continue_is_of_this_run(tmp_path, monkeypatch):
    run = tmp_path / "a b"
    run.mkdir()
    monkeypatch.setattr(signals.run_state, "run_folder", lambda trainer: run)
    strategy = SimpleNamespace(cluster_environment=LoopbackEnvironment())  # with trainer.devices
    module = SimpleNamespace(network=None)
    trainer = SimpleNamespace(strategy=strategy, lightning_module=module)
    assert signals.command_to_continue(trainer, RunCheckpoint()) == ""  # L.Trainer: no settings
    (run / "config.yaml").touch()
    command = signals.command_to_continue(trainer, RunCheckpoint())
    assert command == f"{program()} resume '{run}'"
    module.network = "my_gpt.MyGPT"
    again = signals.command_to_continue(trainer, RunCheckpoint())
    assert again == f"{command} --model.network my_gpt.MyGPT"
    mirrored = RunCheckpoint(folder=str(tmp_path))  # another machine has no such folder
    assert signals.command_to_continue(trainer, mirrored) == ""
    strategy.cluster_environment = TorchElasticEnvironment()  # torchrun, whose command is unknown
    assert signals.command_to_continue(trainer, RunCheckpoint()) == ""


# ---- SLURM --------------------------------------------------------------------------------------


@pytest.fixture
def slurm(workdir, monkeypatch) -> Path:
    """A job of SLURM with a scontrol that writes its arguments to a file."""
    tool = workdir / "bin" / "scontrol"
    tool.parent.mkdir()
    tool.write_text('#!/bin/sh\necho "$@" >> called\n')
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    return tool


def test_sigusr1_requeues_the_job(slurm, workdir, capsys):
    assert fit_until(Sender(signal.SIGUSR1)) == 138
    assert (workdir / "called").read_text() == "requeue 4711\n"
    assert saved(workdir) == ["step-0000003.ckpt"]
    assert capsys.readouterr().err.endswith("continues; job 4711 is requeued\n")


def test_an_element_of_an_array_is_requeued_alone(slurm, workdir, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert signals.requeue_job() == "job 4711_3 is requeued"


@pytest.mark.slow
def test_a_switch_requeues_nothing(slurm, workdir):
    assert fit_until(Sender(signal.SIGUSR1), "--signals.requeue=false") == 138
    assert not (workdir / "called").exists()


def test_a_requeue_that_fails_is_printed(slurm, capsys):
    slurm.write_text("#!/bin/sh\necho Access denied >&2\nexit 1\n")
    assert fit_until(Sender(signal.SIGUSR1)) == 138
    assert "job 4711 was not requeued: scontrol: Access denied\n" in capsys.readouterr().err
    slurm.unlink()
    assert "was not requeued: scontrol: No such file" in signals.requeue_job()
