"""Time of a step kernel by kernel: named ranges, shares by kind, and a trace for Perfetto.

inference: forward under no_grad. training: forward and backward. full-step: data, forward,
backward, optimizer (AdamW). Attention is written out, so that its parts have kernels of their own.
All numbers are the averages of torch.profiler for one step.

timer: median step without profiler and ranges. span: step with the profiler, from its begin until
the device is idle. kernels: sum of their durations; on a CPU of ops, each without the ops that it
calls. busy: kernels over span. A range on a GPU spans from its first kernel to its last one; the
kernels of the backward are those of the step outside of the other ranges.

products: matrix products; their calls are counted with and without those of the attention (scores
and values). softmax: also that of the loss. reductions: layer norms, sums, the loss. other:
lookups, copies between devices, allocation, views and their dispatch. The op that launched a kernel
decides its kind (kinds.yaml).

attention: FLOPs are 2 for a multiply-add and 5 for an element of the softmax (maximum, difference,
exponential, sum, quotient); those of scaling and masking are not counted. RoPE: 3 FLOPs a channel
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
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from gpt_lightning.bench import models, timing
from gpt_lightning.bench.averages import Averages, Profiled
from gpt_lightning.bench.step import (
    PhaseContext,
    TrainingStep,
    compiled_graphs,
    prepare,
    random_batch,
    rates,
)
from gpt_lightning.hardware.precision import autocast
from gpt_lightning.model.attention import AttentionFn, naive_attention
from gpt_lightning.model.gpt import GPT, MLP, CausalSelfAttention
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option
from gpt_lightning.tables.rows import Row, Values, column, row_type
from gpt_lightning.tables.sweep import Bench, run_bench
from gpt_lightning.tables.worker import SkippedError

MODES = ("inference", "training", "full-step")
MODULES: dict[type[nn.Module], str] = {
    CausalSelfAttention: "attention",
    MLP: "MLP",
    nn.LayerNorm: "layer norm",
    models.CourseAttention: "attention",
    models.RoPE: "RoPE",
    models.SwiGLU: "MLP",
    models.RMSNorm: "RMS norm",
}
PARTS = ("score product", "scale and mask", "softmax", "value product")  # inside an attention
PHASES = ("data", "forward", "backward", "optimizer")
RANGES = (*(f"step / {phase}" for phase in PHASES), *dict.fromkeys(MODULES.values()), *PARTS)
TIMES = "timer_ms span_ms kernels_ms busy:.1%"
KERNEL = "kind kernel calls:,.1f ms:,.3f share"

SETTING = "device dtype model size batch context mode "
BENCH = Bench(
    name="profile",
    title="Where the time of a step goes",
    row=row_type(
        f"{SETTING} {TIMES} -kernel_calls:,.0f products_calls:,.0f products_outside_calls:,.0f "
        "products:.1% softmax:.1% elementwise:.1% reductions:.1% other:.1% -trace status -note",
        products_calls=column("products' calls", ",.0f"),
        products_outside_calls=column("without attention's", ",.0f"),
    ),
    measure="gpt_lightning.bench.profile:measure_profile",
    options=(
        options.DEVICE,
        *models.SIZES,
        options.contexts("256"),
        options.batches(),
        options.dtypes("fp32"),
        options.words("modes", "mode", MODES),
        options.steps(3),
        options.warmup(2),
        options.shared("top", 20, "Kernels in the table of a row."),
        Option("budget", False, "Profile the step of `fit` by part; --budget --help.", type=bool),
    ),
    files=True,
    tables={
        "ranges": row_type(f"{SETTING} range calls:,.0f span_ms:,.3f kernels_ms:,.3f share"),
        "attention": row_type(
            f"{SETTING} part kernels_ms:,.3f time_share gflop:,.4f flop_share gflop_per_s:,.1f",
            gflop_per_s=column("GFLOP/s", ",.1f"),
        ),
        "kernels": row_type(SETTING + KERNEL),
    },
)
BUDGET = Bench(
    name="profile",
    title="The step of `fit` by part",
    row=row_type(f"device size dtype graphs {TIMES} mfu -step -trace status -note"),
    measure="gpt_lightning.bench.profile:measure_fit",
    options=(
        replace(BENCH.options[-1], help="Profile the step of `fit` by part."),
        options.DEVICE,
        options.words("sizes", "size", models.GPU_SIZES, "124m"),
        options.steps(2),
        options.warmup(2),
        options.shared("top", 20, "Kernels in the table of a row."),
    ),
    takes_fit_options=True,
    files=True,
    tables={
        "parts": row_type("device size part calls:,.1f ms:,.3f share"),
        "kernels": row_type(f"device size {KERNEL}"),
    },
)


def run(argv: list[str]) -> int:
    """Run `bench profile`, of a model alone or of the step of `fit`."""
    return run_bench(BUDGET if "--budget" in argv else BENCH, argv)


# ---- a model alone -------------------------------------------------------------------------------


def measure_profile(row: Row) -> Values:
    """Time a step, then profile it.

    Raises:
        SkippedError: torch.profiler does not support the device.
    """
    check_device(row.device)
    device = prepare(row)
    model = models.make_model(row.model, row.shape, row.context).to(device)
    step = Step(model, device, row.dtype, row.batch, row.mode)

    def timed(timer: timing.StepTimer) -> None:
        step()
        timer.end("step")

    times, _ = timing.measure(timed, device, row.warmup, row.steps)
    step.add_ranges()
    setting = (row.device, row.dtype, row.model, row.size, f"{row.batch}x{row.context}", row.mode)
    path = Path(row.folder) / f"trace-{'-'.join(setting).replace('/', '-')}.json.gz"
    with Profiled(device, row.steps, path) as profiled:
        for _ in range(1 + row.steps):
            step()
            profiled.step()
    averages = profiled.averages()
    products = [op for op in averages.ops if op.kind == "products"]
    outside = [op for op in products if not op.name.endswith("bmm")]  # linear layers have 2D ones
    return {
        "trace": path.name,
        **averages.times(times["total"].median),
        "kernel_calls": sum(kernel.calls for kernel in averages.kernels),
        "products_calls": sum(op.calls for op in products),
        "products_outside_calls": sum(op.calls for op in outside),
        **averages.shares(),
        "ranges": ranges_table(averages),
        "attention": attention_table(averages, row),
        "kernels": kernels_table(averages, row.top),
    }


def check_device(kind: str) -> None:
    """Raise SkippedError for a device that torch.profiler does not support."""
    if kind == "mps":
        raise SkippedError("torch.profiler sees no kernels of MPS")


class Step:
    """Step of a model with attention written out, on random tokens.

    Args:
        model: Model on the device.
        device: Device of the model.
        dtype: Dtype of the forward pass, one of DTYPES.
        batch: Sequences per batch.
        mode: Mode, one of MODES.
    """

    def __init__(
        self,
        model: GPT | models.CourseModel,
        device: torch.device,
        dtype: str,
        batch: int,
        mode: str,
    ) -> None:
        self.model, self.device, self.dtype, self.mode = model, device, dtype, mode
        self.tokens = torch.randint(models.VOCABULARY, (1_000_000,))
        adamw, updates = torch.optim.AdamW(model.parameters(), lr=1e-4), mode == "full-step"
        self.train = TrainingStep(
            model, device, dtype, adamw, norm="none", scaled=False, updates=updates
        )
        self.shape = (batch, model.config.block_size)
        self.range: Callable[[str], Any] = nullcontext  # contexts that are decorators too
        self.x, self.y = self.data()
        set_attention(model, naive_attention)

    def data(self) -> tuple[Tensor, Tensor]:
        """Return random windows of the tokens on the device: x and y, (B, T) each."""
        B, T = self.shape
        starts = torch.randint(len(self.tokens) - T, (B, 1))
        windows = self.tokens[starts + torch.arange(T + 1)]  # (B, T + 1)
        return windows[:, :-1].to(self.device), windows[:, 1:].to(self.device)

    def __call__(self) -> None:
        if self.mode == "inference":
            with self.phase("forward"), torch.no_grad(), autocast(self.dtype, self.device):
                self.model(self.x)
            return
        if self.mode == "full-step":
            with self.phase("data"):
                self.x, self.y = self.data()
        self.train(self.x, self.y, self.phase)

    def phase(self, name: str) -> Any:
        """Surround a phase of the step."""
        return self.range(f"step / {name}")

    def add_ranges(self) -> None:
        """Name the parts of every later step."""
        self.range = record_function
        set_attention(self.model, attention_in_parts(self.range))
        for module in self.model.modules():
            if type(module) in MODULES:
                module.forward = self.range(MODULES[type(module)])(module.forward)


def set_attention(model: nn.Module, attention: AttentionFn) -> None:
    """Replace the attention of every layer."""
    for module in model.modules():
        if isinstance(module, CausalSelfAttention | models.CourseAttention):
            module.attention = attention


def attention_in_parts(range_: PhaseContext) -> AttentionFn:
    """Return `naive_attention`, op for op, with its three parts in ranges."""
    product_, mask_, softmax_, values_ = PARTS

    def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        T, S = q.size(-2), k.size(-2)
        with range_(product_):
            scores = q @ k.transpose(-2, -1)  # (B, nh, T, S)
        with range_(mask_):
            scores = scores / math.sqrt(q.size(-1))
            future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
            scores = scores.masked_fill(future, -math.inf)
        with range_(softmax_):
            weights = scores.softmax(dim=-1)
        with range_(values_):
            return F.dropout(weights, dropout_p) @ v

    return attention


# ---- the step of `fit` ---------------------------------------------------------------------------


class ProfiledBatches(timing.TimedBatches):
    """Batches of steps without profiler, of steps with it, and of one that ends the last of them.

    Args:
        row: Device, numbers of steps.
        batch: Tokens and targets, int64 (B, T) each, on the device.
        k: Micro-batches per step.
        path: File of the trace.
    """

    averages: Averages

    def __init__(self, row: Row, batch: tuple[Tensor, Tensor], k: int, path: Path) -> None:
        super().__init__(batch, k * (row.warmup + row.steps + 1))
        self.k, self.steps, self.path = k, row.steps, path

    def __len__(self) -> int:
        return self.n + self.k * (self.steps + 2)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from super().__iter__()
        with Profiled(self.batch[0].device, self.steps, self.path) as profiled:
            for _ in range(1 + self.steps):
                yield from repeat(self.batch, self.k)
                profiled.step()
        self.averages = profiled.averages()
        yield from repeat(self.batch, self.k)


def measure_fit(row: Row) -> Values:
    """Time steps of `fit`, then profile as many.

    Raises:
        SkippedError: torch.profiler does not support the device.
    """
    check_device(row.device)
    # names of the loops that torch.compile writes for a CPU; read when the compiler is imported
    os.environ["TORCHINDUCTOR_CPP_ENABLE_KERNEL_PROFILE"] = "1"
    from gpt_lightning.bench import fits  # imports Lightning, which takes seconds

    device = torch.device(row.device)
    machine = [f"--trainer.accelerator={row.device}", "--trainer.devices=1"]
    config = fits.parse_fit([*fits.size_options(row.size), *row.fit_options, *machine])
    shape, dtype = fits.step_of(config), fits.dtype_of(config, device)
    training, k = fits.plain_training(config, shape), shape.accumulate
    vocab_size = training["model"]["config"]["vocab_size"]
    batch = random_batch(shape.batch_size, shape.block_size, device, vocab_size)
    path = Path(row.folder) / f"trace-{row.device}-{row.size}.json.gz"
    batches = ProfiledBatches(row, batch, k, path)
    graphs = compiled_graphs()
    model = fits.train(batches, **training).model
    averages = batches.averages
    milliseconds = batches.milliseconds()[k * row.warmup : k * (row.warmup + row.steps)]
    times = averages.times(sum(milliseconds) / row.steps)
    rate = shape.tokens / times["timer_ms"] * 1e3
    return {
        **times,
        "dtype": dtype,
        "graphs": compiled_graphs() - graphs,
        "step": str(shape),
        "trace": path.name,
        "mfu": rates(model, device, dtype, rate, shape.block_size)["mfu"],
        "parts": parts_table(averages),
        "kernels": kernels_table(averages, row.top, "part"),
    }


# ---- tables --------------------------------------------------------------------------------------


def parts_table(averages: Averages) -> list[Values]:
    """Return a row for each part, for idle and for the whole step; the shares add up to 1."""
    parts = {part: [k for k in averages.kernels if k.part == part] for part in averages.parts()}
    times = {part: sum(kernel.ms for kernel in inner) for part, inner in parts.items()}
    times |= {"idle": averages.span_ms - sum(times.values()), "step": averages.span_ms}
    return [
        {
            "part": part,
            "calls": sum(kernel.calls for kernel in parts.get(part, ())),
            "ms": ms,
            "share": ms / averages.span_ms,
        }
        for part, ms in times.items()
    ]


def ranges_table(averages: Averages) -> list[Values]:
    """Return a row for the step and for each range, in the order of the step."""
    found = averages.ranges(RANGES)
    whole, backward = averages.kernels_ms, found.get("step / backward")
    if backward is not None:  # its kernels are launched from a thread of their own
        others = (found[name].ms for name in RANGES[: len(PHASES)] if name in found)
        backward.ms += whole - sum(others)
    step = {"range": "step", "calls": 1.0, "span_ms": averages.span_ms, "kernels_ms": whole}
    rows = [step | {"share": 1.0}]
    for name, inner in found.items():
        times = {"span_ms": inner.span_ms, "kernels_ms": inner.ms, "share": inner.ms / whole}
        rows.append({"range": name, "calls": inner.calls, **times})
    return rows


def attention_flops(row: Row) -> dict[str, int]:
    """Return the FLOPs of the attention of all layers in one forward pass, by part.

    projections: 3 C and C columns from C rows, 2 FLOPs a multiply-add. Scores and values: the full
    T x T square of each head. softmax: maximum, difference, exponential, sum, quotient. RoPE: two
    products and a sum for each channel of queries and keys.
    """
    n_layer, n_head, C = row.shape
    tokens, square = row.batch * row.context, row.batch * row.context**2
    rope = {"RoPE": n_layer * 6 * tokens * C} if row.model == "course" else {}
    return {
        "projections": n_layer * 8 * tokens * C**2,
        **rope,
        "score product": n_layer * 2 * square * C,
        "scale and mask": 0,
        "softmax": n_layer * 5 * square * n_head,
        "value product": n_layer * 2 * square * C,
    }


def attention_table(averages: Averages, row: Row) -> list[Values]:
    """Return a row for each part of the attention: its share of time and of FLOPs."""
    flops = attention_flops(row)
    times = {name: found.ms for name, found in averages.ranges(("attention", *flops)).items()}
    whole = times.pop("attention")
    times = {"projections": whole - sum(times.values()), **times}
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


def kernels_table(averages: Averages, top: int, kind: str = "kind") -> list[Values]:
    """Return a row for each kernel, longest time first; the last row sums up the rest.

    Args:
        averages: Averages of a step.
        top: Rows before the last.
        kind: Attribute of the work in the column `kind`: kind or part.
    """
    ordered = sorted(averages.kernels, key=lambda kernel: -kernel.ms)
    rows = [(getattr(k, kind), k.name, k.calls, k.ms) for k in ordered[:top]]
    if rest := ordered[top:]:
        sums = sum(k.calls for k in rest), sum(k.ms for k in rest)
        rows.append(("", f"{len(rest)} more", *sums))
    return [
        {"kind": of, "kernel": name, "calls": calls, "ms": ms, "share": ms / averages.kernels_ms}
        for of, name, calls, ms in rows
    ]
