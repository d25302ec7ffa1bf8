"""Compilation of a model: on which devices, and with which settings."""

import functools
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.utils._triton import has_triton

from gpt_lightning.errors import UserError
from gpt_lightning.model.attention import FUSED, NoKernelError, find_kernel, naive_is_faster
from gpt_lightning.model.gpt import GPT, Block
from gpt_lightning.model.loss import autocast_dtype


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
        if not has_triton():
            return False, "auto: off, Triton is not installed, or does not support this GPU"
        own = os.environ.get("CC")
        if not any(map(shutil.which, [own] if own else ["gcc", "clang"])):
            return False, f"auto: off, there is no C compiler for Triton ({own or 'gcc or clang'})"
    elif device != "cpu" or not precision.startswith("bf16"):
        return False, f"auto: off for {device}" + (" in float32" if device == "cpu" else "")
    else:
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if shutil.which(compiler) is None:
            hint = ": PyTorch takes CXX as one program, without arguments"
            hint = hint if " " in compiler else ""
            return False, f"auto: off, there is no C++ compiler {compiler!r}{hint}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return False, "auto: off, there is no Python.h (python3-dev), which compiled code includes"
    return True, "auto: on for cuda" if device == "cuda" else "auto: on for cpu in bfloat16"


def compile_in_place(
    model: nn.Module, device: str, scope: str = "model", pad_head: bool | str = "auto"
) -> None:
    """Compile a model at its first forward; its parameters keep their names.

    Args:
        model: The model; a GPT on a CPU gets the layers of cpu_kernels.py.
        device: cpu, cuda or mps.
        scope: model: one graph. block: one graph for all blocks of a GPT and one for its head,
            which takes a fraction of the time to compile, and runs a little slower.
        pad_head: Multiply a GPT's output head in a multiple of 64 rows; auto: on a CPU.
    """
    from gpt_lightning.model.builds import keep_compiled_code, prepare_builds  # if it compiles

    keep_compiled_code()
    if device == "cpu":
        recompute_in_backward()
        prepare_builds(model)
    if isinstance(model, GPT) and (device == "cpu" or pad_head is True):
        from gpt_lightning.model import cpu_kernels  # for these models alone

        if device == "cpu":
            cpu_kernels.install(model, pad_head is not False)
        else:
            model.lm_head.__class__ = cpu_kernels.PaddedHead
    if scope == "block" and isinstance(model, GPT):
        for block in model.transformer.h:
            block.compile()
        model.__class__ = BlockwiseGPT
    else:
        model.compile()


def attention_kernel(model: GPT, device: torch.device, T: int, dropout_p: float) -> str:
    """Return the attention kernel that runs on a device, in autocast's dtype or the default one.

    Args:
        model: The model, compiled or not, on any device.
        device: Device that it runs on.
        T: Tokens of a sequence.
        dropout_p: Dropout of the attention weights; 0 in evaluations.

    Returns:
        avx512 (cpu_attention.py), naive, chunked, flash, cudnn or efficient; math for PyTorch's
        products without a kernel.

    Raises:
        NoKernelError: PyTorch has no such kernel here; the message has its reasons.
    """
    config = model.config
    auto_on_cpu = config.attention == "auto" and device.type == "cpu" and is_compiled(model)
    if auto_on_cpu:
        from gpt_lightning.model import cpu_attention  # for these models alone

        dtype, hs = autocast_dtype(model.lm_head.weight), config.n_embd // config.n_head
        if cpu_attention.runs(T, hs, dtype):
            return "avx512"
        if naive_is_faster(T, dropout_p):
            return "naive"
    if config.attention in ("naive", "chunked"):
        return config.attention
    attention = cast(Block, model.transformer.h[0]).attn.attention
    like = torch.empty(0, device=device)  # Lightning casts weights to the default dtype later
    found = find_kernel(attention, like, config.n_embd // config.n_head, dropout_p)
    if config.attention in FUSED and config.attention != found:  # MPS may ignore the restriction
        raise NoKernelError(f"PyTorch takes its {found} kernel instead.")
    return found


def check_cuda_graphs() -> None:
    """Check that no CUDA graph writes the gradients of a step of several micro-batches.

    Raises:
        UserError: A graph's second run would overwrite the gradients that its first has made.
    """
    if os.environ.get("TORCHINDUCTOR_CUDAGRAPHS", "0") != "0":
        raise UserError(
            "TORCHINDUCTOR_CUDAGRAPHS is set, and trainer.accumulate_grad_batches is above 1: a "
            "CUDA graph overwrites gradients that are accumulated; unset TORCHINDUCTOR_CUDAGRAPHS"
        )


def is_compiled(model: nn.Module) -> bool:
    """Return whether a model, or a part of it, is compiled."""
    return any(module._compiled_call_impl is not None for module in model.modules())


class BlockwiseGPT(GPT):
    """GPT with compiled blocks, whose head and loss are another graph."""

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Tensor:
        loss_or_logits: Tensor = compiled_head()(self, self.transformer(idx), targets)
        return loss_or_logits


@functools.cache
def compiled_head() -> Callable[..., Any]:
    """Return `GPT.head`, compiled as a function: a method would stay that of a copied model."""
    return torch.compile(GPT.head)


def recompute_in_backward() -> None:
    """Let compiled backward passes recompute cheap tensors, above all the masks of dropout.

    Inductor's loops for CPUs hash a mask (cpu_kernels.py) ten times faster than they write and read
    it at one byte per element. `aggressive_recomputation` would draw the seeds of the masks again,
    too, which makes wrong gradients (torch 2.13).
    """
    torch._functorch.config.ban_recompute_used_far_apart = False
    torch._functorch.config.ban_recompute_long_fusible_chains = False
    torch._functorch.config.ban_recompute_materialized_backward = False
