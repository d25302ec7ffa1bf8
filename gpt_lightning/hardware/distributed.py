"""Where the ranks of one machine meet: at an address that no other machine can reach."""

import os
import socket
from typing import Any

import torch
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# what Lightning looks for itself
CLUSTERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
LOOPBACK = "127.0.0.1"


class LoopbackEnvironment(LightningEnvironment):
    """Lightning's environment of one machine, whose ranks meet at the loopback address.

    PyTorch's own meeting place, a TCPStore in rank 0, listens at every address of the machine, and
    whoever connects can write into it. Here the process that starts the ranks opens the store on a
    socket of its own, and all ranks are its clients.
    """

    def __init__(self) -> None:
        super().__init__()
        self._store: TCPStore | None = None

    @property
    def main_address(self) -> str:
        return LOOPBACK

    @property
    def main_port(self) -> int:
        if self._store is None:
            self._open()
        return super().main_port

    def _open(self) -> None:
        with socket.socket() as listener:
            listener.bind((LOOPBACK, 0))
            listener.listen()
            port = listener.getsockname()[1]
            self._store = TCPStore(
                LOOPBACK,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),  # the store's from here on
            )
        os.environ["MASTER_PORT"] = str(port)
        # PyTorch's word for: the store is there, be a client of it
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def teardown(self) -> None:
        super().teardown()
        if self._store is not None:
            self._store, self._main_port = None, -1
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
                os.environ.pop(name, None)


def environment(num_nodes: int, plugins: list[Any]) -> list[ClusterEnvironment]:
    """The plugin for a run whose ranks, if any, this process starts on this machine.

    Args:
        num_nodes: Trainer's.
        plugins: Trainer's; one of them may say where the ranks are.

    Returns:
        Nothing where a cluster or a launcher starts the ranks, which Lightning finds out itself.
    """
    managed = any(kind.detect() for kind in CLUSTERS) or "LOCAL_RANK" in os.environ
    chosen = any(isinstance(plugin, ClusterEnvironment) for plugin in plugins)
    return [] if num_nodes > 1 or managed or chosen else [LoopbackEnvironment()]


class DelayedMax:
    """The largest number of any rank, as of the call before.

    Reading a sum over ranks at once would wait for everything that the device has been handed.
    What was handed to it a step ago is done by the time that it works on this step's share, which
    is queued already: waiting for that leaves it no gap. All ranks read the same number at the same
    call.

    Args:
        device: Of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        # on the host, where the device writes it in its own time
        self._host = torch.zeros((), dtype=torch.int64, pin_memory=self._cuda)
        self._written: Any = None  # the event after it

    def __call__(self, number: int) -> int:
        """Hands in this rank's number; returns the largest of the call before, first 0."""
        if self._written is not None:
            self._written.synchronize()
        before = int(self._host)
        # torch.tensor(number, device=...) would copy, and wait for the copy
        vote = torch.full((), number, dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX)
        self._host.copy_(vote, non_blocking=True)
        if self._cuda:
            self._written = torch.cuda.Event()
            self._written.record()
        return before
