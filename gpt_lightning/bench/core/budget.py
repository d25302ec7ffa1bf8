"""Budget of the step of `fit`: its time by part, beside the least time that the device needs.

The step is that of configs/gpu with options of `fit`, through Trainer and GPTModule without
callbacks, on random tokens. All numbers are for one optimizer step, the mean of the steps.

timer: step without profiler. span: profiled step, from the begin of its first kernel to the end of
its last one on a GPU, from its first batch to its end on a CPU. kernels: sum of their durations; on
a CPU of ops, each without the ops that it calls. idle: span less kernels; on a CPU what is outside
of ops, such as Python.

Parts go by the names of ops and kernels (kinds.yaml); a compiled kernel with several ops counts to
the first part that matches. casts: also copies and the sums of gradients over micro-batches.
elementwise: GELU, residual sums, gradients of biases. optimizer: also the gradients' norm and their
clipping. other: embeddings, allocation, views; Muon's products are products.

floor of products: 6 FLOPs a weight and token over the peak. Of attention: 2 products in the forward
and 5 in the backward, which computes the scores again, with half of the T x T square. Of the rest:
bytes over the bandwidth of a copy, each tensor read or written once in the dtype of the products.
norms: 2 tensors (B, T, C) in the forward and 3 in the backward. loss: logits read twice, their
gradient written. casts: weights from float32, gradients to float32, and their sums. elementwise: 5
tensors (B, T, 4 C) of GELU. optimizer: weights, gradients and AdamW's two moments read, gradients
again for the norm, weights and moments written. A part below its floor had tensors in a cache, or
is in kernels of other parts. ceilings: that peak, and that bandwidth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config
from torch.profiler import record_function

from gpt_lightning.bench.core import fit_run, timing, trace_tables, traces, training_step
from gpt_lightning.bench.core.traces import Work
from gpt_lightning.data.loader import Batch
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import column, sweep_row
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError
from gpt_lightning.training.steps import StepShape

COPIED = 2**28  # bytes of the copy that measures bandwidth; larger than any cache


@dataclass(frozen=True)
class Setting:
    """Size that was profiled."""

    device: str = column("device")
    size: str = column("size")


@sweep_row
class BudgetRow(Setting):
    """Times of a step."""

    dtype: str = column("dtype", default="")
    graphs: int | None = column("graphs", "d")
    timer_ms: float | None = column("timer ms", ",.2f", 9)
    span_ms: float | None = column("span ms", ",.2f", 9)
    kernels_ms: float | None = column("kernels ms", ",.2f")
    busy: float | None = column("busy", ".1%", 6)
    mfu: float | None = column("MFU", ".1%", 6)
    step: str = column("step", default="", console=False)
    ceilings: str = column("ceilings", default="", console=False)


@dataclass(frozen=True)
class PartRow(Setting):
    """Part of a step."""

    part: str = column("part")
    calls: float | None = column("calls", ",.1f")
    ms: float | None = column("ms", ",.3f")
    share: float | None = column("share", ".1%")
    floor_ms: float | None = column("floor ms", ",.3f")
    over_floor: float | None = column("over floor", ",.2f")


@dataclass(frozen=True)
class KernelRow(trace_tables.KernelColumns, Setting):
    """Kernel of one step."""


BENCH = Bench(
    name="profile",
    title="Budget of the step of `fit`",
    row=BudgetRow,
    measure="gpt_lightning.bench.core.budget:measure_budget",
    options=(
        options.BUDGET,
        options.DEVICE,
        options.words("sizes", "size", options.GPU_SIZES, "124m"),
        options.steps(2),
        options.warmup(2),
        options.shared("top", 20, "Kernels in the table of a row."),
    ),
    takes_fit_options=True,
    files=True,
    tables={"parts": PartRow, "kernels": KernelRow},
)


class ProfiledBatches(timing.TimedBatches):
    """Batches of steps without profiler, of steps with it, and of one that ends the last of them.

    Args:
        batch: Tokens and targets, int64 (B, T) each, on the device.
        k: Micro-batches per step.
        timed: Steps without profiler.
        steps: Steps with profiler, of which one more is not recorded.
        path: File of the trace.
    """

    def __init__(self, batch: Batch, k: int, timed: int, steps: int, path: Path) -> None:
        super().__init__(batch, k * timed)
        self.k, self.steps, self.path = k, steps, path

    def __len__(self) -> int:
        return self.n + self.k * (self.steps + 2)

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        for _ in traces.profiled_steps(self.batch[0].device, self.steps, self.path):
            with record_function("step"):
                yield from repeat(self.batch, self.k)
        yield from repeat(self.batch, self.k)


def measure_budget(
    row: BudgetRow, steps: int, warmup: int, top: int, fit_options: list[str], folder: str
) -> dict[str, Any]:
    """Time steps, then profile as many.

    Raises:
        SkippedError: torch.profiler does not support the device.
    """
    device = torch.device(row.device)
    if device.type == "mps":
        raise SkippedError("torch.profiler sees no kernels of MPS")
    machine = [f"--trainer.accelerator={row.device}", "--trainer.devices=1"]
    config = fit_run.parse_fit([*fit_run.size_options(row.size), *fit_options, *machine])
    shape, dtype = fit_run.step_of(config), fit_run.dtype_of(config, device)
    training, k = fit_run.plain_training(config, shape), shape.accumulate
    peak, bandwidth = training_step.peak_flops(device, dtype), copy_bandwidth(device)
    torch._inductor.config.cpp.enable_kernel_profile = True  # names of the loops of a CPU
    vocab_size = training["model"]["config"]["vocab_size"]
    batch = training_step.random_batch(shape.batch_size, shape.block_size, device, vocab_size)
    path = Path(folder) / f"trace-{row.device}-{row.size}.json.gz"
    batches = ProfiledBatches(batch, k, warmup + steps + 1, steps, path)
    graphs = training_step.compiled_graphs()
    model = fit_run.train(batches, **training).model
    works = traces.read_file(path, ("step",), device.type == "cuda")
    timer_ms = sum(batches.milliseconds()[k * warmup : k * (warmup + steps)]) / steps
    times = trace_tables.summary(works, steps, timer_ms, device.type == "cuda")
    rate, least = shape.tokens / timer_ms * 1e3, floors(model, shape, dtype, peak, bandwidth)
    return {
        **times,
        "dtype": dtype,
        "graphs": training_step.compiled_graphs() - graphs,
        "step": str(shape),
        "ceilings": f"{peak / 1e12:,.1f} TFLOP/s, {bandwidth / 1e9:,.1f} GB/s",
        "mfu": training_step.rates(model, device, dtype, rate, shape.block_size)["mfu"],
        "parts": parts_table(works, steps, times["span_ms"], least),
        "kernels": trace_tables.kernels_table(works, steps, top, "part"),
    }


def copy_bandwidth(device: torch.device) -> float:
    """Return the bytes per second that the device's best copy reads and writes together."""
    source, target = torch.ones(2, COPIED, dtype=torch.uint8, device=device)

    def copy(timer: timing.StepTimer) -> None:
        target.copy_(source)
        timer.end("copy")

    times, _ = timing.measure(copy, device, 2, 10)
    return 2 * COPIED / times["copy"].min * 1e3


