"""Times of forward, backward and optimizer by size, dtype, compilation, context and batch.

inference: forward under no_grad in evaluation mode, after the training steps. forward, backward,
optimizer: phases of one training step, each timed inside it; total: the whole step. Times are
medians: the phases of each step add up to its total, and their medians do so up to noise.
optimizer: clipping to a norm of 1, AdamW and zero_grad, as in `fit`. first step: with compilation.
graphs: graphs that torch.compile made; a compiled row without graphs, or an eager row with graphs,
is an error.

tokens/s: rate of the mean step without stalls of over ten times the median, as SpeedMonitor
computes it. MFU: fraction of the published dense peak in the dtype, or of the measured one where
none is published. Memory: torch.cuda.max_memory_allocated on a GPU, highest resident memory of the
row's own process on a CPU. The vocabulary has 10,000 tokens.
"""

from dataclasses import replace
from typing import Any

import torch

from gpt_lightning.bench.core import course_report, options, timing, training_step
from gpt_lightning.bench.core.sweep import Bench, paragraphs, sweep_row
from gpt_lightning.model.compilation import compile_in_place
from gpt_lightning.reports.tables import column


@sweep_row
class SizeRow(training_step.ModelRow):
    """Configuration and its times: median and standard deviation of each phase."""

    warmup: int = column("warm-up", "d")
    inference_ms: float | None = column("inference ms", ",.1f")
    forward_ms: float | None = column("forward ms", ",.1f")
    forward_std_ms: float | None = column("std", ",.2f", 6, console=False)
    backward_ms: float | None = column("backward ms", ",.1f")
    backward_std_ms: float | None = column("std", ",.2f", 6, console=False)
    optimizer_ms: float | None = column("optimizer ms", ",.1f")
    total_ms: float | None = column("total ms", ",.1f", 9)
    total_mean_ms: float | None = column("mean ms", ",.1f", 9, console=False)
    total_std_ms: float | None = column("std", ",.2f", 6)
    total_min_ms: float | None = column("min ms", ",.1f", 9, console=False)
    total_p90_ms: float | None = column("p90 ms", ",.1f", 9, console=False)
    total_max_ms: float | None = column("max ms", ",.1f", 9, console=False)
    first_step_s: float | None = column("first step s", ",.1f")
    graphs: int | None = column("graphs", "d")
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    peak_memory_gib: float | None = column("memory GiB", ",.2f")
    matmul_precision: str = column("matmul", default="", console=False)


BENCH = Bench(
    name="sizes",
    title="GPT-2s of several sizes: forward, backward, optimizer",
    row=SizeRow,
    measure="gpt_lightning.bench.sizes:measure_size",
    options=(
        options.DEVICE,
        *options.SIZES,
        options.contexts("256"),
        options.batches(),
        options.dtypes("fp32,bf16"),
        options.switches("compile", "false", "Compile the model"),
        replace(
            options.numbers("warmup", "warmup", "2", "Steps before the measured ones", least=0),
            alias="warmup_study",
        ),
        options.steps(10),
    ),
    notes=paragraphs(__doc__),
    beside=course_report.published_tables,
)


def measure_size(row: SizeRow, shape: list[int], steps: int) -> dict[str, Any]:
    """Time training and inference of one configuration."""
    device = torch.device(row.device)
    training_step.use_dtype(row.dtype, device)
    graphs = training_step.compiled_graphs()
    torch.manual_seed(0)
    model = training_step.make_model(shape, row.context).to(device)
    if row.compile:
        compile_in_place(model, device.type)
    x, y = training_step.random_batch(row.batch, row.context, device)
    step = training_step.TrainingStep(model, device, row.dtype)

    def infer(timer: timing.StepTimer) -> None:
        with torch.no_grad(), training_step.autocast(row.dtype, device):
            model(x)
        timer.end("inference")

    times, first_step_s = timing.measure(
        lambda timer: step(x, y, timer.phase), device, row.warmup, steps
    )
    model.eval()
    inferences, _ = timing.measure(infer, device, max(1, row.warmup), steps)
    tokens_per_sec = row.batch * row.context / times["total"].steady_mean * 1e3
    return {
        **timing.phase_columns(times, "forward", "backward"),
        "inference_ms": inferences["inference"].median,
        "optimizer_ms": times["optimizer"].median,
        "first_step_s": first_step_s,
        "graphs": training_step.checked_graphs(row.compile, graphs),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "peak_memory_gib": training_step.peak_memory_gib(device),
        **training_step.rates(model, device, row.dtype, tokens_per_sec, row.context),
    }
