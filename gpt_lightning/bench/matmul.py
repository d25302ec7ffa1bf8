"""`gpt-lightning bench matmul`: the rate of matrix products, of squares and of the model's own."""

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt_lightning.bench.core.options import (
    DTYPES,
    SIZES,
    at_least,
    check_bounds,
    devices,
    listed,
    one_of,
)
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.bench.core.training_step import tensor_dtype
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

if TYPE_CHECKING:
    import torch

    from gpt_lightning.bench.core.timing import StepTimer

ROUND_MS = 2.0  # a phase takes that long at least: launches of kernels hide behind it


@dataclass(frozen=True)
class MatmulRow:
    """A product (m, k) @ (k, n) and its gradients; medians, and the best round."""

    device: str = column("device")
    dtype: str = column("dtype")
    shape: str = column("shape", width=20)
    m: int = column("m", "d", 6)
    k: int = column("k", "d", 6)
    n: int = column("n", "d", 6)
    calls: int | None = column("calls", "d")
    forward_ms: float | None = column("forward ms", ",.3f")
    forward_std_ms: float | None = column("std", ",.3f", 6)
    forward_min_ms: float | None = column("min ms", ",.3f")
    backward_ms: float | None = column("backward ms", ",.3f")
    backward_std_ms: float | None = column("std", ",.3f", 6)
    backward_min_ms: float | None = column("min ms", ",.3f")
    forward_tflops_per_sec: float | None = column("forward TFLOP/s", ",.3f")
    backward_tflops_per_sec: float | None = column("backward TFLOP/s", ",.3f")
    measured_peak_tflops_per_sec: float | None = column("measured peak", ",.3f")
    published_peak_tflops_per_sec: float | None = column("published peak", ",.1f")
    forward_of_measured: float | None = column("forward share", ".1%")
    backward_of_measured: float | None = column("backward share", ".1%")
    matmul_precision: str = column("matmul", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench(
    name="matmul",
    title="Matrix products: squares and the model's own shapes",
    row=MatmulRow,
    measure="gpt_lightning.bench.matmul:measure_matmul",
    notes=(
        "(m, k) @ (k, n), 2 m k n FLOPs; backward: the gradients of both factors, 4 m k n. Times "
        "are of one product, medians; a timed round has `calls` of them. Model shapes: m = batch x "
        "context; the weight lies as nn.Linear keeps it, (n, k).",
        "measured peak: what SpeedMonitor divides by with peak_flops: measure, the best rate of "
        "torch.mm of squares ever seen on this device. Shares are of it, and above 100% where a "
        "shape does better. published peak: dense, empty if the table has none.",
    ),
    hidden=(
        "forward_std_ms",
        "forward_min_ms",
        "backward_std_ms",
        "backward_min_ms",
        "matmul_precision",
        "note",
    ),
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench matmul", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--squares", default="512,1024,2048,4096", help="With commas, or none.")
    parser.add_argument("--sizes", default="small", help=f"Of {', '.join(SIZES)}; or none.")
    parser.add_argument("--batch", type=int, default=4, help="Sequences of the model's shapes.")
    parser.add_argument("--context", type=int, default=256, help="Tokens a sequence.")
    parser.add_argument("--vocab_size", type=int, default=10_000, help="Columns of the head.")
    parser.add_argument("--steps", type=int, default=10, help="Rounds measured a row.")
    parser.add_argument("--warmup", type=int, default=2, help="Rounds before.")
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench matmul ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, batch=1, context=1, vocab_size=1, steps=1, warmup=0)
    squares = [] if args.squares == "none" else listed(args, "squares", at_least(1))
    sizes = [] if args.sizes == "none" else listed(args, "sizes", one_of(list(SIZES)))
    shapes = {f"square {n}": (n, n, n) for n in squares}
    for size in sizes:
        width = SIZES[size][2]
        shapes |= model_shapes(size, args.batch * args.context, width, args.vocab_size)
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "shape": name,
            "m": m,
            "k": k,
            "n": n,
            "warmup": args.warmup,
            "steps": args.steps,
        }
        for device, dtype, (name, (m, k, n)) in itertools.product(
            devices(args), listed(args, "dtypes", one_of(DTYPES)), shapes.items()
        )
    ]
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


def model_shapes(
    size: str, tokens: int, width: int, vocab_size: int
) -> dict[str, tuple[int, int, int]]:
    """The products with weights of a GPT-2, (m, k, n); all but the head once a layer.

    Args:
        size: Its name.
        tokens: B T.
        width: C.
        vocab_size: V.
    """
    layers = {"qkv": (width, 3 * width), "attention out": (width, width)}
    layers |= {"MLP up": (width, 4 * width), "MLP down": (4 * width, width)}
    layers |= {"head": (width, vocab_size)}
    return {f"{size} {name}": (tokens, k, n) for name, (k, n) in layers.items()}


# ---- in the row's own process --------------------------------------------------------------------


def measure_matmul(
    device: str, dtype: str, shape: str, m: int, k: int, n: int, warmup: int, steps: int
) -> dict[str, Any]:
    """Times one product and its gradients."""
    import torch
    import torch.nn.functional as F

    from gpt_lightning.bench.core.timing import measure

    where = torch.device(device)
    kind = tensor_dtype(dtype, where)
    torch.manual_seed(0)
    x, weight, gradient = (
        torch.randn(*dims, device=where).to(kind) for dims in ((m, k), (n, k), (m, n))
    )
    x.requires_grad_()
    weight.requires_grad_()

    def products(timer: "StepTimer", calls: int) -> None:
        for _ in range(calls):
            out = F.linear(x, weight)
        timer.end("forward")
        for _ in range(calls):
            torch.autograd.grad(out, (x, weight), gradient, retain_graph=True)
        timer.end("backward")

    trial, _ = measure(lambda timer: products(timer, 1), where, 1, 3)
    calls = max(1, math.ceil(ROUND_MS / max(trial["forward"].min, 1e-3)))
    times, _ = measure(lambda timer: products(timer, calls), where, warmup, steps)
    found = {
        f"{phase}_{name}": getattr(times[phase], statistic) / calls
        for phase in ("forward", "backward")
        for name, statistic in (("ms", "median"), ("std_ms", "std"), ("min_ms", "min"))
    }
    precision = torch.get_float32_matmul_precision()
    rates = compare(found, 2 * m * k * n, where, dtype)
    return {"calls": calls, "matmul_precision": precision, **found, **rates}


def compare(
    found: dict[str, float], flops: int, device: "torch.device", dtype: str
) -> dict[str, float | None]:
    """Rates of the medians, and what SpeedMonitor would divide them by."""
    from gpt_lightning.hardware.peaks import device_name, lookup, measured_peak

    published = lookup(device_name(device), dtype)
    peak = measured_peak(device, dtype).flops / 1e12
    forward = flops / found["forward_ms"] / 1e9  # 1e3 ms a second, 1e12 of a tera
    backward = 2 * flops / found["backward_ms"] / 1e9
    return {
        "forward_tflops_per_sec": forward,
        "backward_tflops_per_sec": backward,
        "measured_peak_tflops_per_sec": peak,
        "published_peak_tflops_per_sec": published.flops / 1e12 if published else None,
        "forward_of_measured": forward / peak,
        "backward_of_measured": backward / peak,
    }
