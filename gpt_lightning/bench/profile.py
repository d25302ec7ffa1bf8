"""Time of a step kernel by kernel: named ranges, shares by kind, traces, TensorBoard.

inference: forward under no_grad. training: forward and backward. full-step: data, forward,
backward, optimizer (AdamW). Attention is written out, so that its parts have kernels of their own.
All numbers are for one step, the mean of the profiled ones.

timer: median step without profiler and ranges. span: step with the profiler, from the begin of the
first kernel to the end of the last one on a GPU, the range `step` on a CPU. kernels: sum of their
durations; on a CPU of ops, each without the ops that it calls. busy: kernels over span. The own
time of `forward` is that of the embeddings, the head and the loss.

products: matrix products; their calls are counted with and without those of the attention (scores
and values). softmax: also that of the loss. reductions: layer norms, sums, the loss. other:
lookups, copies between devices, allocation, views and their dispatch. The op that launched a kernel
decides its kind.

attention: FLOPs are 2 for a multiply-add and 5 for an element of the softmax (maximum, difference,
exponential, sum, quotient). Scores include scaling and masking: their FLOPs are not counted, and
their time is the difference between kernels and products. RoPE: 3 FLOPs a channel of q and k.

Published for 4 layers, d_model 512, context 256, batch 4 in fp32 on an A100: matrix products take
over 70% of the forward in 30 calls and slightly over 50% of the full step, the kernels of the
optimizer 3 ms in a span of 16 ms, and softmax about 25% of the attention's time. With 4 layers the
course's model (--model course) has 37 products, 29 without the attention's; GPT-2 has 25 and 17.

With --budget: the step of `fit` by part, beside the least time of each; --budget --help has its
options.

The traces open in chrome://tracing and in https://ui.perfetto.dev; `tensorboard --logdir` on this
folder shows the tables under TEXT and the times under SCALARS.
"""

import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import record_function

from gpt_lightning.bench.core import course_model, nsys, timing, trace_tables, traces, training_step
from gpt_lightning.hardware.device import synchronize
from gpt_lightning.model.attention import AttentionFn, naive_attention
from gpt_lightning.model.gpt import GPT, MLP, CausalSelfAttention
from gpt_lightning.tables import options, worker
from gpt_lightning.tables.rows import column, make_row, markdown, sweep_row
from gpt_lightning.tables.sweep import Bench, Sweep, run_bench

MODES = ("inference", "training", "full-step")
MODULES: dict[type[nn.Module], str] = {
    CausalSelfAttention: "attention",
    MLP: "MLP",
    nn.LayerNorm: "layer norm",
    course_model.CourseAttention: "attention",
    course_model.RoPE: "RoPE",
    course_model.SwiGLU: "MLP",
    course_model.RMSNorm: "RMS norm",
}
PARTS = trace_tables.PARTS
PHASES = ("step", "data", "forward", "backward", "optimizer")
NAMES = (*PHASES, *MODULES.values(), *PARTS)


@dataclass(frozen=True)
class Setting(training_step.SubjectRow):
    """Configuration that was profiled."""

    mode: str = column("mode", width=9)


@sweep_row
class ProfileRow(Setting):
    """Times of a step, and the shares of the kernels' time by kind."""

    timer_ms: float | None = column("timer ms", ",.2f", 9)
    span_ms: float | None = column("span ms", ",.2f", 9)
    kernels_ms: float | None = column("kernels ms", ",.2f")
    busy: float | None = column("busy", ".1%", 6)
    kernel_calls: float | None = column("calls", ",.0f", 6, console=False)
    products_calls: float | None = column("products' calls", ",.0f")
    products_outside_calls: float | None = column("without attention's", ",.0f")
    products: float | None = column("products", ".1%")
    softmax: float | None = column("softmax", ".1%")
    elementwise: float | None = column("elementwise", ".1%")
    reductions: float | None = column("reductions", ".1%")
    other: float | None = column("other", ".1%", 6)
    trace: str = column("trace", default="", console=False)


