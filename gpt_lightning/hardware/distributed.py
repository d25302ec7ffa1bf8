"""Process group of one machine over the loopback address, and a maximum over its ranks."""

import os
import socket
from typing import Any

import torch
from lightning.fabric.plugins import environments as envs
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# environments that Lightning detects itself
CLUSTERS = (
    envs.TorchElasticEnvironment,
    envs.SLURMEnvironment,
    envs.LSFEnvironment,
    envs.MPIEnvironment,
)
LOOPBACK = "127.0.0.1"


class LoopbackEnvironment(envs.LightningEnvironment):
    """Lightning's environment of one machine, with the ranks connected over the loopback address.

    PyTorch's own rendezvous, a TCPStore in rank 0, listens on every address of the machine, and
    any client can write into it. Here the process that starts the ranks opens the store on a
    loopback socket, and all ranks are its clients.
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
                master_listen_fd=listener.detach(),  # owned by the store from here on
            )
        os.environ["MASTER_PORT"] = str(port)
        # makes PyTorch connect to this store as a client instead of opening one
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def teardown(self) -> None:
        super().teardown()
        if self._store is not None:
            self._store, self._main_port = None, -1
            for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
                os.environ.pop(name, None)


def environment(num_nodes: int, plugins: list[Any]) -> list[envs.ClusterEnvironment]:
    """Return the plugin for a run whose ranks, if any, this process starts on this machine.

    Args:
        num_nodes: Number of machines, from the Trainer.
        plugins: Plugins of the Trainer; one of them may be an environment already.

    Returns:
        An empty list where a cluster or a launcher starts the ranks; Lightning detects that itself.
    """
    managed = any(kind.detect() for kind in CLUSTERS) or "LOCAL_RANK" in os.environ
    chosen = any(isinstance(plugin, envs.ClusterEnvironment) for plugin in plugins)
    return [] if num_nodes > 1 or managed or chosen else [LoopbackEnvironment()]


class DelayedMax:
    """Maximum over ranks, delayed by one call so that the host never waits for an idle device.

    Reading the maximum at once would wait for all work that is queued on the device. The maximum
    of the previous call is complete while the device works on what this step has queued, so that
    waiting for it leaves the device no gap. All ranks read the same number at the same call.

    Args:
        device: Device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        # on the host; the device copies into it asynchronously
        self._host = torch.zeros((), dtype=torch.int64, pin_memory=self._cuda)
        self._written: Any = None  # event after that copy

    def __call__(self, number: int) -> int:
        """Submit this rank's number; return the maximum of the previous call, at first 0."""
        if self._written is not None:
            self._written.synchronize()
        before = int(self._host)
        # torch.tensor(number, device=...) would wait for a copy to the device
        vote = torch.full((), number, dtype=torch.int64, device=self._device)
        torch.distributed.all_reduce(vote, op=torch.distributed.ReduceOp.MAX)
        self._host.copy_(vote, non_blocking=True)
        if self._cuda:
            self._written = torch.cuda.Event()
            self._written.record()
        return before
