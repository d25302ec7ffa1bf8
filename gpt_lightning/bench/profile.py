"""`gpt-lightning bench profile`: where the time of a step goes, kernel by kernel."""

import itertools
import json
import shlex
from dataclasses import dataclass
from typing import Any

from gpt_lightning.bench.core.options import (
    DTYPES,
    add_size_arguments,
    at_least,
    check_bounds,
    chosen_sizes,
    devices,
    listed,
    one_of,
)
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

MODES = ("inference", "training", "full-step")


@dataclass(frozen=True)
class Setting:
    """What was profiled."""

    device: str = column("device")
    dtype: str = column("dtype")
    size: str = column("size", width=8)
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    mode: str = column("mode", width=9)


@dataclass(frozen=True)
class ProfileRow(Setting):
    """A step: its times, and the shares of the kernels' time by kind."""

    timer_ms: float | None = column("timer ms", ",.2f", 9)
    span_ms: float | None = column("span ms", ",.2f", 9)
    kernels_ms: float | None = column("kernels ms", ",.2f")
    busy: float | None = column("busy", ".1%", 6)
    kernel_calls: float | None = column("calls", ",.0f", 6)
    products_calls: float | None = column("products' calls", ",.0f")
    products: float | None = column("products", ".1%")
    softmax: float | None = column("softmax", ".1%")
    elementwise: float | None = column("elementwise", ".1%")
    reductions: float | None = column("reductions", ".1%")
    other: float | None = column("other", ".1%", 6)
    trace: str = column("trace", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


@dataclass(frozen=True)
class RangeRow(Setting):
    """A named range, of one step."""

    range: str = column("range")
    calls: float | None = column("calls", ",.0f")
    span_ms: float | None = column("span ms", ",.3f")
    kernels_ms: float | None = column("kernels ms", ",.3f")
    own_ms: float | None = column("of its own ms", ",.3f")
    products_ms: float | None = column("products ms", ",.3f")
    share: float | None = column("share", ".1%")


@dataclass(frozen=True)
class AttentionRow(Setting):
    """A part of the attention of all layers in one forward pass."""

    part: str = column("part")
    kernels_ms: float | None = column("kernels ms", ",.3f")
    products_ms: float | None = column("products ms", ",.3f")
    time_share: float | None = column("share of time", ".1%")
    gflop: float | None = column("GFLOP", ",.4f")
    flop_share: float | None = column("share of FLOPs", ".1%")
    gflop_per_s: float | None = column("GFLOP/s", ",.1f")


@dataclass(frozen=True)
class KernelRow(Setting):
    """A kernel, of one step; on a CPU an op."""

    kind: str = column("kind")
    kernel: str = column("kernel")
    op: str = column("op", default="")
    calls: float | None = column("calls", ",.1f")
    ms: float | None = column("ms", ",.3f")
    share: float | None = column("share", ".1%")


BENCH = Bench(
    name="profile",
    title="Where the time of a step goes",
    row=ProfileRow,
    measure="gpt_lightning.bench.profile_run:measure_profile",
    notes=(
        "inference: forward under no_grad. training: forward and backward. full-step: data, "
        "forward, backward, optimizer (AdamW). Attention is written out, so that its parts have "
        "kernels of their own. Everything is of one step, the mean of those profiled.",
        "timer: the step without profiler and ranges, median. span: with the profiler, from the "
        "first kernel's begin to the last one's end on a GPU, the range `step` on a CPU. kernels: "
        "their durations together; on a CPU ops, each without the ops that it calls. busy: "
        "kernels of span. What is of its own in `forward` are the embeddings, the head and the "
        "loss.",
        "products: matrix products. softmax: the loss's too. reductions: layer norms, sums, the "
        "loss. other: lookups, copies between devices, allocation, views and their dispatch. Kinds "
        "go by the op that launched a kernel.",
        "attention: FLOPs are 2 a multiply-add and 5 an element of the softmax (maximum, "
        "difference, exponential, sum, quotient); scores includes scaling and masking, whose FLOPs "
        "are not counted and whose time is what products lack.",
        "Published for 4 layers, d_model 512, context 256, batch 4 in fp32 on an A100: matrix "
        "products over 70% of the forward in 30 calls and in the low 50s of the full step, the "
        "optimizer 3 ms of kernels in a span of 16 ms, softmax about 25% of the attention's time.",
        "The traces open in chrome://tracing and in https://ui.perfetto.dev; `tensorboard --logdir`"
        " on this folder shows the tables under TEXT and the times under SCALARS.",
    ),
    hidden=("kernel_calls", "trace", "note"),
    files=True,
    tables={"ranges": RangeRow, "attention": AttentionRow, "kernels": KernelRow},
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench profile", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda or auto; with commas.")
    add_size_arguments(parser)
    parser.add_argument("--contexts", default="256", help="Tokens a sequence, with commas.")
    parser.add_argument("--batches", default="4", help="Sequences, with commas.")
    parser.add_argument("--dtypes", default="fp32", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--modes", default=",".join(MODES), help=f"Of {', '.join(MODES)}.")
    parser.add_argument("--steps", type=int, default=3, help="Steps timed, and steps profiled.")
    parser.add_argument("--warmup", type=int, default=2, help="Steps before.")
    parser.add_argument("--top", type=int, default=20, help="Kernels in the table, a row.")
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench profile ...`.

    Raises:
        UserError: a number is too small.
    """
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, steps=1, top=1, warmup=0)
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "size": size,
            "shape": list(shape),
            "batch": batch,
            "context": context,
            "mode": mode,
            "steps": args.steps,
            "warmup": args.warmup,
            "top": args.top,
        }
        for device, (size, shape), context, batch, dtype, mode in itertools.product(
            devices(args),
            chosen_sizes(args).items(),
            listed(args, "contexts", at_least(1)),
            listed(args, "batches", at_least(1)),
            listed(args, "dtypes", one_of(DTYPES)),
            listed(args, "modes", one_of(MODES)),
        )
    ]
    code = run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)
    print(f"\nWith Nsight Systems and an NVIDIA GPU:\n{nsys_command(configurations[-1])}")
    return code


def nsys_command(configuration: dict[str, Any]) -> str:
    """What has nsys watch one row's steps, whose ranges are NVTX ranges then."""
    values = configuration | {"device": "cuda", "folder": ".", "nsys": True}
    command = [
        *("nsys", "profile", "--trace=cuda,nvtx,cublas", "--output=gpt-lightning-profile"),
        *("--capture-range=cudaProfilerApi", "--capture-range-end=stop"),
        *("python", "-m", "gpt_lightning.bench.core.worker", BENCH.measure, json.dumps(values)),
    ]
    return shlex.join(command)
