"""Peak memory of the phases of a step by context, dtype and checkpointing, with CUDA snapshots.

start: weights, and in training the optimizer's state, before the forward. forward, backward,
optimizer: peaks of the phases of one step after the warm-up. peak: highest of them. held: memory at
the end of the forward minus start. largest: largest single allocation. inference: forward under
no_grad. checkpointing: the backward recomputes the blocks (model.config.checkpointing).

memory by: allocator (torch.cuda.max_memory_allocated), profiler (all tensors on a CPU, without the
workspaces of libraries) or driver (torch.mps.driver_allocated_memory, with the blocks that PyTorch
keeps). resident: highest resident memory of the process on a CPU, with torch itself and the
profiler's records.

residual: B T d 4 / 2^20 MiB, one activation of the residual stream in float32. held residuals, and
residuals of a saved tensor: its memory in units of residual.

blocks: blocks per checkpoint (--groups), whose inputs alone are kept; 0 without checkpointing.

saved: tensors that autograd saves in one forward without checkpointing, parameters left out, by the
module that was running; for the first block and for all that is outside of the blocks.
"""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from jsonargparse import Namespace
from torch import Tensor, nn
from torch.utils.module_tracker import ModuleTracker

from gpt_lightning.bench import memory_meter, models
from gpt_lightning.bench.memory_meter import MIB, PhaseContext, PhaseMemory
from gpt_lightning.bench.step import Training, prepare, random_batch
from gpt_lightning.hardware.device import peak_memory_gib
from gpt_lightning.hardware.precision import autocast
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option, listed
from gpt_lightning.tables.rows import (
    Count,
    Flag,
    Hidden,
    Hundredths,
    Measured,
    Tenths,
    Text,
    Thousandths,
    Values,
)
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError

MODES = ("inference", "training")
FIRST, OUTSIDE = "block 0", "outside of the blocks"


@dataclass
class MemoryRow(Measured):
    """Memory of a step."""

    device: Text
    dtype: Text
    model: Text
    size: Text
    mode: Text
    checkpointing: Flag
    blocks: Count
    batch: Count
    context: Count
    memory_by: Text
    start_mib: Tenths
    forward_peak_mib: Tenths
    held_mib: Tenths
    backward_peak_mib: Tenths
    optimizer_peak_mib: Tenths
    peak_mib: Tenths
    largest_mib: Tenths
    residual_mib: Thousandths
    held_residuals: Tenths
    resident_gib: Hundredths
    files: Hidden


@dataclass
class SavedRow(models.ModelRow):
    """Tensors of one kind that autograd saves."""

    where: Text
    module: Text
    shape: Text
    saved_in: Text
    tensors: Count
    mib: Thousandths
    residuals: Hundredths


@dataclass(frozen=True)
class Saved:
    """Tensor that autograd saves: its place, the module that was running, and its memory."""

    where: str
    module: str
    shape: str
    saved_in: str
    mib: float


def picture(folder: Path, rows: Sequence[MemoryRow]) -> list[str]:
    """Draw the peak over context, if there is more than one."""
    from gpt_lightning.tables.pictures import plot_rows  # not in a row's process

    if len({row.context for row in rows if row.status == "ok"}) < 2:
        return []
    path, x = folder / "peak.png", ("context", "context (tokens)")
    plot_rows(path, "Peak memory of a step", rows, x, {"peak_mib": "peak (MiB)"}, place)
    return [path.name]


def place(row: MemoryRow) -> tuple[str, str, str]:
    """Return the column of panels, the label and the style of a row."""
    label = f"{row.device} {row.dtype} {row.mode}, batch {row.batch}"
    blocks = f", {row.blocks} blocks per checkpoint" if row.checkpointing else ""
    return f"{row.model} {row.size}", label + blocks, "-"


def read_modes(args: Namespace) -> list[Values]:
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
    measure="gpt_lightning.bench.memory:measure_row",
    tables={"rows": MemoryRow, "saved": SavedRow},
    options=(
        options.DEVICE,
        *models.SIZES,
        options.batches("4"),
        options.contexts("128,256,512"),
        options.dtypes("fp32,bf16"),
        Option("modes", ",".join(MODES), f"Any of {', '.join(MODES)}.", read_modes),
        Option("checkpointing", "false,true", "true, false, or both with a comma."),
        Option("groups", "1", "Blocks per checkpoint, separated by commas."),
        options.warmup(1),
        options.MEMORY_LIMIT,
    ),
    picture=picture,
)


