"""Ranks of a run: their store, who starts them, what they share, and how one ends the others."""

import os
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.environments.lightning import find_free_network_port

from gpt_lightning import cli
from gpt_lightning.errors import PeerError, UserError, is_out_of_memory
from gpt_lightning.training import ranks
from gpt_lightning.training.ranks import (
    PARENT,
    LoopbackEnvironment,
    check_group,
    compare_settings,
    difference,
    environment,
    is_lost_peer,
    words,
)

LOST = RuntimeError(
    "[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"
)


@pytest.mark.parametrize("interface", [None, "eth7"])
def test_runs_of_one_process_share_a_store(interface, monkeypatch):
    for name in ("MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", "GLOO_SOCKET_IFNAME"):
        monkeypatch.setenv(name, interface or "")
    if interface is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr(LoopbackEnvironment, "_store", None)
    first = LoopbackEnvironment()
    port = first.main_port
    first.teardown()
    assert LoopbackEnvironment().main_port == port == LoopbackEnvironment._store.port
    own = "lo0" if sys.platform == "darwin" else "lo"
    assert os.environ["GLOO_SOCKET_IFNAME"] == (interface or own)


def test_a_process_group_of_an_earlier_run_must_have_the_same_ranks(monkeypatch):
    check_group(2)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    check_group(2)
    with pytest.raises(UserError, match="has connected 2 ranks, and this run has 1: start it in"):
        check_group(1)


def test_other_nodes_need_a_launcher_or_an_address(monkeypatch):
    for name in ("LOCAL_RANK", "MASTER_ADDR", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(UserError, match="num_nodes is 2, but nothing names the other nodes"):
        environment(2, [])
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("NODE_RANK", "0")
    assert environment(2, []) == []


# ---- what all ranks must share ------------------------------------------------------------------


def trainer_of(number, port, external=True):
    cluster = SimpleNamespace(
        main_address="127.0.0.1", main_port=port, creates_processes_externally=external
    )
    place = {"global_rank": number, "world_size": 2} if external else {}
    nodes = {} if external else {"node_rank": number, "num_nodes": 2}
    return SimpleNamespace(strategy=SimpleNamespace(cluster_environment=cluster), **place, **nodes)


def test_values_have_no_addresses():
    assert words(["a", object(), None]) == '["a", "<object object>", null]'


def test_the_first_difference_of_any_rank_is_found():
    facts = {"rate": "1", "seed": "2"}
    assert difference([facts, dict(facts)], "rank") == ""
    line = "machine 2 has seed None, machine 0 has 2: start all with the same command"
    assert difference([facts, facts, {"rate": "1"}], "machine").startswith(line)
    assert "rank 1 has more 3, rank 0 has None" in difference(
        [facts, facts | {"more": "3"}], "rank"
    )


@pytest.mark.parametrize(("external", "kind"), [(True, "rank"), (False, "machine")])
@pytest.mark.parametrize("theirs", ["1", "2"])
def test_processes_that_differ_all_end(external, kind, theirs, monkeypatch):
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: None)
    ends = []
    port = find_free_network_port()

    def follow():
        try:
            compare_settings(trainer_of(1, port, external), {"a": theirs, "config": "mine.yaml"})
            ends.append(0)
        except SystemExit as end:
            ends.append(end.code)

    other = threading.Thread(target=follow)
    other.start()
    if theirs == "1":
        compare_settings(trainer_of(0, port, external), {"a": "1"})
    else:
        with pytest.raises(UserError, match=f'{kind} 1 has a "2", {kind} 0 has "1": start all'):
            compare_settings(trainer_of(0, port, external), {"a": "1"})
    other.join()
    assert ends == [0 if theirs == "1" else 2]


@pytest.mark.parametrize("number", [0, 1])
def test_a_missing_rank_is_one_line_after_a_limit(number, monkeypatch):
    monkeypatch.setenv(ranks.LIMIT, "1")
    with pytest.raises(PeerError, match=r"2 ranks do not meet at 127.0.0.1:\d+: start all"):
        compare_settings(trainer_of(number, find_free_network_port()), {})


