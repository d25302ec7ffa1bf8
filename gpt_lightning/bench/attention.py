"""`gpt-lightning bench attention`: the written-out definition, compiled, and every fused kernel."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_lightning.bench.core.options import (
    DTYPES,
    at_least,
    check_bounds,
    check_positive,
    devices,
    listed,
    one_of,
    switch,
)
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

# name -> SDPBackend and its node in the autograd graph, or None for the definition
KERNELS: dict[str, tuple[str, str] | None] = {
    "naive": None,
    "compiled": None,
    "sdpa-math": ("MATH", "Softmax"),
    "sdpa-flash": ("FLASH_ATTENTION", "FlashAttention"),
    "sdpa-efficient": ("EFFICIENT_ATTENTION", "EfficientAttention"),
    "sdpa-cudnn": ("CUDNN_ATTENTION", "CudnnAttention"),
}


@dataclass(frozen=True)
class AttentionRow:
    """A kernel at one size; of each phase the median and the standard deviation."""

    device: str = column("device")
    dtype: str = column("dtype")
    kernel: str = column("kernel", width=14)
    causal: bool = column("causal")
    batch: int = column("batch", "d")
    d: int = column("d", "d", 4)
    context: int = column("context", "d")
    warmup: int = column("warm-up", "d")
    forward_ms: float | None = column("forward ms", ",.3f")
    forward_std_ms: float | None = column("std", ",.3f", 6)
    backward_ms: float | None = column("backward ms", ",.3f")
    backward_std_ms: float | None = column("std", ",.3f", 6)
    total_ms: float | None = column("total ms", ",.3f", 9)
    total_mean_ms: float | None = column("mean ms", ",.3f", 9)
    total_std_ms: float | None = column("std", ",.3f", 6)
    total_min_ms: float | None = column("min ms", ",.3f", 9)
    total_p90_ms: float | None = column("p90 ms", ",.3f", 9)
    total_max_ms: float | None = column("max ms", ",.3f", 9)
    held_mib: float | None = column("held MiB", ",.1f", 9)
    peak_mib: float | None = column("peak MiB", ",.1f", 9)
    memory_method: str = column("memory by", width=9, default="")
    first_step_s: float | None = column("first step s", ",.2f")
    graphs: int | None = column("graphs", "d")
    replaced: int | None = column("replaced", "d")
    matmul_precision: str = column("matmul", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


def picture(folder: Path, rows: Sequence[AttentionRow]) -> list[str]:
    """Time and memory over sequence length, one picture for each device and dtype."""
    from gpt_lightning.bench.core.curves import plot_panels

    names = []
    for device, dtype in dict.fromkeys((row.device, row.dtype) for row in rows):
        chosen = [row for row in rows if (row.device, row.dtype) == (device, dtype)]
        names.append(f"attention-{device}-{dtype}.png")
        title = f"Attention, {device}, {dtype} (dashed: not causal; lines end where memory does)"
        plot_panels(folder / names[-1], title, "sequence length (tokens)", panels(chosen))
    return names


def panels(rows: Sequence[AttentionRow]) -> dict[tuple[str, str], Any]:
    """Lines of one device and dtype: a row a quantity, a column a width, a line a kernel."""
    from gpt_lightning.bench.core.curves import Line

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
            lines.append(Line(kernel, points, color, "-" if causal else "--"))
    return found


BENCH = Bench(
    name="attention",
    title="Attention alone: definition, compiled, fused",
    row=AttentionRow,
    measure="gpt_lightning.bench.attention_run:measure_attention",
    notes=(
        "One head, q, k and v of (batch, 1, context, d). naive: softmax(q k^T / sqrt(d)) v written "
        "out; compiled: the same through torch.compile (graphs: how many it made; replaced: how "
        "often it recognized attention and called a fused kernel instead: then the row is that "
        "kernel's); sdpa-*: F.scaled_dot_product_attention held to one backend. Forward and "
        "backward are phases of one step, each timed inside it, medians.",
        "held: memory between forward and backward less that before the forward, in a step of its "
        "own; peak: the most in that step, q, k and v included. By the allocator on CUDA, the "
        "profiler's record of tensors on a CPU, samples on MPS.",
    ),
    picture=picture,
    hidden=(
        "forward_std_ms",
        "backward_std_ms",
        "total_mean_ms",
        "total_min_ms",
        "total_p90_ms",
        "total_max_ms",
        "matmul_precision",
        "note",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench attention", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--dtypes", default="fp32", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--kernels", default=",".join(KERNELS), help="Names with commas.")
    parser.add_argument("--causal", default="true", help="true, false, or both with a comma.")
    parser.add_argument("--batch", type=int, default=8, help="Sequences.")
    parser.add_argument("--d", default="16,32,64,128", help="Widths of the head, with commas.")
    parser.add_argument(
        "--contexts", default="256,1024,4096,8192,16384", help="Tokens a sequence, with commas."
    )
    parser.add_argument("--steps", type=int, default=10, help="Steps measured a row.")
    parser.add_argument("--warmup", type=int, default=2, help="Steps before.")
    parser.add_argument(
        "--memory_gib",
        type=float | None,
        default=None,
        help="What a row may take on a CPU; more is out of memory. null: what there is.",
    )
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench attention ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, batch=1, steps=1, warmup=0)
    check_positive(args, "memory_gib")
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "kernel": kernel,
            "causal": causal,
            "batch": args.batch,
            "d": d,
            "context": context,
            "warmup": args.warmup,
            "steps": args.steps,
            "memory_gib": args.memory_gib,
        }
        for device, dtype, causal, d, context, kernel in itertools.product(
            devices(args),
            listed(args, "dtypes", one_of(DTYPES)),
            listed(args, "causal", switch),
            listed(args, "d", at_least(1)),
            listed(args, "contexts", at_least(1)),
            listed(args, "kernels", one_of(list(KERNELS))),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)
