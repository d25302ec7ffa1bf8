"""Ranks of a run: who starts them, what they must share, and their end when one of them fails."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib import metadata
from typing import Any, ClassVar

from lightning import Trainer
from lightning.fabric.plugins import environments as envs
from torch import distributed as dist
from torch.distributed import DistError, Store, TCPStore, rendezvous  # type: ignore[attr-defined]

from gpt_lightning.errors import CONTINUE, EXIT_AGAIN, PeerError, UserError
from gpt_lightning.hardware.device import version

# environments that Lightning detects itself
CLUSTERS = (
    envs.TorchElasticEnvironment,
    envs.SLURMEnvironment,
    envs.LSFEnvironment,
    envs.MPIEnvironment,
)
# variables of Kubeflow's PyTorchJob in each pod
PODS = {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
LOOPBACK = "127.0.0.1"
NO_COMMAND = "trainer.devices: set it to 1 in an interactive Python, or run a file"
LIMIT = "GPT_LIGHTNING_RENDEZVOUS_S"  # environment variable: longest wait for others, in seconds
PARENT = "GPT_LIGHTNING_PARENT"  # environment variable with the process ID of rank 0
POLL_S = 0.1
LOST_S = 5.0  # time in which ranks end whose run has ended, or which have lost another one

# settings that name what each machine may have elsewhere; its content is compared later
PLACES = ("config", "ckpt_path", "data.data_dir", "data.dataset", "data.text_file")
SAME = "start all with the same command, configuration and version"

# texts of gloo, NCCL and the rendezvous when another rank is gone
LOST_PEER = (
    "(closed|reset) by peer|likely closed|(read|write) error|broken pipe|timed out|ncclremote"
)

stores: list[Store] = []  # the process group of this process meets at the same server
started: list[subprocess.Popen[bytes]] = []  # ranks that this process has started, from rank 1 on


# ---- who starts the ranks -----------------------------------------------------------------------


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
    group = dist.get_world_size() if dist.is_initialized() else world_size
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
    def creates_processes_externally(self) -> bool:
        return bool(started) or super().creates_processes_externally

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


# ---- what all ranks must share ------------------------------------------------------------------


def compare_settings(trainer: Any, settings: Mapping[str, Any]) -> None:
    """Compare settings and versions with those of the other processes, before they connect.

    A process group of ranks that differ may wait forever, for example for another strategy. Ranks
    that rank 0 of a machine starts have its command and are not compared.

    Raises:
        UserError: In the first process: another one differs; the message has key and values.
        PeerError: Another process does not come, or has ended.
        SystemExit: In the other processes: one differs.
    """
    cluster = trainer.strategy.cluster_environment
    external = cluster.creates_processes_externally
    kind = "rank" if external else "machine"
    number = trainer.global_rank if external else trainer.node_rank
    count = trainer.world_size if external else trainer.num_nodes
    if count == 1 or PARENT in os.environ or dist.is_initialized():
        return
    versions = {name: metadata.version(name) for name in ("torch", "lightning")}
    facts = {"gpt_lightning": version(), "Python": sys.version.split()[0], **versions}
    facts |= {key: words(value) for key, value in settings.items() if key not in PLACES}
    os.environ["MASTER_ADDR"] = cluster.main_address
    os.environ["MASTER_PORT"] = str(cluster.main_port)
    limit = timedelta(seconds=int(os.environ.get(LIMIT) or 600))
    try:
        store, *_ = next(rendezvous("env://", number, count, timeout=limit))
        stores.append(store)
        store.set(f"facts/{number}", json.dumps(facts))
        if number == 0:
            found = [json.loads(store.get(f"facts/{other}")) for other in range(count)]
            store.set("difference", difference(found, kind))
        line = store.get("difference").decode()
    except DistError as error:
        reason = str(error).splitlines()[0]  # PyTorch appends a stack
        raise PeerError(
            f"{count} {kind}s do not meet at {cluster.main_address}:{cluster.main_port}: start all "
            f"of them, with a free port, or raise {LIMIT} ({reason})"
        ) from error
    end_all(line, number)


def compare_data(trainer: Trainer, record: Mapping[str, Any]) -> None:
    """Compare the tokenizer and the digests of the data of all ranks, and end them as above."""
    facts = {"tokenizer": record["tokenizer"], **record.get("data_identity", {})}
    found: list[dict[str, str]] = [{} for _ in range(trainer.world_size)]
    dist.all_gather_object(found, {f"data: {key}": words(fact) for key, fact in facts.items()})
    end_all(difference(found, "rank"), trainer.global_rank)


def words(value: Any) -> str:
    """Return a value as JSON, without the addresses of objects, which differ between processes."""
    return re.sub(" at 0x[0-9a-f]+", "", json.dumps(value, default=str))


def difference(found: Sequence[Mapping[str, str]], kind: str) -> str:
    """Return in words the first key in which a process differs from the first; empty if none does.

    Args:
        found: Facts of each process, by key.
        kind: Word for a process: rank, or machine.
    """
    first = found[0]
    for number, facts in enumerate(found):
        for key in (*first, *facts):
            if facts.get(key) != first.get(key):
                own = f"{kind} {number} has {key} {facts.get(key)}"
                return f"{own}, {kind} 0 has {first.get(key)}: {SAME}"
    return ""


def end_all(line: str, number: int) -> None:
    """End a process if there is a difference; the first one prints it, before the others end."""
    if line:
        time.sleep(3.0 if number else 1.0)  # a launcher ends all when one has ended
        raise SystemExit(UserError.exit_code) if number else UserError(line)


# ---- the end of all ranks -----------------------------------------------------------------------


def supervise(launcher: Any) -> None:
    """End all ranks of this machine when one of them fails, where Lightning starts them.

    Its own observer would kill rank 0 without a message.

    Raises:
        UserError: The command cannot be run again, because it is `python -c`.
    """
    if parent := os.environ.get(PARENT):
        threading.Thread(target=_follow, args=(int(parent),), daemon=True).start()
    elif launcher and not launcher.cluster_environment.creates_processes_externally:
        if sys.argv[0] in ("", "-c"):
            raise UserError(NO_COMMAND)
        os.environ[PARENT] = str(os.getpid())
        threading.Thread(target=_watch, args=(launcher,), daemon=True).start()


def _follow(parent: int) -> None:
    """End this rank when rank 0, which has started it, has ended."""
    while os.getppid() == parent:
        time.sleep(POLL_S)
    time.sleep(LOST_S)  # for the end of a run that has trained to its end
    if os.environ["LOCAL_RANK"] == "1":
        print(f"error: rank 0 has ended; {CONTINUE}", file=sys.stderr, flush=True)
    os._exit(EXIT_AGAIN)


def _watch(launcher: Any) -> None:
    """End this process, which is rank 0, and the other ranks when one of those fails."""
    while len(launcher.procs) + 1 < launcher.num_processes:
        time.sleep(POLL_S)
    started.extend(launcher.procs)
    launcher.procs.clear()  # Lightning's observer has the same list
    while started:
        for rank, process in enumerate([*started], 1):
            code = process.poll()
            if code and process in started:  # it was not ended by this process
                line = f"rank {rank} has ended with exit code {code}"
                if code < 0:  # else it has printed its own error
                    line = f"error: {line} ({signal.Signals(-code).name}); {CONTINUE}"
                print(line, file=sys.stderr, flush=True)
                end_ranks()
                os._exit(max(code, 0) or EXIT_AGAIN)
        time.sleep(POLL_S)


def end_ranks() -> None:
    """Kill the ranks that this process has started."""
    while started:
        started.pop().kill()


def leave(error: Exception) -> None:
    """End the ranks that this process has started, after an error.

    Raises:
        PeerError: The error means that another rank has ended, and the launcher of both does not
            end this process.
    """
    if is_lost_peer(error):
        time.sleep(LOST_S)
        raise PeerError(f"the connection to another rank is lost; {CONTINUE}") from error
    end_ranks()


def is_lost_peer(error: Exception) -> bool:
    """Return whether an error of a collective means that another rank is gone or hangs."""
    text = str(error).lower()
    of_ranks = isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in text)
    return of_ranks and re.search(LOST_PEER, text) is not None
