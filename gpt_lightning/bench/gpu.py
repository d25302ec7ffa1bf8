"""GPT-2 in four sizes on a GPU, `fit` and transformers; writes benchmarks/gpu_CHIP.md.

ours: `fit` as configured, with the callbacks of every run. hf: transformers' GPT2LMHeadModel,
eager. hf-compiled: hf through torch.compile. All have the same tokens per step, precision and
float32 products, and no dropout. Where a model does not fit into memory, its micro-batch is halved
and a step has twice as many.

step: a whole optimizer step, median of `steps` after the warm-up. tokens/s: rate of that step. MFU:
6 N + 12 n_layer n_embd T FLOPs per token (flops.py) over the published dense peak of the products'
dtype, or over a measured one where none is published. target: our target on one H200 or H100 SXM.
memory: torch.cuda.max_memory_allocated.

A row of an earlier call stays on the page until its size and model are measured again.
"""

import datetime
import itertools
import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Annotated

import torch
from jsonargparse import Namespace
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench import fits, models
from gpt_lightning.bench.models import GPU_SIZES, Peer
from gpt_lightning.bench.step import Training, random_batch, rates
from gpt_lightning.errors import is_out_of_memory
from gpt_lightning.files import Fields, write_atomic
from gpt_lightning.hardware.device import (
    device_name,
    free_memory,
    machine_record,
    peak_memory_gib,
    reset_peak_memory,
)
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option
from gpt_lightning.tables.rows import (
    Column,
    Count,
    Grouped,
    Hidden,
    Hundredths,
    Measured,
    Share,
    Text,
    Values,
    Whole,
    read_report,
    write_report,
)
from gpt_lightning.tables.sweep import Bench, Sweep, read_options
from gpt_lightning.training.step_shape import StepShape, options_for

MODELS = ("ours", "hf", "hf-compiled")
TOKENS = 32_000_000  # 61 steps of 524,288 tokens in one epoch


@dataclass
class GPURow(Measured):
    """Speed of one size of one model."""

    size: Text
    model: Text
    batch: Count
    accumulate: Count
    context: Count
    parameters: Grouped
    steps: Count
    step_ms: Hundredths
    tokens_per_sec: Whole
    mfu: Share
    target: Annotated[float | None, Column(".0%")]
    peak_memory_gib: Hundredths
    graphs: Count
    matmul_precision: Hidden
    attention: Hidden
    options: Hidden
    date: Hidden
    software: Hidden


def run(argv: list[str]) -> int:
    """Run `bench gpu ...`; return the exit code of `Sweep.run`."""
    args, rows = read_options(BENCH, argv[2:])
    sweep = Sweep(BENCH, rows, argv, args)
    try:
        return sweep.run()
    finally:  # Ctrl-C, too
        print(publish(args.out, sweep))


def publish(out: str, sweep: Sweep) -> Path:
    """Write the rows so far to gpu_CHIP.md in a folder; return its path.

    The page has the rows of earlier calls too, which are in the folder rows/gpu_CHIP. A row that
    failed does not replace one that was measured.
    """
    device = torch.device(str(sweep.configurations[0]["device"]))
    chip = re.sub(r"[^a-z0-9]+", "_", device_name(device).lower().removeprefix("nvidia "))
    page = Path(out) / f"gpu_{chip.strip('_')}.md"
    folder = page.parent / "rows" / page.stem
    stored = map(GPURow.of, read_report(folder).get("rows", []))
    rows = {(row.size, row.model): row for row in stored}
    for row in sweep.rows:
        if row.status == "ok" or (row.size, row.model) not in rows:
            rows[row.size, row.model] = row
    table = [rows[place] for place in itertools.product(GPU_SIZES, MODELS) if place in rows]
    title, *notes = BENCH.about
    write_report(folder, title, sweep.machine, {"rows": table}, notes)
    write_atomic(page, (folder / "results.md").read_bytes())
    return page


BENCH = Bench(
    measure="gpt_lightning.bench.gpu:measure_size",
    tables={"rows": GPURow},
    options=(
        replace(options.DEVICE, default="cuda", help="cuda; another device tries the command out."),
        options.sizes(GPU_SIZES),
        options.words("models", "model", MODELS),
        options.steps(10),
        options.warmup(3, kind=PositiveInt),
        Option("out", "benchmarks", "Folder of the page gpu_CHIP.md."),
    ),
    timeout_s=3600.0,
    takes_fit_options=True,
)


def measure_size(row: SimpleNamespace) -> Values:
    """Train one size of one model, with half the micro-batch until it fits into memory."""
    device = torch.device(row.device)
    arguments = fits.row_options(row)
    parsed = fits.parse_fit(arguments)
    config = GPTConfig(**parsed.model.config.as_dict())
    dtype = fits.dtype_of(parsed, device)
    torch.set_float32_matmul_precision(parsed.model.matmul_precision)
    if row.model == "ours":
        train = partial(train_ours, row, arguments, parsed)
    else:
        train = partial(train_theirs, row, config, dtype)
    step = fits.step_of(parsed)
    measured: Fields = {}
    while not measured:
        free_memory()  # the error of the last attempt has held its activations
        reset_peak_memory()
        try:
            measured = train(step)
        except Exception as error:
            if not is_out_of_memory(error) or step.batch_size % 2:
                raise
            step = step.with_batch_size(step.batch_size // 2)
    with torch.device("meta"):
        shape = GPT(config)
    rate = step.tokens / measured["step_ms"] * 1e3
    targets = models.TABLE["targets"].get(device_name(device), {}) if row.model == "ours" else {}
    return {
        "batch": step.batch_size,
        "accumulate": step.accumulate,
        "context": step.block_size,
        "target": targets.get(row.size),
        "peak_memory_gib": peak_memory_gib(device),
        "parameters": shape.num_params(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "options": " ".join(row.fit_options),
        "date": datetime.date.today().isoformat(),
        "software": machine_record([], device)["software"],
        **measured,
        **rates(shape, device, dtype, rate, step.block_size),
    }


def train_ours(
    row: SimpleNamespace, arguments: list[str], config: Namespace, step: StepShape
) -> Fields:
    """Run `fit` with other micro-batches.

    Args:
        row: Numbers of measured steps and of those before.
        arguments: Options of `fit`.
        config: Configuration that they make.
        step: Shape of a step.
    """
    settings = options_for(fits.step_of(config), step.batch_size, config.data, config.trainer)
    vocab_size = config.model.config.vocab_size
    tokens = fits.random_token_options(vocab_size, row.steps, row.warmup, TOKENS)
    argv = [*arguments, *" ".join(settings).split(), *tokens]
    return fits.timed_fit([*argv, "--trainer.logger=false", "--model.warmup_steps=0"])


def train_theirs(row: SimpleNamespace, config: GPTConfig, dtype: str, step: StepShape) -> Fields:
    """Train transformers' GPT-2.

    Args:
        row: Device, name of the model, and numbers of steps.
        config: Configuration of our model.
        dtype: Dtype of the products.
        step: Shape of a step.
    """
    torch.manual_seed(0)
    assert config.vocab_size is not None  # else GPT raises
    device = torch.device(row.device)
    batch = random_batch(step.batch_size, step.block_size, device, config.vocab_size)
    compiled = row.model == "hf-compiled"
    training = Training(Peer(GPT(config)), batch, dtype, compiled, step.accumulate)
    step_ms = median(training.block(row.warmup, row.steps))
    return {"step_ms": step_ms, "graphs": training.graphs}
