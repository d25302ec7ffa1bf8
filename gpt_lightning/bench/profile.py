"""Time of a step kernel by kernel: named ranges, shares by kind, and a trace for Perfetto.

inference: forward under no_grad. training: forward and backward. full-step: data (random tokens,
copied to the device), forward, backward, optimizer (AdamW). Attention is written out, so that its
parts have kernels of their own. All numbers are the averages of torch.profiler for one step.

timer: median step without profiler. span: step with the profiler, from its begin until the device
is idle. kernels: sum of their durations; on a CPU of ops, each without the ops that it calls. busy:
kernels over span. A range on a GPU spans from its first kernel to its last one; the kernels of the
backward are those of the step outside of the other ranges. Ranges in a model have the names of its
modules.

products: matrix products. products outside: those without the attention's (scores and values).
softmax: also that of the loss. reductions: layer norms, sums, the loss. other: lookups, copies
between devices, allocation, views and their dispatch. The op that launched a kernel decides its
kind (kinds.yaml).

attention: FLOPs are 2 for a multiply-add and 5 for an element of the softmax (maximum, difference,
exponential, sum, quotient); those of scaling and masking are not counted. rope: 3 FLOPs a channel
of q and k. Times are those of the ranges in the forward.

Published for 4 layers, d_model 512, context 256, batch 4 in fp32 on an A100: matrix products take
over 70% of the forward in 30 calls and slightly over 50% of the full step, the kernels of the
optimizer 3 ms in a span of 16 ms, and softmax about 25% of the attention's time. With 4 layers the
course's model (--model course) has 37 products, 29 without the attention's; GPT-2 has 25 and 17.

With --budget: the step of `fit` in the sizes of configs/gpu (--sizes 124m), through Trainer and
GPTModule without callbacks, on random tokens, with options of `fit`; the table `parts` has its time
by part. casts: also copies and the sums of gradients over micro-batches.
docs/gpu.md has the least time of each part as formulas.

The traces open in chrome://tracing and in https://ui.perfetto.dev.
"""

import math
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from gpt_lightning.bench import models, timing
from gpt_lightning.bench.step import Training, compiled_graphs, prepare, random_batch, rates
from gpt_lightning.data.loader import Batch
from gpt_lightning.files import Fields, yaml_beside
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option
from gpt_lightning.tables.rows import (
    Column,
    Count,
    Hidden,
    Hundredths,
    Measured,
    Row,
    Share,
    TenThousandths,
    Tenths,
    Text,
    Thousandths,
    Values,
    Whole,
)
from gpt_lightning.tables.sweep import Bench, run_bench
from gpt_lightning.tables.worker import SkippedError

MODES = ("inference", "training", "full-step")
MODULES = ("ln_1", "attn", "rope", "ln_2", "mlp", "ln_f")  # parts of either model, by name
PARTS = ("score product", "scale and mask", "softmax", "value product")  # parts of an attention
PHASES = ("data", "forward", "backward", "optimizer")
RANGES = (*(f"step / {phase}" for phase in PHASES), *MODULES, *PARTS)
TOP = 20  # kernels in the table of a row, before the row of the rest
STEP = "ProfilerStep"  # beginning of the name that the profiler gives a step
TABLE = yaml_beside(__file__, "kinds.yaml")


@dataclass
class ModeRow(models.ModelRow):
    """Row of a model's step; the columns of a measurement follow."""

    mode: Text


@dataclass
class ProfileRow(ModeRow, Measured):
    """Times of a step."""

    timer_ms: Hundredths
    span_ms: Hundredths
    kernels_ms: Hundredths
    busy: Share
    kernel_calls: Annotated[float | None, Column(",.0f", console=False)]
    products_calls: Whole
    products_outside_calls: Whole
    products: Share
    softmax: Share
    elementwise: Share
    reductions: Share
    other: Share
    trace: Hidden


@dataclass
class RangeRow(ModeRow):
    """Times of a range."""

    range: Text
    calls: Whole
    span_ms: Thousandths
    kernels_ms: Thousandths
    share: Share


@dataclass
class PartRow(ModeRow):
    """Time and FLOPs of a part of the attention."""

    part: Text
    kernels_ms: Thousandths
    time_share: Share
    gflop: TenThousandths
    flop_share: Share
    gflop_per_s: Tenths


@dataclass
class KernelRow(Row):
    """Time of a kernel."""

    kind: Text
    kernel: Text
    calls: Tenths
    ms: Thousandths
    share: Share


@dataclass
class ProfileKernelRow(KernelRow, ModeRow):
    """Time of a kernel in a model's step."""


@dataclass
class FitRow(Row):
    """Row of the step of `fit`; the columns of a measurement follow."""

    device: Text
    size: Text


