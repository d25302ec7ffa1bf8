"""Attention alone: the written-out definition, compiled, and each fused kernel, by size.

q, k and v are (batch, heads, context, d), with strides as in the model: (batch, context, heads, d)
transposed. The GPT-2s have 12, 16, 20 and 25 heads of 64 channels. naive: softmax(q k^T / sqrt(d))
v, written out. compiled: naive through torch.compile; graphs counts the graphs that it made, and
replaced the attentions for which it called a fused kernel instead, so that the row measures that
kernel. sdpa-*:
F.scaled_dot_product_attention restricted to one backend. Forward and backward are phases of one
step, each timed inside it; times are medians. TFLOP/s: 4 FLOPs for each score and channel in the
forward (q k^T, weights v), 10 in the backward, in which a fused kernel computes the scores again;
with a causal mask half of the scores count.

MODULE:FUNCTION as a kernel: your own, imported from the working directory and called as
function(q, k, v, causal) with q, k and v of (batch x heads, context, d). Before it is timed, its
output and gradients at up to 1,024 tokens are compared with the definition in float64. Its error
may be four times that of naive in the row's dtype, plus 1e-5 of the largest value; above that the
row fails.

model: gpt2 is attention alone, as in the systems course's exercise; course rotates q and k (RoPE)
in the forward, as its model does.

held: memory at the end of the forward minus memory before it, in a step that is not timed. peak:
highest memory in that step, with q, k and v. Memory comes from the allocator on CUDA, from the
profiler's record of tensors on a CPU, and from Metal's driver on MPS.

A CPU keeps freed memory for the next step, as in `fit`, if twelve matrices of scores (batch x heads
x context x context, float32) fit into memory. The kept blocks leave gaps: naive needs three
matrices, and took eleven at 8,192 tokens. A row with larger ones gives its memory back, which
costs time, since the system clears each page again; its note says so.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_lightning.bench import memory_meter, models, timing
from gpt_lightning.bench.memory_meter import PhaseContext
from gpt_lightning.bench.models import RoPE
from gpt_lightning.bench.step import checked_graphs, compiled_graphs, compiler_count, set_products
from gpt_lightning.model.attention import FUSED as FUSED_IN_TRAINING
from gpt_lightning.model.attention import NoKernelError, graph_nodes, naive_attention
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import (
    Count,
    Flag,
    HiddenHundredths,
    Hundredths,
    Measured,
    Tenths,
    Text,
    Thousandths,
    Values,
)
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

CHECKED_TOKENS = 1024  # tokens that compare a user's kernel with the definition
# kernel -> backend, and a part of the name of its node in the autograd graph
FUSED = {"sdpa-math": (SDPBackend.MATH, "Softmax")}
FUSED |= {f"sdpa-{kernel}": backend for kernel, backend in FUSED_IN_TRAINING.items()}
KERNELS = ("naive", "compiled", *FUSED)
QUANTITIES = {
    "forward_ms": "forward (ms)",
    "backward_ms": "backward (ms)",
    "held_mib": "held for backward (MiB)",
    "peak_mib": "peak (MiB)",
}


@dataclass
class AttentionRow(Measured):
    """Times and memory of one kernel."""

    device: Text
    dtype: Text
    model: Text
    kernel: Text
    causal: Flag
    batch: Count
    d: Count
    context: Count
    warmup: Count
    heads: Count
    forward_ms: Thousandths
    forward_mean_ms: HiddenHundredths
    forward_std_ms: HiddenHundredths
    backward_ms: Thousandths
    backward_mean_ms: HiddenHundredths
    backward_std_ms: HiddenHundredths
    total_ms: Thousandths
    total_mean_ms: HiddenHundredths
    total_std_ms: Thousandths
    forward_tflops_per_sec: Hundredths
    backward_tflops_per_sec: Hundredths
    held_mib: Tenths
    peak_mib: Tenths
    memory_by: Text
    first_step_s: Hundredths
    graphs: Count
    replaced: Count


def picture(folder: Path, rows: Sequence[AttentionRow]) -> list[str]:
    """Draw time and memory over sequence length, in a column for each device, dtype and width."""
    from gpt_lightning.tables.pictures import plot_rows  # not in a row's process

    title = "Attention (dashed: not causal; lines end where memory does)"
    x = ("context", "sequence length (tokens)")
    plot_rows(folder / "attention.png", title, rows, x, QUANTITIES, place)
    return ["attention.png"]


def place(row: AttentionRow) -> tuple[str, str, str]:
    """Return the column of panels, the label and the style of a row."""
    label = f"{row.kernel}{' with RoPE' * (row.model == 'course')}"
    return f"{row.device} {row.dtype}, d = {row.d}", label, "-" if row.causal else "--"


def known_or_own(text: str) -> str:
    """Accept the name of a kernel, or MODULE:FUNCTION of a module that Python finds."""
    if ":" not in text:
        return options.one_of(KERNELS)(text)
    if not re.fullmatch(r"[\w.]+:[\w.]+", text):
        raise ValueError(f"{text!r} is not MODULE:FUNCTION")
    module = text.partition(":")[0]
    if PathFinder.find_spec(module.partition(".")[0], [os.getcwd(), *sys.path]) is None:
        raise ValueError(f"there is no module {module!r} in this folder or in Python's path")
    return text


BENCH = Bench(
    measure="gpt_lightning.bench.attention:measure_attention",
    tables={"rows": AttentionRow},
    options=(
        options.DEVICE,
        options.dtypes("fp32"),
        options.switches("causal", "true", "Mask the future"),
        options.numbers("d", "d", "16,32,64,128", "Head widths"),
        options.contexts("256,1024,4096,8192,16384"),
        models.MODEL,
        options.axis(
            "kernels",
            "kernel",
            ",".join(KERNELS),
            known_or_own,
            f"Any of {', '.join(KERNELS)}, or MODULE:FUNCTION of your own.",
            alias="kernel",
        ),
        options.shared("batch", 8, "Sequences per batch."),
        options.numbers("heads", "heads", "1", "Heads"),
        options.warmup(2),
        options.steps(10),
        options.MEMORY_LIMIT,
    ),
    picture=picture,
)


def measure_attention(row: SimpleNamespace) -> Values:
    """Time forward and backward of one kernel and measure the memory held in between.

    Raises:
        SkippedError: The device has no such kernel or products, or RoPE has no pairs to rotate.
    """
    if row.model == "course" and row.d % 2:
        raise SkippedError(f"d {row.d} is odd, and RoPE rotates pairs of channels")
    device = torch.device(row.device)
    limit = memory_meter.limit_memory(device, row.memory_gib)
    scores = row.batch * row.heads * row.context**2
    # a GiB has 2**28 numbers of float32; why twelve: see the top of this file
    keep = not limit or 12 * scores < limit * 2**28
    dtype = set_products(row.dtype, device, keep)
    graphs, own = compiled_graphs(), ":" in row.kernel
    torch.manual_seed(0)
    rope = RoPE(row.d, row.context).to(device) if row.model == "course" else None
    attention = make_attention(row.kernel, row.causal, rope)

    def make(tokens: int = row.context) -> Tensor:
        shape = (row.batch, tokens, row.heads, row.d)
        return torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_()

    if own:
        tensors = [make(min(row.context, CHECKED_TOKENS)) for _ in range(4)]
        check_own(make_attention(row.kernel, row.causal), row.causal, tensors)
    check_kernel(row.kernel, attention, make)
    tensors = [make() for _ in range(4)]
    times, first = timing.record(
        lambda timer: run_step(attention, tensors, timer.phase), device, row.warmup, row.steps
    )
    tensors.clear()  # the memory of a step is measured with its own tensors alone
    method, phases = memory_meter.measure_memory(
        lambda phase: run_step(attention, [make() for _ in range(4)], phase), device
    )
    gflop = 4e-9 * scores * row.d / (1 + row.causal)
    # a user's kernel may have compiled itself
    compiled = compiled_graphs() > graphs if own else row.kernel == "compiled"
    return {
        "forward_tflops_per_sec": gflop / median(times["forward"]),  # GFLOP/ms
        "backward_tflops_per_sec": 2.5 * gflop / median(times["backward"]),
        "first_step_s": first["total"] / 1e3,
        **timing.phase_columns(times, "forward", "backward"),
        **memory_meter.held_and_peak(phases),
        "memory_by": method,
        "graphs": checked_graphs(compiled, graphs),
        # attentions for which the compiler calls scaled_dot_product_attention
        "replaced": compiler_count("inductor", "fuse_attention"),
        "note": "" if keep else "freed memory is not kept",
    }


def run_step(
    attention: Attention, tensors: Sequence[Tensor], phase: PhaseContext = nullcontext
) -> list[Tensor]:
    """Run forward and backward on q, k, v and the output's gradient, (B, nh, T, d) each.

    Returns:
        Output, and gradients of q, k and v.
    """
    q, k, v, gradient = tensors
    with phase("forward"):
        out = attention(q, k, v)
    with phase("backward"):
        return [out, *torch.autograd.grad(out, (q, k, v), gradient)]


# ---- kernels -------------------------------------------------------------------------------------


def make_attention(kernel: str, causal: bool, rope: RoPE | None = None) -> Attention:
    """Return a function of q, k and v, (B, nh, T, d) each; with `rope` it rotates q and k first.

    MODULE:FUNCTION of the user is called with (B nh, T, d).
    """
    own = resolve_name(kernel) if ":" in kernel else None

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if rope:
            q, k = rope(q).type_as(q), rope(k).type_as(k)
        if kernel in FUSED:
            with sdpa_kernel(FUSED[kernel][0]):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        if own:
            out = own(*(t.flatten(0, 1) for t in (q, k, v)), causal)
            return out.unflatten(0, q.shape[:2])
        if causal:
            return naive_attention(q, k, v, 0.0)
        scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5  # (B, nh, T, T)
        return scores.softmax(dim=-1) @ v

    return torch.compile(attention, dynamic=False) if kernel == "compiled" else attention


def check_own(attention: Attention, causal: bool, tensors: Sequence[Tensor]) -> None:
    """Compare the output and the gradients of a user's kernel with those of the definition.

    Args:
        attention: Kernel of the user.
        causal: Mask the future.
        tensors: q, k, v and the output's gradient, (B, nh, T, d) each.

    Raises:
        RuntimeError: A shape differs (message of torch), or an error exceeds its limit.
    """
    plain = make_attention("naive", causal)
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]  # MPS has no float64
    names = ("output", "gradient of q", "gradient of k", "gradient of v")
    found = (run_step(attention, tensors), run_step(plain, tensors), run_step(plain, exact))
    for name, own, rounded, true in zip(names, *found, strict=True):
        error, usual = ((t.cpu().double() - true).abs().max().item() for t in (own, rounded))
        limit = 4 * usual + 1e-5 * true.abs().max().item()
        if not error <= limit:
            raise RuntimeError(
                f"wrong {name}: {error:.2e} off the definition in float64; the limit is {limit:.2e}"
            )


def check_kernel(kernel: str, attention: Attention, make: Callable[[], Tensor]) -> None:
    """Call a fused kernel once and find the kernel that ran in the autograd graph.

    Raises:
        SkippedError: torch has no such kernel for these tensors (the message has torch's reason),
            or torch ran another kernel.
    """
    if kernel not in FUSED:
        return
    try:
        ran = graph_nodes(lambda: attention(make(), make(), make()))
    except NoKernelError as error:
        raise SkippedError(str(error)) from error
    if FUSED[kernel][1] not in " ".join(ran):
        raise SkippedError(f"torch took another kernel: {', '.join(sorted(ran))}")
