"""Ranks of one machine: their connection, their exit codes, and a maximum over ranks."""

import atexit
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from lightning.fabric.plugins import environments as envs
from lightning.pytorch.strategies import Strategy, launchers
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from gpt_lightning.errors import CONTINUE, EXIT_AGAIN, PeerError, UserError

# environments that Lightning detects itself
CLUSTERS = (
    envs.TorchElasticEnvironment,
    envs.SLURMEnvironment,
    envs.LSFEnvironment,
    envs.MPIEnvironment,
)
# private in Lightning; None: its launcher stays, which ends ranks without a message
ScriptLauncher: Any = getattr(launchers, "_SubprocessScriptLauncher", None)
# variables of Kubeflow's PyTorchJob in each pod
PODS = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LOOPBACK = "127.0.0.1"
NO_COMMAND = "trainer.devices: set it to 1 in an interactive Python, or run a file"

PARENT = "GPT_LIGHTNING_PARENT"  # environment variable with the process ID of rank 0
POLL_S = 0.25
PATIENCE_S = 15.0  # longest time that a failed rank needs to end

# texts of gloo, NCCL and the rendezvous when another rank is gone
LOST_PEER = re.compile(
    "(closed|reset) by peer|likely closed|(read|write) error|broken pipe|timed out|ncclremoteerror"
)


def take_world(trainer: Any, argv: list[str]) -> list[str]:
    """Give a run the number of processes and machines that torchrun or a PyTorchJob has started.

    Args:
        trainer: Settings of the Trainer, of which `devices` and `num_nodes` may change.
        argv: Command line, whose numbers are not changed.

    Returns:
        A line for each number of a configuration file that was changed.

    Raises:
        UserError: The command line has another number: each process would train on its own.
    """
    elastic, lines = envs.TorchElasticEnvironment.detect() or PARENT in os.environ, []
    if not starts_ranks() and os.environ.keys() >= PODS:  # a process for each machine
        os.environ["NODE_RANK"] = os.environ.pop("RANK")
        os.environ["GROUP_WORLD_SIZE"] = os.environ.pop("WORLD_SIZE")
        elastic = True
    for key, what, name in (
        ("devices", "processes on this machine", "LOCAL_WORLD_SIZE"),
        ("num_nodes", "machines", "GROUP_WORLD_SIZE"),
    ):
        number, old = os.environ.get(name, ""), str(trainer[key])
        counts = old.isdigit()
        if number in ("", old) or not (counts or old in ("auto", "-1")):
            continue
        given = any(arg.partition("=")[0] == f"--trainer.{key}" for arg in argv)
        if counts and (given or not elastic):
            raise UserError(
                f"{number} {what} have been started, not {old}: give --trainer.{key} {number}"
            )
        if elastic:
            trainer[key] = int(number)
            line = f"started     {number} {what}: trainer.{key} {old} -> {number}"
            lines += [line] if counts else []
    return lines


def check_group(world_size: int) -> None:
    """Check that a process group of an earlier run in this process has the ranks of this run.

    Raises:
        UserError: It has another number of ranks, with which it would train wrongly.
    """
    group = torch.distributed.get_world_size() if torch.distributed.is_initialized() else world_size
    if group != world_size:
        raise UserError(
            f"an earlier run in this process has connected {group} ranks, and this run has "
            f"{world_size}: start it in a new process"
        )


class LoopbackEnvironment(envs.LightningEnvironment):
    """Lightning's environment of one machine, with the ranks connected over the loopback address.

    PyTorch's own rendezvous, a TCPStore in rank 0, listens on every address of the machine, and
    any client can write into it. Here the process that starts the ranks opens the store on a
    loopback socket, and all ranks are its clients. gloo would listen at the address of the host's
    name, and wait for a name that does not resolve, which is common on macOS.
    """

    # outlives a run, as the process group does: a second run in this process uses it again
    _store: ClassVar[TCPStore | None] = None

    @property
    def main_address(self) -> str:
        return LOOPBACK

    @property
    def main_port(self) -> int:
        if self._store is None:
            with socket.create_server((LOOPBACK, 0)) as listener:
                port = listener.getsockname()[1]
                LoopbackEnvironment._store = TCPStore(
                    LOOPBACK,
                    port,
                    is_master=True,
                    wait_for_workers=False,
                    master_listen_fd=listener.detach(),  # owned by the store from here on
                )
            os.environ["MASTER_PORT"] = str(port)
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
            # makes PyTorch connect to this store as a client instead of opening one
            os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        return super().main_port


def starts_ranks() -> bool:
    """Return whether a cluster or a launcher has started this process as a rank."""
    return any(kind.detect() for kind in CLUSTERS) or "LOCAL_RANK" in os.environ


def environment(num_nodes: int, plugins: list[Any]) -> list[envs.ClusterEnvironment]:
    """Return the plugin for a run whose ranks, if any, this process starts on this machine.

    Args:
        num_nodes: Number of machines, from the Trainer.
        plugins: Plugins of the Trainer; one of them may be an environment already.

    Returns:
        An empty list where a cluster or a launcher starts the ranks; Lightning detects that itself.

    Raises:
        UserError: There are other nodes or ranks, and nothing connects them.
    """
    managed = starts_ranks()
    chosen = any(isinstance(plugin, envs.ClusterEnvironment) for plugin in plugins)
    named = {"MASTER_ADDR", "NODE_RANK"} <= os.environ.keys()
    if num_nodes > 1 and not (managed or chosen or named):
        raise UserError(
            f"trainer.num_nodes is {num_nodes}, but nothing names the other nodes: start each node "
            "with torchrun or srun, or set MASTER_ADDR, MASTER_PORT and NODE_RANK on it"
        )
    if num_nodes > 1 or managed or chosen:
        return []
    if (world := os.environ.get("WORLD_SIZE") or "1") != "1":
        raise UserError(f"WORLD_SIZE is {world}, but nothing has started ranks: unset it")
    return [LoopbackEnvironment()]


