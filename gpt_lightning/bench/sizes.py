"""Times of forward, backward and optimizer by model, size, dtype, compilation, context and batch.

forward, backward, optimizer: phases of one training step, each timed inside it; total: the whole
step. forward + backward: their sum in each step. Times are medians, with the mean and the standard
deviation beside them: in a row with warm-up 0 the mean contains the first step, the median hardly.
first forward, first step: the very first call, with compilation. optimizer: clipping to a norm of
1, AdamW and zero_grad, as in `fit`; with --optimizer false the total has none. warm inference:
forward under no_grad in evaluation mode, after the training steps and at least one unmeasured call,
also in a row with warm-up 0.

tokens/s: the tokens of a step over its total (median). MFU: fraction of the published dense peak in
the dtype, or of the measured one where none is published. over fp32: speed-up of the total over the
fp32 row of the same configuration. graphs: graphs that torch.compile made; a compiled row without
graphs, or an eager row with graphs, is an error. Memory: torch.cuda.max_memory_allocated on CUDA,
torch.mps.driver_allocated_memory on MPS, highest resident memory of the row's own process on a CPU.
The vocabulary has 10,000 tokens.

model: gpt2, or course: the systems course's (RMSNorm, RoPE, SwiGLU, an untied head, attention
written out), with 1.3 times the FLOPs of a GPT-2 of the same size.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from gpt_lightning.bench.core import course_report, timing, training_step
from gpt_lightning.hardware.device import peak_memory_gib
from gpt_lightning.model.fast.compilation import compile_in_place
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import Row, column, sweep_row
from gpt_lightning.tables.sweep import Bench


@sweep_row
class SizeRow(training_step.ModelRow):
    """Configuration and its times: median, mean and standard deviation of each phase."""

    model: str = column("model", default="gpt2")
    optimizer: bool = column("optimizer", default=True, console=False)
    warmup: int = column("warm-up", "d")
    first_forward_ms: float | None = column("first forward ms", ",.1f")
    forward_ms: float | None = column("forward ms", ",.1f")
    forward_mean_ms: float | None = column("mean", ",.1f", 7)
    forward_std_ms: float | None = column("std", ",.2f", 6)
    backward_ms: float | None = column("backward ms", ",.1f")
    backward_mean_ms: float | None = column("mean", ",.1f", 7, console=False)
    backward_std_ms: float | None = column("std", ",.2f", 6, console=False)
    forward_backward_ms: float | None = column("forward + backward ms", ",.1f")
    forward_backward_mean_ms: float | None = column("mean", ",.1f", 7)
    forward_backward_std_ms: float | None = column("std", ",.2f", 6)
    optimizer_ms: float | None = column("optimizer ms", ",.1f")
    total_ms: float | None = column("total ms", ",.1f", 9)
    total_mean_ms: float | None = column("mean", ",.1f", 9, console=False)
    total_std_ms: float | None = column("std", ",.2f", 6, console=False)
    total_min_ms: float | None = column("min ms", ",.1f", 9, console=False)
    total_p90_ms: float | None = column("p90 ms", ",.1f", 9, console=False)
    total_max_ms: float | None = column("max ms", ",.1f", 9, console=False)
    first_step_ms: float | None = column("first step ms", ",.1f")
    inference_ms: float | None = column("warm inference ms", ",.1f", console=False)
    graphs: int | None = column("graphs", "d", console=False)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    speedup: float | None = column("over fp32", ".2f")
    peak_memory_gib: float | None = column("memory GiB", ",.2f")
    matmul_precision: str = column("matmul", default="", console=False)
    attention: str = column("attention", default="", console=False)


CONFIGURED = ("device", "compile", "size", "batch", "context", "model", "optimizer", "warmup")


def over_fp32(row: SizeRow, before: Sequence[Row]) -> SizeRow:
    """Return the row with its speed-up over the fp32 row of its configuration, if there is one."""
    mine = {name: getattr(row, name) for name in CONFIGURED} | {"dtype": "fp32"}
    for other in (*before, row):
        if row.total_ms and other.total_ms and mine.items() <= asdict(other).items():
            return replace(row, speedup=other.total_ms / row.total_ms)
    return row


BENCH = Bench(
    name="sizes",
    title="Language models of several sizes: forward, backward, optimizer",
    row=SizeRow,
    measure="gpt_lightning.bench.sizes:measure_size",
    options=(
        options.DEVICE,
        *options.SIZES,
        options.contexts("256"),
        options.batches(),
        options.dtypes("fp32,bf16"),
        options.switches("compile", "false", "Compile the model"),
        options.switches("optimizer", "true", "Clip gradients and update weights"),
        replace(
            options.numbers("warmup", "warmup", "2", "Steps before the measured ones", least=0),
            alias="warmup_study",
        ),
        options.steps(10),
    ),
    beside=course_report.published_tables,
    relate=over_fp32,
)


def measure_size(row: SizeRow, shape: list[int], steps: int) -> dict[str, Any]:
    """Time training and inference of one configuration."""
    device = training_step.prepare(row)
    graphs = training_step.compiled_graphs()
    model = training_step.make_subject(row.model, shape, row.context).to(device)
    if row.compile:
        compile_in_place(model, device.type)
    x, y = training_step.random_batch(row.batch, row.context, device)
    step = training_step.TrainingStep(model, device, row.dtype, updates=row.optimizer)

    def infer(timer: timing.StepTimer) -> None:
        with torch.no_grad(), training_step.autocast(row.dtype, device):
            model(x)
        timer.end("inference")

    durations, first = timing.record(
        lambda timer: step(x, y, timer.phase), device, row.warmup, steps
    )
    both = zip(durations["forward"], durations["backward"], strict=True)
    durations["forward_backward"] = [forward + backward for forward, backward in both]
    times = {phase: timing.stats(values) for phase, values in durations.items()}
    model.eval()
    inferences, _ = timing.measure(infer, device, max(1, row.warmup), steps)
    tokens_per_sec = row.batch * row.context / times["total"].median * 1e3
    return {
        **timing.phase_columns(times, "forward", "backward", "forward_backward"),
        "inference_ms": inferences["inference"].median,
        "optimizer_ms": times["optimizer"].median if row.optimizer else None,
        "first_forward_ms": first["forward"],
        "first_step_ms": first["total"],
        "graphs": training_step.checked_graphs(row.compile, graphs),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "attention": training_step.kernel_of(model, device, row.dtype, row.context),
        "peak_memory_gib": peak_memory_gib(device),
        **training_step.rates(model, device, row.dtype, tokens_per_sec, row.context),
    }
