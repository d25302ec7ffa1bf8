"""The environment of ranks: their store, their process group, other nodes."""

import os
import sys

import pytest
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.hardware.distributed import LoopbackEnvironment, check_group, environment


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
