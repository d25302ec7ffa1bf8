"""When a model is compiled, and how."""

import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch
import torch._functorch.config
from torch import nn


def should_compile(device: str, precision: str) -> tuple[bool, str]:
    """Whether compiling is faster on a device, and why, in words for the banner.

    On a CPU it halves a step in bfloat16, where the products are fast and all else is not, and
    gains nothing in float32 (benchmarks/speed.md). On MPS it was slower in a published run.

    Args:
        device: cpu, cuda or mps.
        precision: Trainer's.
    """
    if device == "cuda":
        return True, "auto: on for cuda"
    if device != "cpu" or not precision.startswith("bf16"):
        return False, f"auto: off for {device}" + (" in float32" if device == "cpu" else "")
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        return False, f"auto: off, there is no C++ compiler ({compiler}) to make it twice as fast"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return False, "auto: off, there is no Python.h (python3-dev) to make it twice as fast"
    return True, "auto: on for cpu in bfloat16"


def compile_in_place(model: nn.Module, device: str) -> None:
    """Compiles a model at its first forward; its parameters keep their names."""
    if device == "cpu":
        recompute_in_backward()
    model.compile()


def recompute_in_backward() -> None:
    """Lets compiled backwards compute again what is cheap, above all dropout's masks.

    Inductor's loops for CPUs read and write masks of one byte an element ten times slower than they
    hash them (dropout.py). Not aggressive_recomputation, which would draw the masks' seeds again
    too: other masks than the forward's, and wrong gradients (torch 2.13).
    """
    torch._functorch.config.ban_recompute_used_far_apart = False
    torch._functorch.config.ban_recompute_long_fusible_chains = False
    torch._functorch.config.ban_recompute_materialized_backward = False