@dataclass
class BudgetRow(FitRow, Measured):
    """Times of the step of `fit`."""

    dtype: Text
    graphs: Count
    timer_ms: Hundredths
    span_ms: Hundredths
    kernels_ms: Hundredths
    busy: Share
    mfu: Share
    step: Hidden
    trace: Hidden


@dataclass
class BudgetPartRow(FitRow):
    """Time of a part."""

    part: Text
    calls: Tenths
    ms: Thousandths
    share: Share


@dataclass
class BudgetKernelRow(KernelRow, FitRow):
    """Time of a kernel in the step of `fit`."""


OPTIONS = (
    options.steps(3),
    options.warmup(2),
    Option("budget", False, "Profile the step of `fit` by part; --budget --help.", type=bool),
)
BENCH = Bench(
    measure="gpt_lightning.bench.profile:measure_profile",
    tables={
        "rows": ProfileRow,
        "ranges": RangeRow,
        "attention": PartRow,
        "kernels": ProfileKernelRow,
    },
    options=(
        options.DEVICE,
        *models.SIZES,
        options.contexts("256"),
        options.batches("4"),
        options.dtypes("fp32"),
        options.words("modes", "mode", MODES),
        *OPTIONS,
    ),
)
BUDGET = Bench(
    tables={"rows": BudgetRow, "parts": BudgetPartRow, "kernels": BudgetKernelRow},
    measure="gpt_lightning.bench.profile:measure_fit",
    options=(
        options.DEVICE,
        options.sizes(models.GPU_SIZES, "124m"),
        *OPTIONS,
    ),
    takes_fit_options=True,
)


def run(argv: list[str]) -> int:
    """Run `bench profile`, of a model alone or of the step of `fit`."""
    return run_bench(BUDGET if "--budget" in argv else BENCH, argv)


# ---- averages of torch.profiler ------------------------------------------------------------------


@dataclass
class Work:
    """Op, kernel or range in one step.

    Attributes:
        name: Name of the op, kernel or range.
        calls: Calls in a step.
        ms: Milliseconds of its own; of a range those of all kernels in it.
        span_ms: Milliseconds from its begin to its end.
    """

    name: str
    calls: float
    ms: float
    span_ms: float

    def kind(self, table: str) -> str:
        """Return the first kind of a table in kinds.yaml of which a pattern matches; or other."""
        name, kinds = self.name.lower(), TABLE[table].items()
        return next((kind for kind, words in kinds if re.search("|".join(words), name)), "other")


class Averages:
    """Work of one step, from the averages of torch.profiler over some steps.

    Args:
        averages: FunctionEventAvg of each name.
        steps: Profiled steps.
        on_gpu: True if the device is a GPU, False if it is a CPU.
    """

    def __init__(self, averages: Sequence[Any], steps: int, on_gpu: bool):
        def work(average: Any, time: str, span: str = "cpu_time_total") -> Work:
            times = (getattr(average, name) / 1e3 / steps for name in (time, span))
            return Work(average.key, average.count / steps, *times)

        unit = "device_time_total" if on_gpu else "cpu_time_total"
        host = [a for a in averages if a.device_type.name == "CPU"]
        device = [a for a in averages if a.device_type.name != "CPU"]
        self.span_ms = sum(a.cpu_time_total for a in host if a.key.startswith(STEP)) / steps / 1e3
        self.ops = [work(a, f"self_{unit}") for a in host if "::" in a.key]
        self.kernels = self.ops
        if on_gpu:
            kernels = (a for a in device if not (a.is_user_annotation or a.key.startswith(STEP)))
            self.kernels = [work(a, f"self_{unit}") for a in kernels]
        self.kernels_ms = sum(kernel.ms for kernel in self.kernels)
        self.ranges = {a.key: work(a, unit) for a in host}
        for a in device:  # the time from the first to the last kernel
            if a.key in self.ranges:
                self.ranges[a.key].span_ms = a.device_time_total / 1e3 / steps


def by_kind(works: Iterable[Work], table: str) -> dict[str, tuple[float, float]]:
    """Return calls and milliseconds of each kind of a table in kinds.yaml."""
    found = dict.fromkeys([*TABLE[table], "other"], (0.0, 0.0))
    for work in works:
        calls, ms = found[kind := work.kind(table)]
        found[kind] = calls + work.calls, ms + work.ms
    return found