def floors(
    model: GPT, step: StepShape, dtype: str, peak_flops: float, bandwidth: float
) -> dict[str, float]:
    """Return the least milliseconds of the parts of an optimizer step.

    Args:
        model: Model.
        step: Shape of a step on one device.
        dtype: Dtype of the products.
        peak_flops: Peak of the products in FLOP/s.
        bandwidth: Bytes per second.
    """
    config, k, tokens = model.config, step.accumulate, step.tokens
    L, C, V = config.n_layer, config.n_embd, model.lm_head.out_features
    matrices = L * 12 * C**2 + V * C
    e = 2 if dtype in training_step.AUTOCAST else 4  # bytes of an element in the products' dtype
    casts = (k * (4 + e) + (e + 4) if e < 4 else 0) + (k - 1) * (e + 8)
    flops = {"products": 6 * tokens * matrices, "attention": 7 * tokens * L * step.block_size * C}
    moved = {
        "norms": 5 * tokens * (2 * L + 1) * C * e,
        "loss": 3 * tokens * V * e,
        "optimizer": 8 * 4 * model.num_params(),
        "casts": casts * matrices,
        "elementwise": 5 * tokens * L * 4 * C * e,
    }
    times = {part: n / peak_flops for part, n in flops.items()}
    times |= {part: n / bandwidth for part, n in moved.items()}
    return {part: seconds * 1e3 for part, seconds in times.items()}


def parts_table(
    works: list[Work], steps: int, span_ms: float, least: dict[str, float]
) -> list[dict[str, Any]]:
    """Return a row for each part, for idle and for the whole step; the shares add up to 1.

    Args:
        works: Work of all profiled steps.
        steps: Number of profiled steps.
        span_ms: Time of a profiled step.
        least: Floors of the parts in milliseconds.
    """
    parts: dict[str, list[Work]] = {part: [] for part in (*least, "other")}
    for work in works:
        parts[work.part].append(work)
    times = {part: traces.total_ms(found) / steps for part, found in parts.items()}
    times |= {"idle": span_ms - sum(times.values()), "step": span_ms}
    floor = least | {"step": sum(least.values())}
    return [
        {
            "part": part,
            "calls": len(parts[part]) / steps if part in parts else None,
            "ms": ms,
            "share": ms / span_ms,
            "floor_ms": floor.get(part),
            "over_floor": ms / floor[part] if part in floor else None,
        }
        for part, ms in times.items()
    ]
