"""`gpt-lightning bench attention`: the written-out definition, compiled, and every fused kernel."""

import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_lightning.bench.matmul import tensor_dtype
from gpt_lightning.bench.sizes import DTYPES, compiled_graphs, devices
from gpt_lightning.bench.sweep import (
    Bench,
    add_sweep_arguments,
    listed,
    one_of,
    run_sweep,
    switch,
)
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.tables import column

if TYPE_CHECKING:
    import torch

    from gpt_lightning.bench.memory_meter import Memory, PhaseContext
    from gpt_lightning.bench.timing import StepTimer

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
NO_KERNEL = ("no viable backend", "no available kernel")  # torch's words


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
    from gpt_lightning.bench.curves import plot_panels

    names = []
    for device, dtype in dict.fromkeys((row.device, row.dtype) for row in rows):
        chosen = [row for row in rows if (row.device, row.dtype) == (device, dtype)]
        names.append(f"attention-{device}-{dtype}.png")
        title = f"Attention, {device}, {dtype} (dashed: not causal; lines end where memory does)"
        plot_panels(folder / names[-1], title, "sequence length (tokens)", panels(chosen))
    return names


def panels(rows: Sequence[AttentionRow]) -> dict[tuple[str, str], Any]:
    """Lines of one device and dtype: a row a quantity, a column a width, a line a kernel."""
    from gpt_lightning.bench.curves import Line

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
    measure="gpt_lightning.bench.attention:measure_attention",
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
            devices(args.device),
            listed(args.dtypes, one_of(DTYPES), "--dtypes"),
            listed(args.causal, switch, "--causal"),
            listed(args.d, int, "--d"),
            listed(args.contexts, int, "--contexts"),
            listed(args.kernels, one_of(list(KERNELS)), "--kernels"),
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


# ---- in the row's own process --------------------------------------------------------------------


def measure_attention(
    device: str,
    dtype: str,
    kernel: str,
    causal: bool,
    batch: int,
    d: int,
    context: int,
    warmup: int,
    steps: int,
    memory_gib: float | None,
) -> dict[str, Any]:
    """Times forward and backward of one kernel and tells what it holds in between."""
    import torch

    from gpt_lightning.bench.memory_meter import limit_memory

    where = torch.device(device)
    kind = tensor_dtype(dtype, where)
    limit_memory(where, memory_gib)
    torch.manual_seed(0)
    attention = make_attention(kernel, causal)
    make = partial(torch.randn, batch, 1, context, d, device=where, dtype=kind, requires_grad=True)
    check_kernel(kernel, attention, make)
    times = time_steps(attention, make, where, warmup, steps)
    return {
        **times,
        **memory_of(held_memory(attention, make, where)),
        "graphs": compiled_graphs(),
        "replaced": replaced_patterns(),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }


def make_attention(kernel: str, causal: bool) -> "Attention":
    """A function of q, k and v, (B, 1, T, d) each."""
    import torch
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from gpt_lightning.attention import naive_attention

    if (backend := KERNELS[kernel]) is None:
        written = partial(naive_attention, dropout_p=0.0) if causal else unmasked_attention
        function: Attention = torch.compile(written, dynamic=False)
        return function if kernel == "compiled" else written

    def fused(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.__members__[backend[0]]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return fused


def unmasked_attention(q: "torch.Tensor", k: "torch.Tensor", v: "torch.Tensor") -> "torch.Tensor":
    """The definition without a mask: every query sees every key."""
    scores = (q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5  # (B, 1, T, T)
    out: torch.Tensor = scores.softmax(dim=-1) @ v
    return out


def replaced_patterns() -> int:
    """Attentions that torch.compile has replaced by scaled_dot_product_attention so far."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fuse_attention"])


def check_kernel(kernel: str, attention: "Attention", make: "Callable[[], torch.Tensor]") -> None:
    """Calls a fused kernel once and looks into the autograd graph for what ran.

    Raises:
        SkippedError: torch has no such kernel for these tensors, with torch's reason, if any; or it
            took another one.
    """
    from gpt_lightning.bench.worker import SkippedError

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
            raise SkippedError("; ".join([*said, str(error)])) from error
    ran = graph_nodes(out)
    if not any(backend[1] in name for name in ran):
        raise SkippedError(f"torch took another kernel: {', '.join(sorted(ran))}")


def graph_nodes(out: "torch.Tensor") -> set[str]:
    """Names of the nodes that made a tensor."""
    names: set[str] = set()
    rest: list[Any] = [out.grad_fn]
    while rest:
        node = rest.pop()
        if node is not None:
            names.add(node.name())
            rest += [parent for parent, _ in node.next_functions]
    return names


def time_steps(
    attention: "Attention",
    make: "Callable[[], torch.Tensor]",
    device: "torch.device",
    warmup: int,
    steps: int,
) -> dict[str, Any]:
    """Times of forward and backward, each inside the step."""
    import torch

    from gpt_lightning.bench.timing import measure

    q, k, v, gradient = (make() for _ in range(4))

    def step(timer: "StepTimer") -> None:
        out = attention(q, k, v)
        timer.end("forward")
        torch.autograd.grad(out, (q, k, v), gradient)
        timer.end("backward")

    times, first_step_s = measure(step, device, warmup, steps)
    found: dict[str, Any] = {"first_step_s": first_step_s}
    for phase in ("forward", "backward", "total"):
        found |= {f"{phase}_ms": times[phase].median, f"{phase}_std_ms": times[phase].std}
    for name in ("mean", "min", "p90", "max"):
        found[f"total_{name}_ms"] = getattr(times["total"], name)
    return found


def held_memory(
    attention: "Attention", make: "Callable[[], torch.Tensor]", device: "torch.device"
) -> "Memory":
    """Memory by phase of one more step, which nobody times."""
    import torch

    from gpt_lightning.bench.memory_meter import measure_memory

    def step(phase: "PhaseContext") -> None:
        q, k, v, gradient = (make() for _ in range(4))
        with phase("forward"):
            out = attention(q, k, v)
        with phase("backward"):
            torch.autograd.grad(out, (q, k, v), gradient)

    return measure_memory(step, device)


def memory_of(memory: "Memory") -> dict[str, Any]:
    """The columns of memory."""
    from gpt_lightning.bench.memory_meter import MIB

    forward, backward = memory.phases["forward"], memory.phases["backward"]
    return {
        "held_mib": (forward.end - forward.begin) / MIB,
        "peak_mib": max(forward.peak, backward.peak) / MIB,
        "memory_method": memory.method,
    }