class ProfiledBatches(timing.TimedBatches):
    """Batches of steps without profiler, of steps with it, and of one that ends the last of them.

    Args:
        row: Device, numbers of steps, folder of the trace.
        batch: Tokens and targets, int64 (B, T) each, on the device.
        name: Words in the name of the trace.
        k: Micro-batches per step.

    Raises:
        SkippedError: torch.profiler does not support the device.
        RuntimeError: The profiler recorded no kernel.
    """

    averages: Averages

    def __init__(self, row: SimpleNamespace, batch: Batch, name: str, k: int = 1):
        if row.device == "mps":
            raise SkippedError("torch.profiler sees no kernels of MPS")
        super().__init__(batch, k * (row.warmup + row.steps + 1))
        self.row, self.k = row, k
        self.path = Path(row.folder) / f"trace-{name.replace('/', '-')}.json.gz"

    def __len__(self) -> int:
        return self.n + self.k * (self.row.steps + 2)

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        device, steps = self.batch[0].device, self.row.steps
        gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
        once = schedule(wait=0, warmup=1, active=steps, repeat=1)
        with profile(activities=[ProfilerActivity.CPU, *gpu], schedule=once) as profiler:
            for _ in range(1 + steps):
                yield from repeat(self.batch, self.k)
                synchronize(device)
                profiler.step()
        profiler.export_chrome_trace(str(self.path))
        self.averages = Averages(profiler.key_averages(), steps, bool(gpu))
        if not self.averages.kernels:
            raise RuntimeError("torch.profiler recorded no kernel; may this user profile the GPU?")
        yield from repeat(self.batch, self.k)

    def columns(self) -> Fields:
        """Return the columns of the times and of the trace."""
        found, k, warmup = self.averages, self.k, self.row.warmup
        times = self.milliseconds()[k * warmup : k * (warmup + self.row.steps)]
        return {
            "timer_ms": statistics.median(sum(times[i : i + k]) for i in range(0, len(times), k)),
            "span_ms": found.span_ms,
            "kernels_ms": found.kernels_ms,
            "busy": found.kernels_ms / found.span_ms,
            "trace": self.path.name,
        }


# ---- a model alone -------------------------------------------------------------------------------


def measure_profile(row: SimpleNamespace) -> Values:
    """Time steps of a model with attention written out, on random tokens, then profile as many."""
    device = prepare(row)
    shape = f"{row.model}-{row.size}-{row.batch}x{row.context}"
    name = f"{row.device}-{row.dtype}-{shape}-{row.mode}"
    batches = ProfiledBatches(row, random_batch(row.batch, row.context, device), name)
    model = models.make_model(row.model, row.size, row.context).to(device)
    add_ranges(model)
    step = make_step(model, batches.batch, row)
    for _ in batches:
        step()
    averages = batches.averages
    kinds = by_kind(averages.ops, "kinds")
    # linear layers have products of matrices, the attention has batches of them
    batched = sum(op.calls for op in averages.ops if op.name.endswith("bmm"))
    whole = sum(ms for _, ms in kinds.values())
    return {
        **batches.columns(),
        "kernel_calls": sum(kernel.calls for kernel in averages.kernels),
        "products_calls": kinds["products"][0],
        "products_outside_calls": kinds["products"][0] - batched,
        **{kind: ms / whole for kind, (_, ms) in kinds.items()},
        "ranges": ranges_table(averages),
        "attention": attention_table(averages, row),
        "kernels": kernels_table(averages, "kinds"),
    }


def make_step(model: nn.Module, batch: Batch, row: SimpleNamespace) -> Callable[[], object]:
    """Return a step of the row's mode on tokens and targets, int64 (B, T) each."""
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    updates = row.mode == "full-step"
    train = Training(model, batch, row.dtype, optimizer=adamw, clip=False, updates=updates)

    def phase(name: str) -> Any:
        return record_function(f"step / {name}")

    def full_step() -> None:
        with phase("data"):
            x, y = random_batch(row.batch, row.context, torch.device("cpu"))
            train.batch = x.to(train.device), y.to(train.device)
        train(phase)

    step: Callable[..., object] = train if row.mode == "training" else train.infer
    return full_step if updates else partial(step, phase)


def add_ranges(model: nn.Module) -> None:
    """Name the parts of a model's forward, and write its attention out."""
    for name, module in model.named_modules():
        if (part := name.rpartition(".")[2]) in MODULES:
            module.forward = record_function(part)(module.forward)
        if part == "attn":
            module.attention = attention_in_parts


