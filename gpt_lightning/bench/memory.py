"""Peak memory of the phases of a step by context, dtype and checkpointing, with timelines.

start: weights, and in training the optimizer's state, before the forward. forward, backward,
optimizer: peaks of the phases of one step after the warm-up. peak: highest of them. held: memory at
the end of the forward minus start. largest: largest single allocation. inference: forward under
no_grad. checkpointing: the backward recomputes the blocks (model.config.checkpointing).

memory by: allocator (torch.cuda.max_memory_allocated), profiler (all tensors on a CPU, without the
workspaces of libraries) or samples (MPS). resident: highest resident memory of the process on a
CPU, with torch itself and the profiler's records.

residual: B T d 4 / 2^20 MiB, one activation of the residual stream in float32. measured: output of
the first block. held/residual: held in units of residual.

blocks: blocks per checkpoint (--groups), whose inputs alone are kept; 0 without checkpointing.

saved: tensors that autograd saves in one forward without checkpointing, parameters left out, by the
module that was running; for the first block and for all that is outside of the blocks.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gpt_lightning.bench.core import memory_meter, saved_tensors, training_step
from gpt_lightning.bench.core.course_model import CourseModel
from gpt_lightning.bench.core.memory_meter import MIB, Memory, PhaseContext
from gpt_lightning.hardware.device import peak_memory_gib
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables import options, worker
from gpt_lightning.tables.options import Option, Values, listed
from gpt_lightning.tables.rows import Row, column, sweep_row
from gpt_lightning.tables.sweep import Bench

MODES = ("inference", "training")


@sweep_row
class MemoryRow(training_step.DeviceRow):
    """Configuration, and the memory of its phases."""

    model: str = column("model")
    size: str = column("size", width=8)
    mode: str = column("mode", width=9)
    checkpointing: bool = column("checkpointing")
    blocks: int = column("blocks", "d")
    batch: int = column("batch", "d")
    context: int = column("context", "d")
    method: str = column("memory by", default="")
    start_mib: float | None = column("start MiB", ",.1f", 9)
    forward_peak_mib: float | None = column("forward MiB", ",.1f")
    held_mib: float | None = column("held MiB", ",.1f", 9)
    backward_peak_mib: float | None = column("backward MiB", ",.1f")
    optimizer_peak_mib: float | None = column("optimizer MiB", ",.1f")
    peak_mib: float | None = column("peak MiB", ",.1f", 9)
    largest_mib: float | None = column("largest MiB", ",.1f")
    residual_mib: float | None = column("residual MiB", ",.3f")
    residual_measured_mib: float | None = column("measured MiB", ",.3f", console=False)
    held_residuals: float | None = column("held/residual", ",.1f")
    resident_gib: float | None = column("resident GiB", ",.2f")
    attention: str = column("attention", default="", console=False)
    files: str = column("files", default="", console=False)


@dataclass(frozen=True)
class SavedRow(training_step.SubjectRow):
    """Tensors that one module saves for the backward."""

    where: str = column("where")
    module: str = column("module")
    shape: str = column("shape")
    saved_dtype: str = column("saved in")
    tensors: int | None = column("tensors", "d")
    mib: float | None = column("MiB", ",.3f")
    residuals: float | None = column("MiB/residual", ",.2f")


def picture(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Draw the peak over context and over blocks per checkpoint; return all pictures' names."""
    drawn = [name for row in rows for name in row.files.split() if name.endswith(".png")]
    grouped = [row for row in rows if row.checkpointing]
    groups = {"peak.png": (rows, "context", "blocks"), "groups.png": (grouped, "blocks", "context")}
    for name, (shown, x, other) in groups.items():
        if len({getattr(row, x) for row in shown if row.status == "ok"}) > 1:
            draw_peaks(folder / name, shown, x, other)
            drawn.insert(0, name)
    return drawn


def draw_peaks(path: Path, rows: Sequence[Row], x: str, other: str) -> None:
    """Draw the peak over a field of the rows; lines differ in `other` and in the configuration."""
    from gpt_lightning.tables.pictures import plot_rows  # not in a row's process

    names = {"context": "context (tokens)", "blocks": "blocks per checkpoint"}

    def place(row: Row) -> tuple[str, str, str]:
        label = f"{row.device} {row.dtype} {row.mode}, batch {row.batch}"
        if value := getattr(row, other):
            label += f", {names[other]}: {value}"
        return f"{row.model} {row.size}", label, "-"

    quantities = {"peak_mib": "peak (MiB)"}
    plot_rows(path, "Peak memory of a step", rows, (x, names[x]), quantities, place)


def read_modes(args: Any) -> list[Values]:
    """Return the modes of --modes with --checkpointing and --groups.

    Inference keeps no activations, so that checkpointing changes nothing: it is one row.
    """
    sizes = {False: [0], True: listed(args, "groups", options.at_least(1))}
    switches = listed(args, "checkpointing", options.switch)
    return [
        {"mode": mode, "checkpointing": checkpointing, "blocks": blocks}
        for mode in listed(args, "modes", options.one_of(MODES))
        for checkpointing in (switches if mode == "training" else [False])
        for blocks in sizes[checkpointing]
    ]


