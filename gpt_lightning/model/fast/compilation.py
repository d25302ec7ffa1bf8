"""Compilation of a model: on which devices, and with which settings."""

import contextlib
import functools
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from threading import Thread
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.model.attention import ATTENTION, NoKernelError, find_kernel, naive_is_faster
from gpt_lightning.model.fast.compiled_code import kept_code, trusted_instructions
from gpt_lightning.model.gpt import GPT, CausalSelfAttention
from gpt_lightning.model.loss import autocast_dtype


def should_compile(device: str, precision: str, dropout: float = 0.0) -> tuple[bool, str]:
    """Return whether compiling is faster on a device, and the reason for the run's banner.

    On a CPU it halves the time of a step in bfloat16, where only the matrix products are fast
    without it. In float32 it gains much with dropout alone, whose masks PyTorch draws serially
    (benchmarks/speed.md). On MPS it was slower in a published run.

    Args:
        device: cpu, cuda or mps.
        precision: Precision of the Trainer, such as bf16-mixed.
        dropout: Dropout of the model.
    """
    if device == "cuda":
        if not has_triton():
            return False, "auto: off, Triton is not installed, or does not support this GPU"
        own = os.environ.get("CC")
        if not any(map(shutil.which, [own] if own else ["gcc", "clang"])):
            return False, f"auto: off, there is no C compiler for Triton ({own or 'gcc or clang'})"
    elif device != "cpu" or not (dropout or "bf16" in precision):
        return False, f"auto: off for {device}, {precision}, dropout {dropout:g}"
    else:
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if not shutil.which(compiler):
            return False, f"auto: off, there is no C++ compiler {compiler!r}"
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return False, "auto: off, there is no Python.h (python3-dev), which compiled code includes"
    return True, f"auto: on for {device}, {precision}, dropout {dropout:g}"


def has_triton() -> bool:
    """Return whether Triton is installed and compiles for the GPU of this process."""
    if not importlib.util.find_spec("triton") or not torch.cuda.is_available():
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (7, 0)


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
    if isinstance(model, GPT) and (device == "cpu" or pad_head is True):
        from gpt_lightning.model.fast import cpu_kernels  # only these models need it

        if device == "cpu":
            cpu_kernels.install(model, pad_head is not False)
        else:
            cpu_kernels.install_head(model)
    backend = compiler_of(device, isinstance(model, GPT))
    if scope == "block" and isinstance(model, GPT):
        for block in model.transformer.h:
            block.compile(backend=backend)
        # a copied model gets its own: partial copies its arguments, a method would not
        model.head = functools.partial(compiled_head(device), model)  # type: ignore[method-assign]
    else:
        model.compile(backend=backend)
    COMPILED.add(model)


COMPILED: WeakSet[nn.Module] = WeakSet()  # a copy is not compiled


def is_compiled(model: nn.Module) -> bool:
    """Return whether `compile_in_place` has compiled a model."""
    return model in COMPILED


def attention_kernel(model: GPT, device: torch.device, T: int, dropout_p: float) -> tuple[str, str]:
    """Return the attention kernel that runs on a device, in autocast's dtype or the default one.

    Args:
        model: The model, compiled or not, on any device.
        device: Device that it runs on.
        T: Tokens of a sequence.
        dropout_p: Dropout of the attention weights; 0 in evaluations.

    Returns:
        avx512 (cpu_attention.py), naive, flash, cudnn or efficient; math for PyTorch's
        products without a kernel; "the network's own" for a user's function in the first layer.
        Where avx512 would run and cannot be built, also the reason.

    Raises:
        NoKernelError: PyTorch has no such kernel here; the message has its reasons.
    """
    config, error = model.config, ""
    hs = config.n_embd // config.n_head
    layers = (m.attention for m in model.modules() if isinstance(m, CausalSelfAttention))
    attention, kernels = next(layers, None), ATTENTION
    if device.type == "cpu" and is_compiled(model):
        from gpt_lightning.model.fast import cpu_attention  # only these models need it
        from gpt_lightning.model.fast.cpu_kernels import KERNELS as kernels
    if attention is not kernels[config.attention]:
        return "the network's own", ""
    if config.attention == "auto" and kernels is not ATTENTION:
        if cpu_attention.fits(T, hs, autocast_dtype(model.lm_head.weight)):
            error = cpu_attention.build_error()
            if not error:
                return "avx512", ""
        if naive_is_faster(T, dropout_p):
            return "naive", error
    if config.attention == "naive":
        return "naive", ""
    like = torch.empty(0, device=device)  # Lightning casts weights to the default dtype later
    found = find_kernel(attention, like, hs, dropout_p)
    if config.attention not in ("auto", "sdpa", found):  # MPS may ignore the restriction
        raise NoKernelError(f"PyTorch takes its {found} kernel instead.")
    return found, error


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


