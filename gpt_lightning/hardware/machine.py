"""What a result was measured on, so that it means something a year later."""

import datetime
import os
import platform
import shlex
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from gpt_lightning import __version__
from gpt_lightning.hardware.device import default_device
from gpt_lightning.hardware.memory import memory_gib
from gpt_lightning.hardware.peaks import device_name


def machine_record(argv: list[str], device: torch.device | None = None) -> dict[str, str]:
    """Facts for the head of a report, in the order in which people ask for them.

    Args:
        argv: The command, without the program's name.
        device: What the results are of; None: the best device there is.
    """
    device = device or torch.device(default_device())
    facts = {
        "command": shlex.join(["gpt-lightning", *argv]),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": device_name(device),
        "CPU": f"{device_name(torch.device('cpu'))} of {os.cpu_count()}",
        "memory": f"{memory_gib():.1f} GiB",
        "software": f"gpt_lightning {version()}, torch {torch.__version__}, "
        f"lightning {metadata.version('lightning')}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}",
    }
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        facts["device"] += f", {memory:.0f} GiB, CUDA {torch.version.cuda}, driver {_driver()}"
    return facts


def version() -> str:
    """The package's version, and the commit if it runs from a checkout."""
    folder = Path(__file__).resolve().parents[1]
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*"]
    if not (folder.parent / ".git").exists():
        return __version__
    try:
        commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):  # no git, or a checkout that is not ours
        return __version__
    return f"{__version__} ({commit})"


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.splitlines()[0]
