"""Times of forward, backward and optimizer by model, size, dtype, compilation, context and batch.

forward, backward, optimizer: phases of one training step, each timed inside it; total: the whole
step. forward + backward: their sum in each step. Times are medians, with the mean and the standard
deviation beside them: in a row with warm-up 0 the mean contains the first step, the median hardly.
first forward, first step: the very first call, with compilation. optimizer: clipping to a norm of
1, AdamW and zero_grad, as in `fit`; with --optimizer false the total has none.

tokens/s: the tokens of a step over its total (median). MFU: fraction of the published dense peak in
the dtype, or of the measured one where none is published. over fp32: speed-up of the total over the
fp32 row of the same configuration. graphs: graphs that torch.compile made; a compiled row without
graphs, or an eager row with graphs, is an error. Memory: torch.cuda.max_memory_allocated on CUDA,
torch.mps.driver_allocated_memory on MPS, highest resident memory of the row's own process on a CPU.
The vocabulary has 10,000 tokens.

model: gpt2, or course: the systems course's (RMSNorm, RoPE, SwiGLU, an untied head, attention
written out), with 1.3 times the FLOPs of a GPT-2 of the same size.

published: rows of that course's report with our sizes, batches and contexts, if there are any, by
https://github.com/elbiczel/cs336g-a2-systems at 769ef21. They were measured on other machines, with
the course's model, without an optimizer; times are means over 10 steps, outliers included, and
backward is the difference of two means, and total the sum of forward and backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Annotated

from gpt_lightning.bench import models, timing
from gpt_lightning.bench.step import Training, prepare, random_batch, rates
from gpt_lightning.files import reference_rows
from gpt_lightning.hardware.device import peak_memory_gib
from gpt_lightning.tables import options
from gpt_lightning.tables.rows import (
    Column,
    Count,
    Flag,
    HiddenHundredths,
    Hundredths,
    Measured,
    Row,
    Share,
    Tables,
    Text,
    Values,
    Whole,
)
from gpt_lightning.tables.sweep import Bench

CONFIGURED = ("device", "compile", "size", "batch", "context", "model", "optimizer", "warmup")


@dataclass
class SizeRow(Measured):
    """Times of a training step."""

    device: Text
    dtype: Text
    compile: Flag
    size: Text
    batch: Count
    context: Count
    model: Text
    optimizer: Annotated[bool | None, Column(console=False)]
    warmup: Count
    first_forward_ms: Hundredths
    forward_ms: Hundredths
    forward_mean_ms: Hundredths
    forward_std_ms: Hundredths
    backward_ms: Hundredths
    backward_mean_ms: HiddenHundredths
    backward_std_ms: HiddenHundredths
    forward_backward_ms: Hundredths
    forward_backward_mean_ms: Hundredths
    forward_backward_std_ms: Hundredths
    optimizer_ms: Hundredths
    total_ms: Hundredths
    total_mean_ms: HiddenHundredths
    total_std_ms: HiddenHundredths
    first_step_ms: Hundredths
    graphs: Annotated[int | None, Column("d", console=False)]
    tokens_per_sec: Whole
    mfu: Share
    over_fp32: Hundredths
    peak_memory_gib: Hundredths


@dataclass
class PublishedRow(Row):
    """Published times of a training step."""

    published_for: Text
    device: Text
    dtype_as_called: Text
    compile_as_called: Text
    size: Text
    batch: Count
    context: Count
    warmup: Count
    forward_ms: Hundredths
    forward_std_ms: Hundredths
    backward_ms: Hundredths
    backward_std_ms: Hundredths
    total_ms: Hundredths
    total_std_ms: Hundredths
    tokens_per_sec: Whole
    defects: Text


def over_fp32(row: SizeRow, before: Sequence[SizeRow]) -> SizeRow:
    """Return the row with its speed-up over the fp32 row of its configuration, if there is one."""
    mine = {name: getattr(row, name) for name in CONFIGURED} | {"dtype": "fp32"}
    for other in (*before, row):
        if row.total_ms and other.total_ms and mine.items() <= vars(other).items():
            return replace(row, over_fp32=other.total_ms / row.total_ms)
    return row


def published_tables(rows: Sequence[SizeRow]) -> Tables:
    """Return the published rows with the sizes, batches and contexts of ours, if any."""
    ours = {(row.size, row.batch, row.context) for row in rows}
    found = []
    for line in reference_rows("end_to_end.csv"):
        batch, context = int(line["batch"]), int(line["context"])
        if (line["size"], batch, context) in ours:
            values: Values = {"batch": batch, "context": context, "warmup": int(line["warmup"])}
            times = {name: float(text) for name, text in line.items() if name.endswith("_ms")}
            values["tokens_per_sec"] = batch * context / times["total_ms"] * 1e3
            found.append(PublishedRow.of(line | values | times))
    return {"published": found}


BENCH = Bench(
    measure="gpt_lightning.bench.sizes:measure_size",
    tables={"rows": SizeRow, "published": PublishedRow},
    options=(
        options.DEVICE,
        *models.SIZES,
        options.contexts("256"),
        options.batches("4"),
        options.dtypes("fp32,bf16"),
        options.switches("compile", "false", "Compile the model"),
        options.switches("optimizer", "true", "Clip gradients and update weights"),
        options.numbers("warmup", "warmup", "2", "Steps before the measured ones", least=0),
        options.steps(10),
    ),
    beside=published_tables,
    relate=over_fp32,
)


def measure_size(row: SimpleNamespace) -> Values:
    """Time training steps of one configuration."""
    device = prepare(row)
    model = models.make_model(row.model, row.size, row.context).to(device)
    batch = random_batch(row.batch, row.context, device)
    training = Training(model, batch, row.dtype, row.compile, updates=row.optimizer)
    training.block(row.warmup, row.steps)
    times = training.times
    both = zip(times["forward"], times["backward"], strict=True)
    times["forward_backward"] = [forward + backward for forward, backward in both]
    columns = timing.phase_columns(times, "forward", "backward", "forward_backward")
    if row.optimizer:
        columns |= timing.columns("optimizer", times["optimizer"])
    tokens_per_sec = row.batch * row.context / columns["total_ms"] * 1e3
    return {
        **columns,
        "first_forward_ms": training.first["forward"],
        "first_step_ms": training.first["total"],
        "graphs": training.graphs,
        "peak_memory_gib": peak_memory_gib(device),
        **rates(model, device, row.dtype, tokens_per_sec, row.context),
    }
