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
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jsonargparse.typing import PositiveInt

from gpt_lightning.bench.core import fit_run, timing, training_step
from gpt_lightning.bench.core.peer import make_peer
from gpt_lightning.errors import UserError, is_out_of_memory
from gpt_lightning.hardware.device import free_memory, peak_memory_gib
from gpt_lightning.hardware.peaks import device_name
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables import options
from gpt_lightning.tables.options import GPU_SIZES, Option, Values, devices, listed
from gpt_lightning.tables.rows import RESULTS, column, make_row, sweep_row, write_report
from gpt_lightning.tables.sweep import Bench, Sweep, earlier_machine
from gpt_lightning.training.steps import StepShape

# target MFU by the driver's name of the chip and the size
TARGETS = {
    "NVIDIA H200": {"124m": 0.50, "350m": 0.54, "774m": 0.56, "1558m": 0.58},
    "NVIDIA H100 80GB HBM3": {"124m": 0.47, "1558m": 0.55},
}
MODELS = ("ours", "hf", "hf-compiled")
TOKENS = 32_000_000  # of the dataset: 61 steps of 524,288 without the pause between two epochs


@sweep_row
class GPURow:
    """Size and model of a run, and its speed."""

    size: str = column("size")
    model: str = column("model", width=11)
    batch: int | None = column("batch", "d")
    accumulate: int | None = column("accumulated", "d")
    context: int | None = column("context", "d")
    parameters: int | None = column("parameters", ",d", 13)
    steps: int = column("steps", "d")
    step_ms: float | None = column("step ms", ",.1f", 9)
    tokens_per_sec: float | None = column("tokens/s", ",.0f", 9)
    mfu: float | None = column("MFU", ".1%", 6)
    target: float | None = column("target", ".0%", 6)
    peak_memory_gib: float | None = column("memory GiB", ",.1f")
    graphs: int | None = column("graphs", "d")
    matmul_precision: str = column("float32 products", default="", console=False)
    attention: str = column("attention", default="", console=False)
    options: str = column("options", default="", console=False)
    date: str = column("date", default="", console=False)


def read_device(args: Any) -> list[Values]:
    """Return the first device of --device.

    Raises:
        UserError: This machine has no NVIDIA GPU.
    """
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "bench gpu: no NVIDIA GPU on this machine; use bench sizes and bench peers, which "
            "measure any device"
        )
    return [{"device": devices(args)[0]}]


def read_models(args: Any) -> list[Values]:
    """Return the models with their steps."""
    return [
        {"model": model, "steps": args.steps if model == "ours" else args.peer_steps}
        for model in listed(args, "models", options.one_of(MODELS))
    ]


def publish(args: Any, sweep: Sweep) -> str:
    """Write the rows so far to gpu_CHIP.md in the folder of --out; return its path.

    The page has the rows of earlier calls too, which are in the folder rows/gpu_CHIP. A row that
    failed does not replace one that was measured.
    """
    device = torch.device(sweep.configurations[0]["device"])
    chip = re.sub(r"[^a-z0-9]+", "_", device_name(device).lower().removeprefix("nvidia "))
    page = Path(args.out) / f"gpu_{chip.strip('_')}.md"
    folder = page.parent / "rows" / page.stem
    before = folder / RESULTS
    stored = json.loads(before.read_text(encoding="utf-8"))["rows"] if before.exists() else []
    rows = {(row["size"], row["model"]): make_row(GPURow, row) for row in stored}
    for row in sweep.rows:
        if row.status == "ok" or (row.size, row.model) not in rows:
            rows[row.size, row.model] = row
    order = [(size, model) for size in GPU_SIZES for model in MODELS]
    table = [rows[place] for place in order if place in rows]
    machine = sweep.machine | earlier_machine(folder, sweep.machine)
    write_report(folder, sweep.bench.title, machine, {"rows": table}, sweep.bench.notes)
    return str(shutil.copy(folder / "results.md", page))


BENCH = Bench(
    name="gpu",
    title="GPT-2 in four sizes on one GPU",
    row=GPURow,
    measure="gpt_lightning.bench.gpu:measure_size",
    options=(
        Option("device", "cuda", "cuda; another device tries the command out.", read_device),
        options.words("sizes", "size", GPU_SIZES),
        Option("models", ",".join(MODELS), f"Any of {', '.join(MODELS)}.", read_models),
        Option("steps", 12, "Measured steps of ours.", type=PositiveInt),
        Option("peer_steps", 5, "Measured steps of theirs.", type=PositiveInt),
        options.warmup(3, PositiveInt),
        options.optional(
            "minutes",
            "Time of this call; --resume measures the rows that are left. null: no limit.",
            options.PositiveFinite,
        ),
        Option("out", "benchmarks", "Folder of the page gpu_CHIP.md."),
    ),
    timeout_s=3600.0,
    takes_fit_options=True,
    epilogue=publish,
)


