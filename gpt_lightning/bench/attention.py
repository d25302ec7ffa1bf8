"""Attention alone: the written-out definition, compiled, and each fused kernel, by size.

One head with q, k and v of (batch, 1, context, d). naive: softmax(q k^T / sqrt(d)) v, written out.
compiled: naive through torch.compile; graphs counts the graphs that it made, and replaced the
attentions for which it called a fused kernel instead, so that the row measures that kernel. sdpa-*:
F.scaled_dot_product_attention restricted to one backend. Forward and backward are phases of one
step, each timed inside it; times are medians.

held: memory at the end of the forward minus memory before it, in a step that is not timed. peak:
highest memory in that step, with q, k and v. Memory comes from the allocator on CUDA, from the
profiler's record of tensors on a CPU, and from samples on MPS.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpt_lightning.bench.core import curves, memory_meter, options, timing, training_step, worker
from gpt_lightning.bench.core.memory_meter import MIB, Memory, PhaseContext
from gpt_lightning.bench.core.sweep import Bench, paragraphs, sweep_row
from gpt_lightning.model.attention import naive_attention
from gpt_lightning.reports.tables import column

NO_KERNEL = ("no viable backend", "no available kernel")  # torch's words
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# name -> SDPBackend and its node in the autograd graph, or None for the definition
KERNELS: dict[str, tuple[str, str] | None] = {
    "naive": None,
    "compiled": None,
    "sdpa-math": ("MATH", "Softmax"),
    "sdpa-flash": ("FLASH_ATTENTION", "FlashAttention"),
    "sdpa-efficient": ("EFFICIENT_ATTENTION", "EfficientAttention"),
    "sdpa-cudnn": ("CUDNN_ATTENTION", "CudnnAttention"),
}


@sweep_row
class AttentionRow:
    """Kernel at one size: median and standard deviation of each phase."""

    device: str = column("device")
    dtype: str = column("dtype")
    kernel: str = column("kernel", width=14)
    causal: bool = column("causal")
    batch: int = column("batch", "d")
    d: int = column("d", "d", 4)
    context: int = column("context", "d")
    warmup: int = column("warm-up", "d")
    forward_ms: float | None = column("forward ms", ",.3f")
    forward_std_ms: float | None = column("std", ",.3f", 6, console=False)
    backward_ms: float | None = column("backward ms", ",.3f")
    backward_std_ms: float | None = column("std", ",.3f", 6, console=False)
    total_ms: float | None = column("total ms", ",.3f", 9)
    total_mean_ms: float | None = column("mean ms", ",.3f", 9, console=False)
    total_std_ms: float | None = column("std", ",.3f", 6)
    total_min_ms: float | None = column("min ms", ",.3f", 9, console=False)
    total_p90_ms: float | None = column("p90 ms", ",.3f", 9, console=False)
    total_max_ms: float | None = column("max ms", ",.3f", 9, console=False)
    held_mib: float | None = column("held MiB", ",.1f", 9)
    peak_mib: float | None = column("peak MiB", ",.1f", 9)
    memory_method: str = column("memory by", width=9, default="")
    first_step_s: float | None = column("first step s", ",.2f")
    graphs: int | None = column("graphs", "d")
    replaced: int | None = column("replaced", "d")
    matmul_precision: str = column("matmul", default="", console=False)


def picture(folder: Path, rows: Sequence[AttentionRow]) -> list[str]:
    """Draw time and memory over sequence length, one picture for each device and dtype."""
    names = []
    for device, dtype in dict.fromkeys((row.device, row.dtype) for row in rows):
        chosen = [row for row in rows if (row.device, row.dtype) == (device, dtype)]
        names.append(f"attention-{device}-{dtype}.png")
        title = f"Attention, {device}, {dtype} (dashed: not causal; lines end where memory does)"
        curves.plot_panels(folder / names[-1], title, "sequence length (tokens)", panels(chosen))
    return names


def panels(rows: Sequence[AttentionRow]) -> dict[tuple[str, str], Any]:
    """Return the lines of one device and dtype: rows are quantities, columns head widths."""
    quantities = {"forward_ms": "forward (ms)", "backward_ms": "backward (ms)"}
    quantities |= {"held_mib": "held for backward (MiB)", "peak_mib": "peak (MiB)"}
    found: dict[tuple[str, str], Any] = {}
    for (field, quantity), d in itertools.product(
        quantities.items(), dict.fromkeys(r.d for r in rows)
    ):
        lines = found.setdefault((quantity, f"d = {d}"), [])
        for kernel, causal in dict.fromkeys((r.kernel, r.causal) for r in rows):
            same = [r for r in rows if (r.kernel, r.causal, r.d) == (kernel, causal, d)]
            points = [(r.context, getattr(r, field)) for r in same]
            color = f"C{list(KERNELS).index(kernel)}"
            lines.append(curves.Line(kernel, points, color, "-" if causal else "--"))
    return found


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
        options.words("kernels", "kernel", KERNELS),
        options.shared("batch", 8, "Sequences per batch."),
        options.warmup(2),
        options.steps(10),
        options.MEMORY_LIMIT,
    ),
    notes=paragraphs(__doc__),
    picture=picture,
)


def measure_attention(row: AttentionRow, steps: int, memory_gib: float | None) -> dict[str, Any]:
    """Time forward and backward of one kernel and measure the memory held in between."""
    device = torch.device(row.device)
    dtype = training_step.set_products(row.dtype, device)
    memory_meter.limit_memory(device, memory_gib)
    graphs = training_step.compiled_graphs()
    torch.manual_seed(0)
    attention = make_attention(row.kernel, row.causal)
    shape = (row.batch, 1, row.context, row.d)
    make = partial(torch.randn, shape, device=device, dtype=dtype, requires_grad=True)
    check_kernel(row.kernel, attention, make)
    tensors = [make() for _ in range(4)]
    times, first_step_s = timing.measure(
        lambda timer: run_step(attention, tensors, timer.phase), device, row.warmup, steps
    )
    tensors.clear()  # the memory of a step is measured with its own tensors alone
    memory = memory_meter.measure_memory(
        lambda phase: run_step(attention, [make() for _ in range(4)], phase), device
    )
    return {
        "first_step_s": first_step_s,
        **timing.phase_columns(times, "forward", "backward"),
        **memory_of(memory),
        "graphs": training_step.checked_graphs(row.kernel == "compiled", graphs),
        "replaced": counters["inductor"]["fuse_attention"],  # by scaled_dot_product_attention
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def make_attention(kernel: str, causal: bool) -> Attention:
    """Return a function of q, k and v, (B, 1, T, d) each."""
    if (backend := KERNELS[kernel]) is None:
        written = partial(naive_attention, dropout_p=0.0) if causal else unmasked_attention
        function: Attention = torch.compile(written, dynamic=False)
        return function if kernel == "compiled" else written

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.__members__[backend[0]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return fused


def unmasked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Compute attention by definition, without a mask."""
    scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5  # (B, 1, T, T)
    out: torch.Tensor = scores.softmax(dim=-1) @ v
    return out


