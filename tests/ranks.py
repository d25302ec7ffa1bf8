"""Ranks that are forks of one process, which has imported what they need: none has a slow start."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch.multiprocessing import start_processes

from gpt_lightning.training.fit import run_cli

METHOD = "forkserver" if sys.platform == "linux" else "spawn"
PACKAGES = ("pytest", "torch._dynamo", "torch.distributed.fsdp", "torch.utils.tensorboard")
multiprocessing.set_forkserver_preload(["gpt_lightning.training.fit", *PACKAGES])


def run_ranks(number: int, function: Callable, *args: Any) -> tuple[str, str]:
    """Call a function of a module in some ranks; return their standard output and error.

    The ranks have the environment of ranks that a user starts by hand. If one fails, all end.
    """
    variables = os.environ | {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_network_port()),
    }
    with TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("out", "err")]
        start_processes(_call, (variables, files, function, *args), number, start_method=METHOD)
        return files[0].read_text(), files[1].read_text()


def _call(rank: int, variables: dict[str, str], files: list[Path], function: Callable, *args: Any):
    os.environ.clear()
    os.environ.update(variables, LOCAL_RANK=str(rank))
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    function(*args)


def run_commands(*commands: list[str]) -> None:
    """Run training commands one after the other."""
    for command in commands:
        run_cli(command)
