"""Kernels by NVTX range, from Nsight Systems: run it, and read the database that it exports."""

import json
import shutil
import sqlite3
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt_lightning.tables.options import Values
from gpt_lightning.tables.rows import column

NAME = "nsys"
QUERY = Path(__file__).with_name("nsys.sql").read_text(encoding="utf-8")


@dataclass(frozen=True)
class NsysRow:
    """Kernels launched inside the NVTX ranges of one name."""

    range: str = column("NVTX range")
    occurrences: int = column("occurrences", "d")
    kernels: float = column("kernels in each", ",.1f")
    kernels_ms: float = column("kernels ms in each", ",.3f")


def command(measure: str, configuration: Values) -> list[str]:
    """Return the command that records the steps of `bench profile` with NVTX ranges.

    Args:
        measure: MODULE:FUNCTION of the bench.
        configuration: Row to record.
    """
    values = configuration | {"device": "cuda", "folder": ".", "for_nsys": True}
    return [
        *("nsys", "profile", "--trace=cuda,nvtx,cublas", f"--output={NAME}", "--export=sqlite"),
        *("--force-overwrite=true", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *(sys.executable, "-m", "gpt_lightning.tables.worker", measure, json.dumps(values)),
    ]


def missing() -> str:
    """Return what this machine lacks for nsys; empty if nothing."""
    if not torch.cuda.is_available():
        return "This machine has no NVIDIA GPU."
    return "" if shutil.which("nsys") else "Nsight Systems (nsys) is not installed."


def record(measure: str, configuration: Values, folder: Path, timeout_s: float) -> list[NsysRow]:
    """Run nsys in a folder and return its kernels by range.

    Raises:
        subprocess.SubprocessError: nsys failed or took too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(command(measure, configuration), cwd=folder, check=True, timeout=timeout_s)
    return read_kernels(folder / f"{NAME}.sqlite")


def read_kernels(path: Path) -> list[NsysRow]:
    """Return the kernels of each NVTX range, the longest sum first.

    Args:
        path: Database that `nsys --export=sqlite` wrote.
    """
    with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
        rows = database.execute(QUERY).fetchall()
    return [NsysRow(name, n, kernels / n, ms / n) for name, n, kernels, ms in rows]
