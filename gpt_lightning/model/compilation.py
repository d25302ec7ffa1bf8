"""Compilation of a model: on which devices, and with which settings."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
import torch._functorch.config
from torch import nn

from gpt_lightning.model.gpt import GPT


def should_compile(device: str, precision: str) -> tuple[bool, str]:
    """Return whether compiling is faster on a device, and the reason for the run's banner.

    On a CPU it halves the time of a step in bfloat16, where only the matrix products are fast
    without it, and gains nothing in float32 (benchmarks/speed.md). On MPS it was slower in a
    published run.

    Args:
        device: cpu, cuda or mps.
        precision: Precision of the Trainer, such as bf16-mixed.
    """
    if device == "cuda":
        return True, "auto: on for cuda"
    if device != "cpu" or not precision.startswith("bf16"):
        return False, f"auto: off for {device}" + (" in float32" if device == "cpu" else "")
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        hint = ": PyTorch takes CXX as one program, without arguments" if " " in compiler else ""
        return False, f"auto: off, there is no C++ compiler {compiler!r}{hint}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return False, "auto: off, there is no Python.h (python3-dev) to make it twice as fast"
    return True, "auto: on for cpu in bfloat16"


def compile_in_place(model: nn.Module, device: str) -> None:
    """Compile a model at its first forward; its parameters keep their names.

    Args:
        model: The model; a GPT on a CPU gets the layers of cpu_kernels.py.
        device: cpu, cuda or mps.
    """
    if device == "cpu":
        recompute_in_backward()
        if isinstance(model, GPT):
            from gpt_lightning.model import cpu_kernels  # for compiled CPU models alone

            cpu_kernels.install(model)
    model.compile()


def recompute_in_backward() -> None:
    """Let compiled backward passes recompute cheap tensors, above all the masks of dropout.

    Inductor's loops for CPUs hash a mask (cpu_kernels.py) ten times faster than they write and read
    it at one byte per element. `aggressive_recomputation` would draw the seeds of the masks again,
    too, which makes wrong gradients (torch 2.13).
    """
    torch._functorch.config.ban_recompute_used_far_apart = False
    torch._functorch.config.ban_recompute_long_fusible_chains = False
    torch._functorch.config.ban_recompute_materialized_backward = False