def measure_row(row: SimpleNamespace) -> Values:
    """Measure one step; on CUDA, write a snapshot into the folder.

    Raises:
        SkippedError: A checkpoint would have more blocks than the model.
    """
    n_layer, _, C = models.shape_of(row.size)
    if row.blocks > n_layer:
        raise SkippedError(f"the model has {n_layer} blocks")
    device = prepare(row)
    memory_meter.limit_memory(device, row.memory_gib)
    name = (
        f"{row.model}-{row.size}-{row.device}-{row.dtype}-{row.mode}-{row.blocks}-{row.batch}-"
        f"{row.context}.pickle"
    )
    snapshot = Path(row.folder) / name.replace("/", "x") if device.type == "cuda" else None
    residual = row.batch * row.context * C * 4
    found: Values = {"saved": []}

    def work(phase: PhaseContext) -> None:
        with phase("setup"):
            model = models.make_model(row.model, row.size, row.context).to(device)
            if row.checkpointing:
                h = list(model.transformer.h)  # only the input of each group of blocks is kept
                groups = [h[i : i + row.blocks] for i in range(0, len(h), row.blocks)]
                model.transformer.h = nn.ModuleList(nn.Sequential(*group) for group in groups)
                model.transformer.checkpointing = True
            elif row.mode == "training":
                with autocast(row.dtype, device):
                    batch = random_batch(row.batch, row.context, device)
                    found["saved"] = by_module(model, batch, residual)
                del batch
            train = Training(model, random_batch(row.batch, row.context, device), row.dtype)
            step = train if row.mode == "training" else train.infer
            for _ in range(row.warmup):
                step(nullcontext)
        step(phase)

    found["memory_by"], phases = memory_meter.measure_memory(work, device, snapshot)
    del phases["setup"]
    if device.type == "cpu":
        found["resident_gib"] = peak_memory_gib(device)
    found["files"] = snapshot.name if snapshot and snapshot.exists() else ""
    return found | columns(phases, residual)


def columns(phases: dict[str, PhaseMemory], residual: int) -> Values:
    """Convert bytes to the measured columns."""
    sizes = memory_meter.held_and_peak(phases)
    largest = [phase.largest for phase in phases.values() if phase.largest is not None]
    return {
        **sizes,
        "start_mib": phases["forward"].begin / MIB,
        **{f"{name}_peak_mib": phase.peak / MIB for name, phase in phases.items()},
        "largest_mib": max(largest) / MIB if largest else None,
        "residual_mib": residual / MIB,
        "held_residuals": sizes["held_mib"] * MIB / residual,
    }


# ---- tensors that autograd saves -----------------------------------------------------------------


def by_module(model: nn.Module, inputs: Sequence[Tensor], residual: int) -> list[Values]:
    """Run a forward pass and return a row for each kind of saved tensor, then the sums.

    Parameters and buffers are left out, and memory that several tensors share counts once. Copies
    of parameters that autocast makes and saves do count.

    Args:
        model: Model whose blocks are `transformer.h`; only the first of them is listed.
        inputs: Arguments of the model.
        residual: Bytes of one activation of the residual stream in float32.
    """
    counts = Counter(saved_tensors(model, inputs))
    rows, wholes = [], []
    for place in (FIRST, OUTSIDE):
        kinds = [(kind, n) for kind, n in counts.items() if kind.where == place]
        found = [vars(kind) | {"tensors": n, "mib": n * kind.mib} for kind, n in kinds]
        mib = sum(row["mib"] for row in found)
        rows += found
        wholes.append({"where": place, "module": "in all", "mib": mib})
    return [row | {"residuals": row["mib"] * MIB / residual} for row in rows + wholes]


def saved_tensors(model: nn.Module, inputs: Sequence[Tensor]) -> list[Saved]:
    """Run a forward pass; return what is saved in each block and outside of the blocks."""
    own = (*model.parameters(), *model.buffers())
    seen = {tensor.untyped_storage().data_ptr() for tensor in own}
    found: list[Saved] = []
    modules = ModuleTracker()  # names of the modules around an operation

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()  # alive until the backward, so that its address is too
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            running = max(modules.parents - {"Global"}, key=len).partition(".")[2]
            name = re.fullmatch(r"transformer\.h\.(\d+)\.?(.*)", running)
            where, module = OUTSIDE, running.rpartition(".")[2] or "loss"
            if name is not None:
                where, module = f"block {name[1]}", name[2] or "residual sum"
            shape = " x ".join(map(str, tensor.shape))
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append(Saved(where, module, shape, dtype, storage.nbytes() / MIB))
        return tensor.detach()  # a saved output would keep its own node alive, in a cycle

    with modules, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(*inputs)
    return found