class RankLauncher(ScriptLauncher or object):  # type: ignore[misc]  # any base
    """Lightning's launcher of ranks on this machine, which ends all of them if one fails.

    Lightning's observer kills rank 0 without a message. Here rank 0 prints the reason and ends with
    an exit code: 75 if a rank was killed, or the code of a rank that has printed its own error.
    """

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Start the other ranks by the command of this process, then call the function.

        Raises:
            UserError: The command cannot be run again, because it is `python -c`.
            PeerError: Another rank was killed.
            SystemExit: Another rank has printed an error; the code is that of the other rank.
        """
        is_module = sys.modules["__main__"].__spec__ is not None  # python -m
        if not is_module and not Path(sys.argv[0]).is_file():
            raise UserError(NO_COMMAND)
        self._ended = threading.Event()
        os.environ[PARENT] = str(os.getpid())
        # sets LOCAL_RANK, so that Lightning starts neither ranks nor its observer
        self._call_children_scripts()
        del os.environ[PARENT]
        atexit.register(self.end, 10.0)
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            return super().launch(function, *args, **kwargs)
        except Exception as error:
            failure = self._failure(PATIENCE_S) if is_lost_peer(error) else None
            self.end(0.0)
            if failure is None:
                raise
            raise failure from error
        finally:
            self._ended.set()

    def end(self, patience_s: float) -> None:
        """Wait for the other ranks, and kill the ranks that still run after `patience_s`."""
        self._ended.set()
        until = time.monotonic() + patience_s
        for process in self.procs:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            process.kill()
            process.wait()

    def _failure(self, patience_s: float) -> PeerError | SystemExit | None:
        """Return the failure of another rank; None if no rank fails within `patience_s`."""
        until = time.monotonic() + patience_s
        while True:
            found = [process.poll() for process in self.procs]
            ends = [(code or 0, rank) for rank, code in enumerate(found, 1)]
            code, rank = min(ends, default=(0, 0))  # a killed rank first: its code is negative
            if code < 0:
                name = signal.Signals(-code).name
                reason = " (out of memory?)" if name == "SIGKILL" else ""
                return PeerError(f"rank {rank} was ended by {name}{reason}; {CONTINUE}")
            if any(code for code, _ in ends):
                return SystemExit(max(code for code, _ in ends))
            if time.monotonic() > until or None not in found:  # none can fail any more
                return None
            time.sleep(POLL_S)

    def _watch(self) -> None:
        """End this process if another rank has failed and this one waits for it forever."""
        while (failure := self._failure(0.0)) is None:
            if self._ended.wait(POLL_S):
                return
        if not self._ended.wait(PATIENCE_S / 3):  # usually this rank fails within this time
            self.end(0.0)
            if isinstance(failure, PeerError):
                leave(str(failure), EXIT_AGAIN)
            else:
                os._exit(int(failure.code or 0))


def supervise(strategy: Strategy) -> None:
    """Make all ranks that this program starts end when one of them fails."""
    launcher: Any = strategy.launcher
    if PARENT in os.environ:
        threading.Thread(target=_outlive, args=(int(os.environ[PARENT]),), daemon=True).start()
    elif isinstance(launcher, ScriptLauncher or ()):
        cluster = launcher.cluster_environment
        if not cluster.creates_processes_externally:
            strategy._launcher = RankLauncher(cluster, launcher.num_processes, launcher.num_nodes)


def _outlive(parent: int) -> None:
    """End this rank when its parent, rank 0, has ended."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    if os.environ["LOCAL_RANK"] == "1":
        leave(f"rank 0 has ended; {CONTINUE}", EXIT_AGAIN)
    os._exit(EXIT_AGAIN)


def leave(reason: str, code: int) -> NoReturn:
    """Print a reason and end the process at once; a thread calls this if the main thread hangs."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(code)


def leave_to_launcher(trainer: Any) -> None:
    """End a rank that has lost another rank, if torchrun or a cluster has started both.

    The other rank, or the launcher, prints the error. A rank that rank 0 has started waits for its
    end.

    Raises:
        SystemExit: EXIT_AGAIN.
    """
    strategy = getattr(trainer, "strategy", None)
    environment = getattr(strategy, "cluster_environment", None)
    if PARENT in os.environ:  # rank 0 prints the reason, and ends this process meanwhile
        time.sleep(2 * PATIENCE_S)
    ours = PARENT in os.environ or isinstance(getattr(strategy, "launcher", None), RankLauncher)
    if ours or not getattr(environment, "creates_processes_externally", False):
        return
    if trainer.local_rank == 0:
        print(
            f"rank {trainer.global_rank}: another rank has ended; the reason is in its own error, "
            "or in that of the launcher",
            file=sys.stderr,
        )
    raise SystemExit(EXIT_AGAIN)


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error of a collective means that another rank is gone or hangs."""
    text = str(error).lower()
    of_ranks = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    return of_ranks and LOST_PEER.search(text) is not None
