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
profiler's record of tensors on a CPU, and from samples on MPS.
"""

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from gpt_lightning.bench.core import memory_meter, timing, training_step
from gpt_lightning.bench.core.attention_kernels import (
    KERNELS,
    Attention,
    check_kernel,
    check_own,
    make_attention,
)
from gpt_lightning.bench.core.course_model import RoPE
from gpt_lightning.bench.core.memory_meter import MIB, Memory, PhaseContext
from gpt_lightning.errors import UserError
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Values, listed
from gpt_lightning.tables.pictures import plot_rows
from gpt_lightning.tables.rows import column, sweep_row
from gpt_lightning.tables.sweep import Bench

CHECKED_TOKENS = 1024  # of the comparison of a user's kernel with the definition


@sweep_row
class AttentionRow(training_step.DeviceRow):
    """Kernel at one size: median and standard deviation of each phase."""

    model: str = column("model")
    kernel: str = column("kernel", width=14)
    causal: bool = column("causal")
    batch: int = column("batch", "d")
    d: int = column("d", "d", 4)
    context: int = column("context", "d")
    warmup: int = column("warm-up", "d")
    heads: int = column("heads", "d", default=1)
    forward_ms: float | None = column("forward ms", ",.3f")
    forward_mean_ms: float | None = column("mean", ",.3f", 9, console=False)
    forward_std_ms: float | None = column("std", ",.3f", 6, console=False)
    backward_ms: float | None = column("backward ms", ",.3f")
    backward_mean_ms: float | None = column("mean", ",.3f", 9, console=False)
    backward_std_ms: float | None = column("std", ",.3f", 6, console=False)
    total_ms: float | None = column("total ms", ",.3f", 9)
    total_mean_ms: float | None = column("mean ms", ",.3f", 9, console=False)
    total_std_ms: float | None = column("std", ",.3f", 6)
    total_min_ms: float | None = column("min ms", ",.3f", 9, console=False)
    total_p90_ms: float | None = column("p90 ms", ",.3f", 9, console=False)
    total_max_ms: float | None = column("max ms", ",.3f", 9, console=False)
    forward_tflops_per_sec: float | None = column("forward TFLOP/s", ",.2f")
    backward_tflops_per_sec: float | None = column("backward TFLOP/s", ",.2f")
    held_mib: float | None = column("held MiB", ",.1f", 9)
    peak_mib: float | None = column("peak MiB", ",.1f", 9)
    memory_method: str = column("memory by", width=9, default="")
    first_step_s: float | None = column("first step s", ",.2f")
    graphs: int | None = column("graphs", "d")
    replaced: int | None = column("replaced", "d")
    matmul_precision: str = column("matmul", default="", console=False)


QUANTITIES = {
    "forward_ms": "forward (ms)",
    "backward_ms": "backward (ms)",
    "held_mib": "held for backward (MiB)",
    "peak_mib": "peak (MiB)",
}


def picture(folder: Path, rows: Sequence[AttentionRow]) -> list[str]:
    """Draw time and memory over sequence length, one picture for each device and dtype."""
    names = []
    for device, dtype in dict.fromkeys((row.device, row.dtype) for row in rows):
        chosen = [row for row in rows if (row.device, row.dtype) == (device, dtype)]
        names.append(f"attention-{device}-{dtype}.png")
        title = f"Attention, {device}, {dtype} (dashed: not causal; lines end where memory does)"
        x = ("context", "sequence length (tokens)")
        plot_rows(folder / names[-1], title, chosen, x, QUANTITIES, place)
    return names


def place(row: AttentionRow) -> tuple[str, str, str]:
    """Return the column of panels, the label and the style of a row."""
    label = row.kernel + " with RoPE" * (row.model == "course")
    return f"d = {row.d}", label, "-" if row.causal else "--"


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


def read_models(args: Any) -> list[Values]:
    """Return the models of --model; RoPE needs pairs of channels."""
    found = listed(args, "model", options.one_of(options.MODELS))
    odd = [d for d in listed(args, "d", options.at_least(1)) if d % 2]
    if "course" in found and odd:
        raise UserError(f"--d {odd[0]} is odd, and RoPE rotates pairs of channels: give even --d")
    return [{"model": model} for model in found]


BENCH = Bench(
    name="attention",
    title="Attention alone: definition, compiled, fused",
    row=AttentionRow,
    measure="gpt_lightning.bench.attention:measure_attention",
    options=(
        options.DEVICE,
        options.dtypes("fp32"),
        options.switches("causal", "true", "Mask the future"),
        options.numbers("d", "d", "16,32,64,128", "Head widths"),
        options.contexts("256,1024,4096,8192,16384"),
        replace(options.models(), read=read_models),
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


def measure_attention(row: AttentionRow, steps: int, memory_gib: float | None) -> dict[str, Any]:
    """Time forward and backward of one kernel and measure the memory held in between."""
    device = torch.device(row.device)
    dtype = training_step.set_products(row.dtype, device)
    memory_meter.limit_memory(device, memory_gib)
    graphs = training_step.compiled_graphs()
    torch.manual_seed(0)
    rope = RoPE(row.d, row.context).to(device) if row.model == "course" else None
    attention = make_attention(row.kernel, row.causal, rope)

    def make(tokens: int = row.context) -> torch.Tensor:
        shape = (row.batch, tokens, row.heads, row.d)
        return torch.randn(shape, device=device, dtype=dtype).transpose(1, 2).requires_grad_()

    if ":" in row.kernel:
        tensors = [make(min(row.context, CHECKED_TOKENS)) for _ in range(4)]
        check_own(make_attention(row.kernel, row.causal), row.causal, tensors)
    check_kernel(row.kernel, attention, make)
    tensors = [make() for _ in range(4)]
    times, first = timing.measure(
        lambda timer: run_step(attention, tensors, timer.phase), device, row.warmup, steps
    )
    tensors.clear()  # the memory of a step is measured with its own tensors alone
    memory = memory_meter.measure_memory(
        lambda phase: run_step(attention, [make() for _ in range(4)], phase), device
    )
    gflop = 4e-9 * row.batch * row.heads * row.context**2 * row.d / (2 if row.causal else 1)
    return {
        "forward_tflops_per_sec": gflop / times["forward"].median,  # GFLOP/ms
        "backward_tflops_per_sec": 2.5 * gflop / times["backward"].median,
        "first_step_s": first["total"] / 1e3,
        **timing.phase_columns(times, "forward", "backward"),
        **memory_of(memory),
        "graphs": graphs_of(row.kernel, graphs),
        "replaced": counters["inductor"]["fuse_attention"],  # by scaled_dot_product_attention
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def graphs_of(kernel: str, before: int) -> int:
    """Return the graphs made since `before`; a user's kernel may have compiled itself."""
    if ":" in kernel:
        return training_step.compiled_graphs() - before
    return training_step.checked_graphs(kernel == "compiled", before)


def run_step(attention: Attention, tensors: Sequence[torch.Tensor], phase: PhaseContext) -> None:
    """Run forward and backward on q, k, v and the output's gradient, (B, nh, T, d) each."""
    q, k, v, gradient = tensors
    with phase("forward"):
        out = attention(q, k, v)
    with phase("backward"):
        torch.autograd.grad(out, (q, k, v), gradient)


def memory_of(memory: Memory) -> dict[str, Any]:
    """Return the columns of memory."""
    forward, backward = memory.phases["forward"], memory.phases["backward"]
    return {
        "held_mib": (forward.end - forward.begin) / MIB,
        "peak_mib": max(forward.peak, backward.peak) / MIB,
        "memory_method": memory.method,
    }
