"""Agreement of the ranks of a run on code and settings, before anything connects them.

Ranks that a person, a cluster or torchrun has started on several machines may have another
configuration file, another commit or another PyTorch. Their replicas would diverge without a word,
or wait for each other forever. Each writes what it has into a store at the address where the
process group will meet, the first one compares, and all end or all train.
"""

import hashlib
import json
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

from gpt_lightning.errors import EXIT_AGAIN, PeerError, UserError
from gpt_lightning.hardware.device import version
from gpt_lightning.hardware.distributed import PARENT

LIMIT = "GPT_LIGHTNING_RENDEZVOUS_S"  # environment variable: longest wait for others, in seconds
LIMIT_S = 600
LINE_S = 60.0  # time between two lines about those that are missing
POLL_S = 0.05
GOODBYE_S = 1.0  # time for the others to read how the process of the store ends
# settings that name what each machine may have elsewhere; its content is compared later
PLACES = ("config", "ckpt_path", "data.data_dir", "data.dataset", "data.text_file")
SAME = "start all with the same command, configuration and version"

stores: list[TCPStore] = []  # the process group of this process meets at the same server


def facts_of(trainer: Any, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return what all ranks must share, by key: code, versions, ranks, callbacks, settings."""
    files = sorted(Path(__file__).parents[1].rglob("*.*"))
    code = b"".join(f.read_bytes() for f in files if f.suffix in (".py", ".yaml", ".cpp"))
    return {
        "gpt_lightning": f"{version()}, digest {hashlib.sha256(code).hexdigest()[:12]}",
        "torch": torch.__version__,
        "lightning": metadata.version("lightning"),
        "Python": sys.version.split()[0],
        "world size": str(trainer.world_size),
        **{key: words(value) for key, value in settings.items() if key not in PLACES},
        "callbacks": ", ".join(type(callback).__name__ for callback in trainer.callbacks),
    }


def words(value: Any) -> str:
    """Return a value as JSON, without the addresses of objects, which differ between processes."""
    return re.sub(" at 0x[0-9a-f]+", "", json.dumps(value, default=str))


def first_difference(theirs: Mapping[str, str], ours: Mapping[str, str], who: str) -> str:
    """Return in words the first key with another value; empty if all are equal.

    Args:
        theirs: Facts of another rank.
        ours: Facts of rank 0.
        who: Name of the other, such as "rank 1".
    """
    for key in (*ours, *theirs):
        if (a := ours.get(key)) != (b := theirs.get(key)):
            return f"{who} has {key} {b}, {who.split()[0]} 0 has {a}: {SAME}"
    return ""


def agree(trainer: Any, settings: Mapping[str, Any]) -> None:
    """Compare this process with the others that were started beside it, and wait for them.

    Those that rank 0 of a machine starts itself have its command and are not compared.

    Args:
        trainer: Trainer of the run, before its fit.
        settings: Values of the configuration, by key.

    Raises:
        UserError: In the first process: another one differs; the message has key and values.
        PeerError: Others are missing, or the first one has ended.
        SystemExit: In the others: the first one has ended with this code.
    """
    cluster = getattr(trainer.strategy, "cluster_environment", None)
    if cluster is None or PARENT in os.environ or torch.distributed.is_initialized():
        return
    meeting = Meeting(cluster, "rank", trainer.global_rank, trainer.world_size)
    if not cluster.creates_processes_externally:
        meeting = Meeting(cluster, "machine", trainer.node_rank, trainer.num_nodes)
    if meeting.count > 1:
        compare = meeting.follow if meeting.number else meeting.lead
        compare(facts_of(trainer, settings))


class Meeting:
    """Processes of a run at a store, which torchrun or the first of them opens.

    Args:
        cluster: Lightning's environment, which knows the address.
        kind: Word for a process: rank, or machine.
        number: Number of this one, from 0.
        count: Number of all.
    """

    def __init__(self, cluster: Any, kind: str, number: int, count: int):
        self.kind, self.number, self.count = kind, number, count
        self.place = cluster.main_address, cluster.main_port
        self._address = ":".join(map(str, self.place))
        self.limit_s = int(os.environ.get(LIMIT) or LIMIT_S)
        self.key = f"gpt_lightning/{count}"  # agents of torchrun count restarts differently
        self._began = time.monotonic()
        self._lines = 1

    def lead(self, facts: Mapping[str, str]) -> None:
        """Give all others the facts of this process, and end with them if one of them differs."""
        store = self._store()
        missing = set(range(1, self.count))
        line = ""
        code = EXIT_AGAIN
        store.set(self.key, json.dumps(facts))
        try:
            while missing and not line:
                arrived = [n for n in missing if store.check([f"{self.key}/{n}"])]
                for other in arrived:
                    missing.remove(other)
                    line = line or store.get(f"{self.key}/{other}").decode()
                if not arrived:
                    self._wait(f"{len(missing)} of {self.count} {self.kind}s")
            code = UserError.exit_code if line else 0
        finally:
            store.set(f"{self.key}/end", str(code))
            time.sleep(GOODBYE_S if code else 0)
        if line:
            raise UserError(line)

    def follow(self, facts: Mapping[str, str]) -> None:
        """Compare this process with the first one, and end if that ends."""
        store, who = self._store(), f"{self.kind} {self.number}"
        try:
            line = first_difference(facts, json.loads(store.get(self.key)), who)
            store.set(f"{self.key}/{self.number}", line)
            code = int(store.get(f"{self.key}/end"))
        except DistError as error:
            raise PeerError(f"{self.kind} 0 has ended; the reason is in its own error") from error
        if code:
            raise SystemExit(code)

    def _store(self) -> TCPStore:
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        opens = self.number == 0 and not agent
        while not (opens or self._is_open()):
            self._wait(f"{self.kind} 0")
        limit = timedelta(seconds=self.limit_s + LINE_S)
        try:  # the process group opens it again
            store = TCPStore(*self.place, None, opens, limit, False, multi_tenant=True)
        except DistError as error:
            fix = "set MASTER_ADDR to the host of the first process, and MASTER_PORT to a free port"
            reason = str(error).splitlines()[0]  # PyTorch appends a stack
            raise UserError(f"cannot open {self._address} ({reason}): {fix}") from error
        stores.append(store)
        return store

    def _is_open(self) -> bool:
        try:  # PyTorch prints the stack of a client without a server
            socket.create_connection(self.place, LINE_S).close()
        except OSError:
            return False
        return True

    def _wait(self, whom: str) -> None:
        """Wait a moment, and print a line each minute; raise a PeerError after the limit."""
        waited_s = time.monotonic() - self._began
        text = f"waiting for {whom} at {self._address}"
        if waited_s >= self.limit_s:
            raise PeerError(f"{text} for {waited_s:.0f} s: start them, or raise {LIMIT}")
        if waited_s >= self._lines * LINE_S:
            print(text, file=sys.stderr, flush=True)
            self._lines += 1
        time.sleep(POLL_S)