@functools.cache
def compiled_head(device: str) -> Callable[..., Any]:
    """Return `GPT.head`, compiled as a function: all models share it."""
    return torch.compile(GPT.head, backend=compiler_of(device))


# ---- settings of one compilation -----------------------------------------------------------------
#
# PyTorch's compiler reads its settings from modules and from the environment. Those below hold
# while one graph of ours is compiled: other models of the process are compiled as PyTorch does.

# Inductor's loops for CPUs hash a mask (cpu_kernels.py) ten times faster than they write and read
# it at one byte per element. `aggressive_recomputation` would draw the seeds of the masks again,
# too, which makes wrong gradients (torch 2.13).
RECOMPUTE_IN_BACKWARD = {
    "ban_recompute_used_far_apart": False,
    "ban_recompute_long_fusible_chains": False,
    "ban_recompute_materialized_backward": False,
}
# A CPU's residual stream is written after each addition, in place of the sum of all branches before
# it in every layer: the layers' loops are then equal, and are compiled once (31 -> 23 in the small
# preset).
WRITE_SUMS = {"realize_reads_threshold": 2}
# torch 2.10 sums gradients of layer norms wrongly on CUDA, where two orders share a loop (pytorch
# #190796, mended in 2.11).
ONE_ORDER = {"triton.mix_order_reduction": False}


@functools.cache
def compiler_of(device: str, gpt: bool = True) -> str | Callable[..., Any]:
    """Return PyTorch's compiler with the settings for models of ours on a device.

    That is "inductor", without settings, if this PyTorch has others. On a CPU, networks other than
    a GPT have PyTorch's: with ours a transpose of the rotated keys of RoPE was NaN in bfloat16
    (torch 2.13, g++ 12, a Xeon).
    """
    try:
        from torch._functorch import config
        from torch._inductor import config as loops

        inductor = torch._dynamo.lookup_backend("inductor")
        recompute = RECOMPUTE_IN_BACKWARD if device == "cpu" and gpt else {}
        sums: Fields = WRITE_SUMS if recompute else {}
        if device == "cuda" and torch.__version__ < "2.11":
            sums = ONE_ORDER
        # the backward graph at once, while the settings hold
        settings = recompute | {"force_non_lazy_backward_lowering": True}
        for name in settings:
            getattr(config, name)
    except (ImportError, AttributeError):
        return "inductor"

    def compile_graph(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with kept_code(), trusted_instructions(), config.patch(settings), loops.patch(sums):
            if device == "cpu":
                Thread(target=copy_context().run, args=(compile_header,)).start()
            return inductor(graph, inputs)

    return compile_graph


def compile_header() -> None:
    """Compile the C++ header of all loops, 5 s where it is new, while Inductor makes the loops.

    PyTorch alone compiles it when the first loop is made, and makes no other meanwhile.
    """
    code = '#include <torch/csrc/inductor/cpp_prefix.h>\nextern "C" void kernel(float* x) {}'
    with contextlib.suppress(Exception):  # a compiler's message comes with the graph's first loop
        from torch._inductor.codecache import CppPythonBindingsCodeCache

        CppPythonBindingsCodeCache.load_pybinding(["float*"], code)
