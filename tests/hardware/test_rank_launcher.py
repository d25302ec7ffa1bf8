"""RankLauncher with processes that only sleep: the ends of ranks, and the exit code."""

import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment

from gpt_lightning import cli
from gpt_lightning.errors import PeerError, is_out_of_memory
from gpt_lightning.hardware import distributed
from gpt_lightning.hardware.distributed import LoopbackEnvironment, RankLauncher, is_lost_peer

LOST = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
)
SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def launcher(monkeypatch):
    """A launcher whose second rank is a process that a test chooses."""
    monkeypatch.setenv("LOCAL_RANK", "0")  # the launcher sets it
    monkeypatch.setattr(distributed, "PATIENCE_S", 1.0)
    monkeypatch.setattr(sys, "argv", [__file__])  # a worker of the tests is `python -c`
    launcher = RankLauncher(LoopbackEnvironment(), 2, 1)
    launcher.command = SLEEP

    def start() -> None:
        environment = os.environ | {"LOCAL_RANK": "1"}
        launcher.procs = [subprocess.Popen(launcher.command, env=environment)]

    monkeypatch.setattr(launcher, "_call_children_scripts", start)
    yield launcher
    launcher.end(0.0)


def raises(error: Exception):
    def function(*args):
        raise error

    return function


def test_a_rank_that_is_killed_is_named(launcher):
    def function():
        launcher.procs[0].kill()
        raise LOST

    with pytest.raises(PeerError, match=r"^rank 1 was ended by SIGKILL .*; start the"):
        launcher.launch(function)
    assert not is_out_of_memory(PeerError("rank 1 was ended by SIGKILL (out of memory?)"))


def test_the_exit_code_of_a_rank_with_an_error_is_the_jobs(launcher):
    launcher.command = [sys.executable, "-c", "import sys; sys.exit(2)"]
    with pytest.raises(SystemExit) as ended:
        launcher.launch(raises(LOST))
    assert ended.value.code == 2


def test_an_error_of_rank_0_ends_the_others_at_once(launcher):
    with pytest.raises(ValueError, match="mine"):
        launcher.launch(raises(ValueError("mine")))
    assert launcher.procs[0].poll() == -9


@pytest.mark.slow
def test_a_lost_connection_without_a_failed_rank_stays_itself(launcher):
    with pytest.raises(RuntimeError) as ended:
        launcher.launch(raises(LOST))
    assert ended.value is LOST


def test_the_result_is_returned_and_ranks_are_waited_for(launcher):
    launcher.command = [sys.executable, "-c", "import time; time.sleep(0.3)"]
    assert launcher.launch(lambda: 42) == 42
    launcher.end(10.0)
    assert launcher.procs[0].poll() == 0


def test_ranks_that_are_ended_have_not_failed(launcher):
    launcher._ended = threading.Event()
    launcher.end(0.0)
    assert launcher._ended.is_set()  # before they are killed: the watching thread looks for it


@pytest.mark.slow
def test_a_rank_0_that_hangs_ends_when_another_fails(launcher, monkeypatch):
    ended = []
    monkeypatch.setattr(distributed, "leave", lambda *end: ended.append(end))

    def function():
        launcher.procs[0].kill()
        time.sleep(1.5)

    launcher.launch(function)
    ((reason, code),) = ended
    assert reason.startswith("rank 1 was ended by SIGKILL")
    assert code == 75


def test_only_ranks_that_this_program_starts_are_supervised(monkeypatch):
    class Strategy:
        launcher = None

        def __init__(self, environment):
            self.launcher = self._launcher = distributed.ScriptLauncher(environment, 2, 1)

    monkeypatch.delenv("LOCAL_RANK", raising=False)
    own, external = Strategy(LoopbackEnvironment()), Strategy(LightningEnvironment())
    distributed.supervise(own)
    monkeypatch.setenv("LOCAL_RANK", "1")
    distributed.supervise(external)
    assert isinstance(own._launcher, RankLauncher)
    assert not isinstance(external._launcher, RankLauncher)


def test_a_rank_ends_with_its_parent(monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as ended:
        distributed._outlive(1)  # not the parent of this process
    assert ended.value.code == 75
    line = "error: rank 0 has ended; start the same command with --resume auto to continue\n"
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (LOST, True),
        (torch.distributed.DistNetworkError("The client socket has timed out after 60s"), True),
        (torch.distributed.DistBackendError("NCCL error: invalid usage, Duplicate GPU"), False),
        (RuntimeError("[enforce fail at gloo/device.cc] Unable to find interface eth7"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # an error of a remote dataset
    ],
)
def test_which_errors_are_of_another_rank(error, lost):
    assert is_lost_peer(error) is lost


def test_the_command_line_ends_with_75(monkeypatch, capsys):
    monkeypatch.setattr(cli, "dispatch", raises(PeerError("rank 1 was ended by SIGKILL")))
    assert cli.main(["fit"]) == 75
    assert capsys.readouterr().err == "error: rank 1 was ended by SIGKILL\n"


@pytest.mark.parametrize(
    ("codes", "ended"),
    [
        ([0, None], None),
        ([0, 2, 1], SystemExit(2)),
        ([None, 1, 75], SystemExit(75)),
        ([2, -9, -15], "rank 3 was ended by SIGTERM; "),
        ([2, -9, None], "rank 2 was ended by SIGKILL (out of memory?); "),
    ],
)
def test_a_killed_rank_comes_before_the_highest_exit_code(codes, ended):
    launcher = RankLauncher(LoopbackEnvironment(), len(codes) + 1, 1)
    launcher.procs = [SimpleNamespace(poll=lambda code=code: code) for code in codes]
    failure = launcher._failure(0.0)
    if isinstance(ended, str):
        assert isinstance(failure, PeerError)
        assert str(failure).startswith(ended)
    else:
        assert (failure and failure.code) == (ended and ended.code)