@dataclass(frozen=True)
class RangeRow(Setting):
    """Named range of one step."""

    range: str = column("range")
    calls: float | None = column("calls", ",.0f")
    span_ms: float | None = column("span ms", ",.3f")
    kernels_ms: float | None = column("kernels ms", ",.3f")
    own_ms: float | None = column("of its own ms", ",.3f")
    products_ms: float | None = column("products ms", ",.3f")
    share: float | None = column("share", ".1%")


@dataclass(frozen=True)
class AttentionRow(Setting):
    """Part of the attention of all layers in one forward pass."""

    part: str = column("part")
    kernels_ms: float | None = column("kernels ms", ",.3f")
    products_ms: float | None = column("products ms", ",.3f")
    time_share: float | None = column("share of time", ".1%")
    gflop: float | None = column("GFLOP", ",.4f")
    flop_share: float | None = column("share of FLOPs", ".1%")
    gflop_per_s: float | None = column("GFLOP/s", ",.1f")


@dataclass(frozen=True)
class KernelRow(trace_tables.KernelColumns, Setting):
    """Kernel of one step."""


def run(argv: list[str]) -> int:
    """Run `bench profile`, or with --budget the bench of core/budget.py."""
    if "--budget" not in argv:
        return run_bench(BENCH, argv)
    from gpt_lightning.bench.core import budget  # imports Lightning, which takes seconds

    return run_bench(budget.BENCH, argv)


def nsys_command(args: Any, sweep: Sweep) -> str:
    """Return a command that records the last row's steps with nsys, with NVTX ranges."""
    command = nsys.command(BENCH.measure, sweep.configurations[-1])
    return f"\nWith Nsight Systems and an NVIDIA GPU:\n{shlex.join(command)}"


BENCH = Bench(
    name="profile",
    title="Where the time of a step goes",
    row=ProfileRow,
    measure="gpt_lightning.bench.profile:measure_profile",
    options=(
        options.DEVICE,
        *options.SIZES,
        options.contexts("256"),
        options.batches(),
        options.dtypes("fp32"),
        options.words("modes", "mode", MODES),
        options.steps(3),
        options.warmup(2),
        options.shared("top", 20, "Kernels in the table of a row."),
        options.BUDGET,
    ),
    files=True,
    tables={"ranges": RangeRow, "attention": AttentionRow, "kernels": KernelRow},
    epilogue=nsys_command,
)


def measure_profile(
    row: ProfileRow,
    shape: list[int],
    steps: int,
    warmup: int,
    top: int,
    folder: str,
    for_nsys: bool = False,
) -> dict[str, Any]:
    """Time a step, then profile it.

    Raises:
        SkippedError: torch.profiler does not support the device.
    """
    device = training_step.prepare(row)
    if device.type == "mps":
        raise worker.SkippedError("torch.profiler sees no kernels of MPS")
    model = training_step.make_subject(row.model, shape, row.context).to(device)
    step = Step(model, device, row.dtype, row.batch, row.mode)

    def timed(timer: timing.StepTimer) -> None:
        step()
        timer.end("step")

    times, _ = timing.measure(timed, device, warmup, steps)
    step.add_ranges()
    if for_nsys:
        watched(step, steps)
        return {"timer_ms": times["total"].median}
    setting = (row.device, row.dtype, row.model, row.size, f"{row.batch}x{row.context}", row.mode)
    label = "-".join(setting).replace("/", "-")
    path = Path(folder) / f"trace-{label}.json.gz"
    for _ in traces.profiled_steps(device, steps, path):
        step()
    works = traces.read_file(path, NAMES, step.on_gpu)
    flops = trace_tables.attention_flops(row.model, shape, row.batch, row.context)
    result = {
        "trace": path.name,
        **trace_tables.summary(works, steps, times["total"].median, step.on_gpu),
        "ranges": trace_tables.ranges_table(works, steps, step.on_gpu),
        "attention": trace_tables.attention_table(works, steps, flops),
        "kernels": trace_tables.kernels_table(works, steps, top),
    }
    write_tensorboard(Path(folder) / "tensorboard" / label, vars(row) | result)
    return result