def measure_size(row: GPURow, device: str, warmup: int, fit_options: list[str]) -> dict[str, Any]:
    """Train one size of one model."""
    where = torch.device(device)
    arguments = [*fit_run.size_options(row.size), *fit_options]
    arguments += [f"--trainer.accelerator={device}", "--trainer.devices=1"]
    parsed = fit_run.parse_fit(arguments)
    config, dtype = GPTConfig(**parsed.model.config.as_dict()), fit_run.dtype_of(parsed, where)
    torch.set_float32_matmul_precision(parsed.model.matmul_precision)
    if row.model == "ours":
        train = partial(train_ours, row, arguments, parsed, warmup)
    else:
        train = partial(train_theirs, row, where, config, dtype, warmup)
    measured, step = halve_until_it_fits(train, fit_run.step_of(parsed))
    with torch.device("meta"):
        shape = GPT(config)
    rate = step.tokens / measured["step_ms"] * 1e3
    targets = TARGETS.get(device_name(where), {}) if row.model == "ours" else {}
    return {
        "batch": step.batch_size,
        "accumulate": step.accumulate,
        "context": step.block_size,
        "target": targets.get(row.size),
        "peak_memory_gib": peak_memory_gib(where),
        "parameters": shape.num_params(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "options": " ".join(fit_options),
        "date": datetime.date.today().isoformat(),
        **measured,
        **training_step.rates(shape, where, dtype, rate, step.block_size),
    }


def halve_until_it_fits(
    train: Callable[[StepShape], dict[str, Any]], step: StepShape
) -> tuple[dict[str, Any], StepShape]:
    """Train, with half the micro-batch and twice the accumulation where memory runs out.

    Args:
        train: Function that trains steps of a shape and returns what it measured.
        step: Shape to begin with; its tokens do not change.

    Returns:
        The measurement, and the shape that fitted.
    """
    while True:
        training_step.reset_peak_memory()
        try:
            return train(step), step
        except Exception as error:
            if not is_out_of_memory(error) or step.batch_size % 2:
                raise
        free_memory()  # outside the handler: the error holds the activations
        step = step.with_batch_size(step.batch_size // 2)


def train_ours(
    row: GPURow, arguments: list[str], config: Any, warmup: int, step: StepShape
) -> dict[str, Any]:
    """Run `fit` with other micro-batches.

    Args:
        row: Number of measured steps.
        arguments: Options of `fit`.
        config: Configuration that they make.
        warmup: Steps before the measured ones.
        step: Shape of a step.

    Returns:
        Median milliseconds of a step, stalls, number of graphs, and attention kernel.
    """
    micro_batch = fit_run.batch_options(config, fit_run.step_of(config), step.batch_size)
    vocab_size = config.model.config.vocab_size
    tokens = fit_run.random_token_options("gpu", vocab_size, row.steps, warmup, TOKENS)
    argv = [*arguments, *" ".join(micro_batch).split(), *tokens]
    graphs = training_step.compiled_graphs()
    with tempfile.TemporaryDirectory() as folder:
        speed = fit_run.timed_fit(
            [*argv, "--trainer.logger=false", "--model.warmup_steps=0"], Path(folder)
        )
    graphs = training_step.compiled_graphs() - graphs
    return {
        "step_ms": speed.step_ms,
        "note": fit_run.stall_note(speed),
        "graphs": graphs,
        "attention": speed.attention,
    }


def train_theirs(
    row: GPURow, device: torch.device, config: GPTConfig, dtype: str, warmup: int, step: StepShape
) -> dict[str, Any]:
    """Train transformers' GPT-2.

    Args:
        row: Name of the model and number of measured steps.
        device: Device that does the work.
        config: Configuration of our model.
        dtype: Dtype of the products.
        warmup: Steps before the measured ones.
        step: Shape of a step.

    Returns:
        Median milliseconds of a step, and number of graphs.
    """
    torch.manual_seed(0)
    peer = make_peer(GPT(config)).to(device)
    graphs, compiled = training_step.compiled_graphs(), row.model == "hf-compiled"
    if compiled:
        peer.compile()
    assert config.vocab_size is not None  # else GPT has raised
    x, y = training_step.random_batch(step.batch_size, step.block_size, device, config.vocab_size)
    train = training_step.TrainingStep(peer, device, dtype)
    times, _ = timing.measure(
        lambda timer: train(x, y, timer.phase, step.accumulate), device, warmup, row.steps
    )
    graphs = training_step.checked_graphs(compiled, graphs)
    return {"step_ms": times["total"].median, "graphs": graphs}
