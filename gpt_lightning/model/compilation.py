"""Compilation of a model: on which devices, and with which settings."""

import contextlib
import functools
import hashlib
import os
import shutil
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import platformdirs
import torch
import torch._functorch.config
import torch._inductor.config
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
    keep_compiled_code()
    if device == "cpu":
        recompute_in_backward()
        trust_vector_instructions()
        compile_ahead(model)
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


def trust_vector_instructions() -> None:
    """Let Inductor take AVX-512 without test programs, which take 5 s before its first loop.

    They ask whether PyTorch was built for it, too, which its own kernels' choice tells. A compiler
    of C++20, which PyTorch's headers need, knows the instructions.
    """
    config = torch._inductor.config.cpp
    if config.vec_isa_ok is None and torch.backends.cpu.get_cpu_capability() == "AVX512":
        config.vec_isa_ok = True


def compile_ahead(model: nn.Module) -> None:
    """Compile in threads what a model for CPUs needs, while it is traced.

    That is PyTorch's header, and the attention kernel of a GPT that it fits: one core would be idle
    meanwhile. An error appears again where the model needs the result.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    from gpt_lightning.model import cpu_attention

    # the marker asks for vector instructions, which all loops have
    header = "// at::vec::\n#include <torch/csrc/inductor/cpp_prefix.h>\n"
    source = header + 'extern "C" void kernel(float*) {}'
    tasks = [functools.partial(CppPythonBindingsCodeCache.load_pybinding, ["float*"], source)]
    config = model.config if isinstance(model, GPT) else None
    if config and cpu_attention.runs(
        config.block_size, config.n_embd // config.n_head, torch.bfloat16
    ):
        tasks.append(functools.partial(cpu_attention.library))

    def run(task: Callable[[], Any]) -> None:
        with contextlib.suppress(Exception):
            trust_vector_instructions()  # each thread has its own settings
            task()

    for task in tasks:
        threading.Thread(target=run, args=(task,), daemon=True).start()


def keep_compiled_code() -> None:
    """Let compiled code survive a restart: PyTorch's own folder is in the temporary folder.

    The code is for the processor at hand (-march=native), and machines may share a home folder. A
    folder without write or execute permission leaves PyTorch's choice, as does
    TORCHINDUCTOR_CACHE_DIR.
    """
    capabilities = repr(sorted(torch.cpu.get_capabilities().items()))
    processor = hashlib.sha256(capabilities.encode()).hexdigest()[:8]
    folder = Path(platformdirs.user_cache_dir("gpt-lightning")) / "compiled" / processor
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        if not os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):  # Linux has it
            os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