def test_a_port_that_another_program_has_is_one_line():
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        with pytest.raises(PeerError, match=r"start all of them, with a free port.*EADDRINUSE"):
            compare_settings(trainer_of(0, other.getsockname()[1]), {})


# ---- the end of all ranks -----------------------------------------------------------------------


@pytest.fixture
def launcher(monkeypatch):
    """A launcher of Lightning whose other ranks are processes that a test chooses."""
    monkeypatch.delenv(PARENT, raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(sys, "argv", [__file__])  # a worker of the tests is `python -c`
    monkeypatch.setattr(os, "_exit", sys.exit)  # ends the thread alone
    monkeypatch.setattr(threading, "excepthook", lambda args: None)

    def start(*programs):
        processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
        made = SimpleNamespace(
            procs=[*processes],
            num_processes=len(processes) + 1,
            cluster_environment=LoopbackEnvironment(),
        )
        ranks.supervise(made)
        while made.procs:
            time.sleep(0.01)
        return processes

    yield start
    ranks.end_ranks()


SLEEP = "import time; time.sleep(60)"


def wait_for(processes):
    """Wait until all processes are ended, and until the thread that has ended them is."""
    for process in processes:
        process.wait(10)
    for thread in threading.enumerate():
        if "_watch" in thread.name:
            thread.join(10)


@pytest.mark.parametrize(
    ("program", "line"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "error: rank 2 has ended with exit code -9 (SIGKILL); start the same command with "
            "--resume auto to continue\n",
        ),
        ("import sys; sys.exit(3)", "rank 2 has ended with exit code 3\n"),
    ],
)
def test_a_rank_that_fails_is_named_and_ends_the_others(program, line, launcher, capfd):
    processes = launcher(SLEEP, program)
    wait_for(processes)
    assert processes[0].returncode == -9
    assert capfd.readouterr().err == line


def test_ranks_that_end_as_they_should_have_not_failed(launcher, capfd):
    processes = launcher("import time; time.sleep(0.5)")
    assert LoopbackEnvironment().creates_processes_externally  # a second run starts none
    processes[0].wait(10)
    time.sleep(2 * ranks.POLL_S)
    assert capfd.readouterr().err == ""


def test_an_error_of_rank_0_ends_the_others_at_once(launcher, capfd):
    processes = launcher(SLEEP)
    ranks.leave(ValueError("mine"))
    wait_for(processes)
    assert processes[0].returncode == -9
    assert capfd.readouterr().err == ""


def test_only_ranks_that_this_program_starts_are_supervised(launcher, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    ranks.supervise(SimpleNamespace(cluster_environment=LightningEnvironment()))
    ranks.supervise(None)  # of fsdp2
    assert PARENT not in os.environ


def test_ranks_cannot_run_the_text_of_python_c_again(launcher, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(UserError, match=r"trainer\.devices: set it to 1 in an interactive"):
        ranks.supervise(SimpleNamespace(cluster_environment=LoopbackEnvironment()))


@pytest.mark.parametrize(("rank", "lines"), [("1", 1), ("2", 0)])
def test_a_rank_ends_with_its_parent(rank, lines, monkeypatch, capsys):
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(SystemExit, match="75"):
        ranks._follow(1)  # not the parent of this process
    line = "error: rank 0 has ended; start the same command with --resume auto to continue\n"
    assert capsys.readouterr().err == lines * line


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


def test_a_lost_rank_ends_with_75_when_no_launcher_does_it(monkeypatch, capsys):
    monkeypatch.setattr(ranks.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(cli, "dispatch", lambda argv: ranks.leave(LOST))
    assert cli.main(["fit"]) == 75
    line = "error: the connection to another rank is lost; start the same command with --resume"
    assert capsys.readouterr().err.startswith(line)
    assert not is_out_of_memory(PeerError("rank 1 was ended by SIGKILL (out of memory?)"))