BENCH = Bench(
    name="memory",
    title="Memory of language models by phase",
    row=MemoryRow,
    measure="gpt_lightning.bench.memory:measure_row",
    options=(
        options.DEVICE,
        *options.SIZES,
        options.batches(),
        options.contexts("128,256,512"),
        options.dtypes("fp32,bf16"),
        Option("modes", ",".join(MODES), f"Any of {', '.join(MODES)}.", read_modes),
        Option("checkpointing", "false,true", "true, false, or both with a comma."),
        Option("groups", "1", "Blocks per checkpoint, separated by commas."),
        options.warmup(1),
        options.MEMORY_LIMIT,
    ),
    picture=picture,
    files=True,
    tables={"saved": SavedRow},
)


def measure_row(
    row: MemoryRow, shape: list[int], warmup: int, memory_gib: float | None, folder: str
) -> dict[str, Any]:
    """Measure one step; write a timeline and, on CUDA, a snapshot into the folder.

    Raises:
        SkippedError: A checkpoint would have more blocks than the model.
    """
    if row.blocks > shape[0]:
        raise worker.SkippedError(f"the model has {shape[0]} blocks")
    device = training_step.prepare(row)
    memory_meter.limit_memory(device, memory_gib)
    stem = name_of(row)
    Path(folder).mkdir(parents=True, exist_ok=True)
    snapshot = Path(folder) / f"{stem}.pickle" if device.type == "cuda" else None
    outputs: list[int] = []  # bytes of the first block's output, call by call
    saved: list[dict[str, Any]] = []
    kernels: list[str] = []
    residual = row.batch * row.context * shape[2] * 4

    def work(phase: PhaseContext) -> None:
        with phase("setup"):
            model = training_step.make_subject(row.model, shape, row.context).to(device)
            model.transformer.h[0].register_forward_hook(
                lambda *call: outputs.append(call[2].nbytes)
            )
            kernels.append(training_step.kernel_of(model, device, row.dtype, row.context))
            if row.checkpointing:
                checkpoint_groups(model, row.blocks)
            elif row.mode == "training":
                batch = training_step.random_batch(row.batch, row.context, device)
                with training_step.autocast(row.dtype, device):
                    saved.extend(saved_tensors.by_module(model, batch, residual))
                del batch
            step = make_step(model, row.mode, row.dtype, row.batch, row.context)
            for _ in range(warmup):
                step(nullcontext)
        step(phase)

    memory = memory_meter.measure_memory(work, device, snapshot)
    found = columns(memory, residual, outputs[-1]) | {"attention": kernels[0]}
    if device.type == "cpu":
        found["resident_gib"] = peak_memory_gib(device)
    return {**found, "saved": saved, "files": draw(memory, Path(folder), stem, snapshot)}


def checkpoint_groups(model: GPT | CourseModel, blocks: int) -> None:
    """Keep only the input of each group of so many blocks, and recompute the group."""
    transformer = model.transformer
    h = list(transformer.h)
    groups = [nn.Sequential(*h[i : i + blocks]) for i in range(0, len(h), blocks)]
    transformer.h = nn.ModuleList(groups)
    transformer.checkpointing = True


def name_of(row: MemoryRow) -> str:
    """Return a file name that no other configuration has."""
    mode = row.mode + f"-checkpointing{row.blocks}" * row.checkpointing
    size = row.size.replace("/", "x")
    return f"{row.model}-{size}-{row.device}-{row.dtype}-{mode}-b{row.batch}-t{row.context}"


def make_step(
    model: GPT | CourseModel, mode: str, dtype: str, batch: int, context: int
) -> Callable[[PhaseContext], object]:
    """Return a step of inference or training that calls its phases."""
    device = model.lm_head.weight.device
    x, y = training_step.random_batch(batch, context, device)
    if mode == "inference":
        model.eval()

        def infer(phase: PhaseContext) -> None:
            with phase("forward"), torch.no_grad(), training_step.autocast(dtype, device):
                logits = model(x)
            del logits  # held until the phase has ended

        return infer
    return partial(training_step.TrainingStep(model, device, dtype), x, y)


def columns(memory: Memory, residual: int, output: int) -> dict[str, Any]:
    """Convert bytes to the measured columns."""
    phases = {name: phase for name, phase in memory.phases.items() if name != "setup"}
    forward = phases["forward"]
    largest = memory.largest(list(phases))
    return {
        "method": memory.method,
        "start_mib": forward.begin / MIB,
        **{f"{name}_peak_mib": phase.peak / MIB for name, phase in phases.items()},
        "held_mib": (forward.end - forward.begin) / MIB,
        "peak_mib": max(phase.peak for phase in phases.values()) / MIB,
        "largest_mib": None if largest is None else largest / MIB,
        "residual_mib": residual / MIB,
        "residual_measured_mib": output / MIB,
        "held_residuals": (forward.end - forward.begin) / residual,
    }


def draw(memory: Memory, folder: Path, stem: str, snapshot: Path | None) -> str:
    """Draw the timeline and return the names of the row's files."""
    from gpt_lightning.bench.core.curves import plot_timeline  # after the memory was read

    plot_timeline(folder / f"{stem}.png", stem, memory)
    return " ".join([f"{stem}.png", *([snapshot.name] if snapshot else [])])