def check_kernel(kernel: str, attention: Attention, make: Callable[[], torch.Tensor]) -> None:
    """Call a fused kernel once and find the kernel that ran in the autograd graph.

    Raises:
        SkippedError: torch has no such kernel for these tensors (the message has torch's reason),
            or torch ran another kernel.
    """
    if (backend := KERNELS[kernel]) is None:
        return
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            out = attention(make(), make(), make())
        except RuntimeError as error:
            if not any(sign in str(error).lower() for sign in NO_KERNEL):
                raise
            said = [str(reason.message).split(" (Triggered")[0] for reason in reasons]
            raise worker.SkippedError("; ".join([*said, str(error)])) from error
    ran = graph_nodes(out)
    if not any(backend[1] in name for name in ran):
        raise worker.SkippedError(f"torch took another kernel: {', '.join(sorted(ran))}")


def graph_nodes(out: torch.Tensor) -> set[str]:
    """Return the names of the autograd nodes behind a tensor."""
    names: set[str] = set()
    rest: list[Any] = [out.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None:
            names.add(node.name())
            rest += [parent for parent, _ in node.next_functions]
    return names


def run_step(attention: Attention, tensors: Sequence[torch.Tensor], phase: PhaseContext) -> None:
    """Run forward and backward on q, k, v and the output's gradient, (B, 1, T, d) each."""
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