def attention_in_parts(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
    """Return `naive_attention`, op for op, with its parts in ranges."""
    product_, mask_, softmax_, values_ = PARTS
    T, S = q.size(-2), k.size(-2)
    with record_function(product_):
        scores = q @ k.transpose(-2, -1)  # (B, nh, T, S)
    with record_function(mask_):
        scores = scores / math.sqrt(q.size(-1))
        future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
        scores = scores.masked_fill(future, -math.inf)
    with record_function(softmax_):
        weights = scores.softmax(dim=-1)
    with record_function(values_):
        return F.dropout(weights, dropout_p) @ v


# ---- the step of `fit` ---------------------------------------------------------------------------


def measure_fit(row: SimpleNamespace) -> Values:
    """Time steps of `fit`, then profile as many."""
    # names of the loops that torch.compile writes for a CPU; read when the compiler is imported
    os.environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    from gpt_lightning.bench import fits  # imports Lightning, which takes seconds

    device = torch.device(row.device)
    config = fits.parse_fit(fits.row_options(row))
    shape, dtype = fits.step_of(config), fits.dtype_of(config, device)
    training = fits.plain_training(config, shape)
    vocab_size = training["model"]["config"]["vocab_size"]
    batch = random_batch(shape.batch_size, shape.block_size, device, vocab_size)
    batches = ProfiledBatches(row, batch, f"{row.device}-{row.size}", shape.accumulate)
    graphs = compiled_graphs()
    model = fits.train(batches, **training).model
    times = batches.columns()
    rate = shape.tokens / times["timer_ms"] * 1e3
    return {
        **times,
        "dtype": dtype,
        "graphs": compiled_graphs() - graphs,
        "step": str(shape),
        "mfu": rates(model, device, dtype, rate, shape.block_size)["mfu"],
        "parts": parts_table(batches.averages),
        "kernels": kernels_table(batches.averages, "parts"),
    }


# ---- tables --------------------------------------------------------------------------------------


def parts_table(averages: Averages) -> list[Values]:
    """Return a row for each part, for idle and for the whole step; the shares add up to 1."""
    times = by_kind(averages.kernels, "parts")
    times["idle"] = (0.0, averages.span_ms - averages.kernels_ms)
    times["step"] = (0.0, averages.span_ms)
    return [
        {"part": part, "calls": calls, "ms": ms, "share": ms / averages.span_ms}
        for part, (calls, ms) in times.items()
    ]


def ranges_table(averages: Averages) -> list[Values]:
    """Return a row for the step and for each range, in the order of the step."""
    whole = averages.kernels_ms
    found = [Work("step", 1.0, whole, averages.span_ms)]
    found += [averages.ranges[name] for name in RANGES if name in averages.ranges]
    # the kernels of the backward are launched from a thread of their own
    others = sum(w.ms for w in found if w.name in RANGES[: len(PHASES)])
    rows = []
    for work in found:
        ms = work.ms + (whole - others) * (work.name == "step / backward")
        times = {"span_ms": work.span_ms, "kernels_ms": ms, "share": ms / whole}
        rows.append({"range": work.name, "calls": work.calls, **times})
    return rows


def attention_flops(row: SimpleNamespace) -> dict[str, int]:
    """Return the FLOPs of the attention of all layers in one forward pass, by part.

    projections: 3 C and C columns from C rows, 2 FLOPs a multiply-add. Scores and values: the full
    T x T square of each head. softmax: maximum, difference, exponential, sum, quotient. RoPE: two
    products and a sum for each channel of queries and keys.
    """
    n_layer, n_head, C = models.shape_of(row.size)
    tokens = n_layer * row.batch * row.context
    square = tokens * row.context
    found = {"projections": 8 * tokens * C**2}
    if row.model == "course":
        found["rope"] = 6 * tokens * C
    found["score product"] = 2 * square * C
    found["scale and mask"] = 0
    found["softmax"] = 5 * square * n_head
    found["value product"] = 2 * square * C
    return found


def attention_table(averages: Averages, row: SimpleNamespace) -> list[Values]:
    """Return a row for each part of the attention: its share of time and of FLOPs."""
    flops, ranges = attention_flops(row), averages.ranges
    whole = ranges["attn"].ms
    times = {part: ranges[part].ms for part in flops if part in ranges}
    times["projections"] = whole - sum(times.values())
    return [
        {
            "part": part,
            "kernels_ms": times[part],
            "time_share": times[part] / whole,
            "gflop": n / 1e9,
            "flop_share": n / sum(flops.values()),
            "gflop_per_s": n / times[part] / 1e6,
        }
        for part, n in flops.items()
    ]


def kernels_table(averages: Averages, table: str) -> list[Values]:
    """Return a row for each kernel, longest time first; the last row sums up the rest.

    Args:
        averages: Averages of a step.
        table: Table of kinds.yaml for the column `kind`.
    """
    ordered = sorted(averages.kernels, key=lambda kernel: -kernel.ms)
    rows = [(k.kind(table), k.name, k.calls, k.ms) for k in ordered[:TOP]]
    if rest := ordered[TOP:]:
        sums = sum(k.calls for k in rest), sum(k.ms for k in rest)
        rows.append(("", f"{len(rest)} more", *sums))
    return [
        {"kind": of, "kernel": name, "calls": calls, "ms": ms, "share": ms / averages.kernels_ms}
        for of, name, calls, ms in rows
    ]