class Step:
    """Step of a model with attention written out, on random tokens.

    Args:
        model: Model on the device.
        device: Device of the model.
        dtype: Dtype of the forward pass, one of options.DTYPES.
        batch: Sequences per batch.
        mode: Mode, one of MODES.
    """

    def __init__(
        self,
        model: GPT | course_model.CourseModel,
        device: torch.device,
        dtype: str,
        batch: int,
        mode: str,
    ) -> None:
        self.model, self.device, self.dtype, self.mode = model, device, dtype, mode
        self.on_gpu = device.type == "cuda"
        self.tokens = torch.randint(training_step.VOCABULARY, (1_000_000,))
        adamw, updates = torch.optim.AdamW(model.parameters(), lr=1e-4), mode == "full-step"
        self.train = training_step.TrainingStep(
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
        with self.range("step"):
            if self.mode == "inference":
                autocast = training_step.autocast(self.dtype, self.device)
                with self.range("forward"), torch.no_grad(), autocast:
                    self.model(self.x)
                return
            if self.mode == "full-step":
                with self.range("data"):
                    self.x, self.y = self.data()
            self.train(self.x, self.y, self.range)

    def add_ranges(self) -> None:
        """Name the parts of every later step."""
        self.range = nvtx_range if self.on_gpu else record_function
        set_attention(self.model, attention_in_parts(self.range))
        for module in self.model.modules():
            if type(module) in MODULES:
                module.forward = self.range(MODULES[type(module)])(module.forward)


# ---- ranges --------------------------------------------------------------------------------------


@contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Open a range of torch.profiler and of nsys."""
    with record_function(name), torch.cuda.nvtx.range(name):
        yield


def set_attention(model: nn.Module, attention: AttentionFn) -> None:
    """Replace the attention of every layer."""
    for module in model.modules():
        if isinstance(module, CausalSelfAttention | course_model.CourseAttention):
            module.attention = attention


def attention_in_parts(range_: training_step.PhaseContext) -> AttentionFn:
    """Return `naive_attention`, op for op, with its three parts in ranges."""
    scores_, softmax_, values_ = PARTS

    def attention(q: Tensor, k: Tensor, v: Tensor, dropout_p: float) -> Tensor:
        T, S = q.size(-2), k.size(-2)
        with range_(scores_):
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))  # (B, nh, T, S)
            future = torch.ones(T, S, dtype=torch.bool, device=q.device).triu(S - T + 1)
            scores = scores.masked_fill(future, -math.inf)
        with range_(softmax_):
            weights = scores.softmax(dim=-1)
        with range_(values_):
            return F.dropout(weights, dropout_p) @ v

    return attention


# ---- profiling -----------------------------------------------------------------------------------


def watched(step: Step, steps: int) -> None:
    """Run steps for nsys, which cannot record together with torch.profiler."""
    step()
    synchronize(step.device)
    torch.cuda.profiler.start()
    for _ in range(steps):
        step()
    synchronize(step.device)
    torch.cuda.profiler.stop()


# ---- TensorBoard ---------------------------------------------------------------------------------


def write_tensorboard(folder: Path, result: dict[str, Any]) -> None:
    """Write the tables as texts, times and shares as scalars: a run for each row."""
    from torch.utils.tensorboard import SummaryWriter

    setting = {name: value for name, value in result.items() if not isinstance(value, list)}
    with SummaryWriter(str(folder)) as writer:
        writer.add_text("profile/step", markdown([make_row(ProfileRow, setting)]))
        for name, row in BENCH.tables.items():
            rows = [make_row(row, setting | part) for part in result[name]]
            writer.add_text(f"profile/{name}", markdown(rows))
        for name in ("timer_ms", "span_ms", "kernels_ms", "busy"):
            writer.add_scalar(f"profile/{name}", result[name], 0)
        for kind in traces.KINDS:
            writer.add_scalar(f"share/{kind}", result[kind], 0)
        for part in result["ranges"]:
            tag = part["range"].replace(" / ", "/").replace(" ", "_")
            writer.add_scalar(f"kernels_ms/{tag}", part["kernels_ms"], 0)
