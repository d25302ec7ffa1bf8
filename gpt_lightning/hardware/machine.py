"""Description of the machine and the software behind a measurement."""

import datetime
import os
import platform
import shlex
from importlib import metadata
from pathlib import Path

import torch

from gpt_lightning import __version__
from gpt_lightning.hardware.device import device_kind, memory_gib
from gpt_lightning.hardware.peaks import device_name, output_of


def machine_record(argv: list[str], device: torch.device | None = None) -> dict[str, str]:
    """Return the facts for the head of a report, name -> fact.

    Args:
        argv: Arguments of the command, without the name of the program.
        device: Device that was measured; None: the machine's best.
    """
    device = device or torch.device(device_kind())
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
    """Return the package's version, with the commit if it runs from a checkout."""
    folder = Path(__file__).resolve().parents[1]
    if not (folder.parent / ".git").exists():
        return __version__
    # empty without git, and in a checkout of another user
    commit = output_of("git", "-C", str(folder), "describe", "--always", "--dirty", "--exclude=*")
    return f"{__version__} ({commit})" if commit else __version__


def _driver() -> str:
    versions = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return (versions or "unknown").splitlines()[0]
