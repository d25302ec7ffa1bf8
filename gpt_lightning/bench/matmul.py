"""Rates of matrix products: square ones, the model's shapes, and the measured peak.

(m, k) @ (k, n) has 2 m k n FLOPs; backward, the gradients of both factors, has 4 m k n. Times are
medians of one product; a timed round has `calls` products. Model shapes: m = batch x context; the
weight has nn.Linear's layout, (n, k). 124m, 350m, 774m and 1558m have the micro-batch and the
vocabulary of configs/gpu, other sizes 4 x 256 tokens and a vocabulary of 10,000.

measured peak: best rate of torch.mm of squares ever measured on this device, which SpeedMonitor
uses for peak_flops: measure. Shares are fractions of it; a faster shape exceeds 100%. published
peak: dense peak, empty if the table has none.
"""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from jsonargparse import Namespace

from gpt_lightning.bench import models, timing
from gpt_lightning.bench.models import COURSE_SIZES, GPU_SIZES
from gpt_lightning.bench.step import set_products
from gpt_lightning.hardware.device import device_name
from gpt_lightning.hardware.peaks import lookup, measured_peak
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option, listed
from gpt_lightning.tables.rows import (
    Count,
    HiddenHundredths,
    Measured,
    Share,
    Tenths,
    Text,
    Thousandths,
    Values,
)
from gpt_lightning.tables.sweep import Bench

TOKENS = 4 * 256  # batch x context of the sizes that are not in configs/gpu
ROUND_MS = 2.0  # least duration of a phase, so that launches of kernels hide behind it


@dataclass
class MatmulRow(Measured):
    """Rates of one product."""

    device: Text
    dtype: Text
    shape: Text
    m: Count
    k: Count
    n: Count
    calls: Count
    forward_ms: Thousandths
    forward_std_ms: HiddenHundredths
    backward_ms: Thousandths
    backward_std_ms: HiddenHundredths
    forward_tflops_per_sec: Thousandths
    backward_tflops_per_sec: Thousandths
    measured_peak_tflops_per_sec: Thousandths
    published_peak_tflops_per_sec: Tenths
    forward_of_measured: Share
    backward_of_measured: Share


def read_shapes(args: Namespace) -> list[Values]:
    """Return the shapes of --squares and of the weights of --sizes."""
    squares = [] if args.squares == "none" else listed(args, "squares", options.at_least(1))
    known = (*COURSE_SIZES, *GPU_SIZES)
    sizes = [] if args.sizes == "none" else listed(args, "sizes", options.one_of(known))
    shapes = {f"square {n}": (n, n, n) for n in squares}
    for size in sizes:
        if size in GPU_SIZES:
            from gpt_lightning.bench import fits  # imports Lightning, which takes seconds

            config = fits.parse_fit(fits.size_options(size))
            model = config.model.config
            tokens = config.data.batch_size * model.block_size
            shapes |= model_shapes(size, tokens, model.n_embd, model.vocab_size)
        else:
            shapes |= model_shapes(size, TOKENS, models.SHAPES[size][2], models.VOCABULARY)
    return [{"shape": name, "m": m, "k": k, "n": n} for name, (m, k, n) in shapes.items()]


def model_shapes(
    size: str, tokens: int, width: int, vocab_size: int
) -> dict[str, tuple[int, int, int]]:
    """Return (m, k, n) of the products with a GPT-2's weights; all but the head are in each layer.

    Args:
        size: Name of the size.
        tokens: Tokens of a batch, B T.
        width: Width C.
        vocab_size: Vocabulary V.
    """
    return {
        f"{size} qkv": (tokens, width, 3 * width),
        f"{size} attention out": (tokens, width, width),
        f"{size} MLP up": (tokens, width, 4 * width),
        f"{size} MLP down": (tokens, 4 * width, width),
        f"{size} head": (tokens, width, vocab_size),
    }


BENCH = Bench(
    measure="gpt_lightning.bench.matmul:measure_matmul",
    tables={"rows": MatmulRow},
    options=(
        options.DEVICE,
        options.dtypes("fp32,bf16"),
        Option("squares", "512,1024,2048,4096", "Widths with commas, or none.", read_shapes),
        Option("sizes", "small", f"Any of {', '.join((*COURSE_SIZES, *GPU_SIZES))}; or none."),
        options.warmup(2),
        options.steps(10),
    ),
)


# ---- in the row's own process --------------------------------------------------------------------


def measure_matmul(row: SimpleNamespace) -> Values:
    """Time one product and its gradients."""
    device = torch.device(row.device)
    m, k, n = row.m, row.k, row.n
    dtype = set_products(row.dtype, device)
    torch.manual_seed(0)
    x, weight, gradient = (
        torch.randn(*dims, device=device).to(dtype) for dims in ((m, k), (n, k), (m, n))
    )
    x.requires_grad_()
    weight.requires_grad_()

    def products(timer: timing.StepTimer, calls: int) -> None:
        with timer.phase("forward"):
            for _ in range(calls):
                out = F.linear(x, weight)
        with timer.phase("backward"):
            for _ in range(calls):
                torch.autograd.grad(out, (x, weight), gradient, retain_graph=True)

    trial, _ = timing.record(lambda timer: products(timer, 1), device, 1, 3)
    calls = max(1, math.ceil(ROUND_MS / max(min(trial["forward"]), 1e-3)))
    times, _ = timing.record(lambda timer: products(timer, calls), device, row.warmup, row.steps)
    peak = measured_peak(device, row.dtype).flops / 1e12
    published = lookup(device_name(device), row.dtype)
    found: Values = {
        "calls": calls,
        "measured_peak_tflops_per_sec": peak,
        "published_peak_tflops_per_sec": published.flops / 1e12 if published else None,
    }
    for phase, flops in (("forward", 2 * m * k * n), ("backward", 4 * m * k * n)):
        columns = timing.columns(phase, [ms / calls for ms in times[phase]], "std")
        rate = flops / columns[f"{phase}_ms"] / 1e9  # 1e3 ms/s over 1e12 for tera
        found |= columns
        found[f"{phase}_tflops_per_sec"] = rate
        found[f"{phase}_of_measured"] = rate / peak
    return found
