"""`gpt-lightning bench memory`: the peak of each phase of a step, and what the peak is made of."""

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_lightning.bench.core.options import (
    DTYPES,
    add_size_arguments,
    at_least,
    check_bounds,
    check_positive,
    chosen_sizes,
    devices,
    listed,
    one_of,
    switch,
)
from gpt_lightning.bench.core.sweep import Bench, add_sweep_arguments, run_sweep
from gpt_lightning.bench.core.training_step import (
    TrainingOptimizer,
    autocast,
    make_model,
    peak_memory_gib,
    use_dtype,
)
from gpt_lightning.parsing import OneLineParser, underscored
from gpt_lightning.reports.tables import column

if TYPE_CHECKING:
    from gpt_lightning.bench.core.memory_meter import Memory, PhaseContext
    from gpt_lightning.model.gpt import GPT

MODES = ("inference", "training")


@dataclass(frozen=True)
class MemoryRow:
    """A configuration and the memory of its phases."""

    device: str = column("device")
    dtype: str = column("dtype")
    size: str = column("size", width=8)
    mode: str = column("mode", width=9)
    checkpointing: bool = column("checkpointing")
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
    residual_measured_mib: float | None = column("measured MiB", ",.3f")
    held_residuals: float | None = column("held/residual", ",.1f")
    resident_gib: float | None = column("resident GiB", ",.2f")
    files: str = column("files", default="")
    status: str = column("status", default="")
    note: str = column("note", default="")


def picture(folder: Path, rows: Sequence[MemoryRow]) -> list[str]:
    """The timelines that the rows drew, and the peak over the context if there are several."""
    drawn = [name for row in rows for name in row.files.split() if name.endswith(".png")]
    if len({row.context for row in rows if row.status == "ok"}) < 2:
        return drawn
    from gpt_lightning.bench.core.curves import Line, plot_panels

    panels: dict[tuple[str, str], Any] = {}
    names = dict.fromkeys((r.device, r.dtype, r.mode, r.checkpointing, r.batch) for r in rows)
    for size, (index, name) in itertools.product(
        dict.fromkeys(row.size for row in rows), enumerate(names)
    ):
        same = [r for r in rows if (r.device, r.dtype, r.mode, r.checkpointing, r.batch) == name]
        points = [(r.context, r.peak_mib) for r in same if r.size == size]
        label = f"{name[0]} {name[1]} {name[2]}{', checkpointing' * name[3]}, batch {name[4]}"
        lines = panels.setdefault(("peak (MiB)", size), [])
        lines.append(Line(label, points, f"C{index % 10}"))
    plot_panels(folder / "peak.png", "Peak memory of a step", "context (tokens)", panels)
    return ["peak.png", *drawn]


BENCH = Bench(
    name="memory",
    title="Memory of GPT-2s by phase",
    row=MemoryRow,
    measure="gpt_lightning.bench.memory:measure_row",
    notes=(
        "start: weights, and in training the optimizer's state, before the forward. forward, "
        "backward, optimizer: peaks of the phases of one step after the warm-up; peak: the highest "
        "of them. held: from the end of the forward, less the start. largest: single allocation. "
        "inference: forward under no_grad. checkpointing: blocks are computed again in the "
        "backward (model.config.checkpointing).",
        "memory by: allocator (torch.cuda.max_memory_allocated), profiler (CPU: all tensors, "
        "without the libraries' workspaces), samples (MPS). resident: the highest of the process "
        "on a CPU, with torch itself and the profiler's records.",
        "residual: B T d 4 / 2^20 MiB, one activation of the residual stream in float32; measured: "
        "the first block's output; held/residual: how many of them the forward leaves behind.",
    ),
    picture=picture,
    hidden=("residual_measured_mib", "files", "note"),
    files=True,
)


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench memory", allow_abbrev=False, description=BENCH.title
    )
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto; with commas.")
    add_size_arguments(parser)
    parser.add_argument("--contexts", default="128,256,512", help="Tokens, with commas.")
    parser.add_argument("--batches", default="4", help="Sequences, with commas.")
    parser.add_argument("--dtypes", default="fp32,bf16", help=f"Of {', '.join(DTYPES)}.")
    parser.add_argument("--modes", default=",".join(MODES), help="With commas.")
    parser.add_argument("--checkpointing", default="false,true", help="true, false, or both.")
    parser.add_argument("--warmup", type=int, default=1, help="Steps before; 0: the very first.")
    parser.add_argument(
        "--memory_gib",
        type=float | None,
        default=None,
        help="What a row may take on a CPU; more is out of memory. null: what there is.",
    )
    add_sweep_arguments(parser)
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench memory ...`."""
    args = make_parser().parse_args(underscored(argv[2:]))
    check_bounds(args, warmup=0)
    check_positive(args, "memory_gib")
    switches = listed(args, "checkpointing", switch)
    configurations = [
        {
            "device": device,
            "dtype": dtype,
            "size": size,
            "shape": list(shape),
            "mode": mode,
            "checkpointing": checkpointing,
            "batch": batch,
            "context": context,
            "warmup": args.warmup,
            "memory_gib": args.memory_gib,
        }
        for device, (size, shape), batch, context, dtype, mode, checkpointing in itertools.product(
            devices(args),
            chosen_sizes(args).items(),
            listed(args, "batches", at_least(1)),
            listed(args, "contexts", at_least(1)),
            listed(args, "dtypes", one_of(DTYPES)),
            listed(args, "modes", one_of(MODES)),
            switches,
        )
        # nothing is kept under no_grad: one row of inference says it all
        if mode == "training" or checkpointing == switches[0]
    ]
    for configuration in configurations:
        configuration["checkpointing"] &= configuration["mode"] == "training"
    return run_sweep(BENCH, configurations, argv, args.resume, args.timeout_s)


# ---- in the row's own process --------------------------------------------------------------------


def measure_row(
    device: str,
    dtype: str,
    size: str,
    shape: list[int],
    mode: str,
    checkpointing: bool,
    batch: int,
    context: int,
    warmup: int,
    memory_gib: float | None,
    folder: str,
) -> dict[str, Any]:
    """Memory of one step; leaves a timeline and, on CUDA, a snapshot in the folder."""
    import torch

    from gpt_lightning.bench.core.memory_meter import limit_memory, measure_memory

    where = torch.device(device)
    use_dtype(dtype, where)
    limit_memory(where, memory_gib)
    torch.manual_seed(0)
    stem = name_of(device, dtype, size, mode, checkpointing, batch, context)
    Path(folder).mkdir(parents=True, exist_ok=True)
    snapshot = Path(folder) / f"{stem}.pickle" if where.type == "cuda" else None
    outputs: list[int] = []  # bytes of the first block's output, call by call

    def work(phase: "PhaseContext") -> None:
        with phase("setup"):
            model = make_model(shape, context).to(where)
            model.transformer.h[0].register_forward_hook(
                lambda *call: outputs.append(call[2].nbytes)
            )
            if checkpointing:
                model.transformer.checkpointing = True
            step = make_step(model, mode, dtype, batch, context)
            for _ in range(warmup):
                step(lambda name: nullcontext())
        step(phase)

    memory = measure_memory(work, where, snapshot)
    found = columns(memory, batch * context * shape[2] * 4, outputs[-1])
    if where.type == "cpu":
        found["resident_gib"] = peak_memory_gib(where)
    return {**found, "files": draw(memory, Path(folder), stem, snapshot)}


def name_of(*parts: object) -> str:
    """A file name of a configuration: every row has its own."""
    device, dtype, size, mode, checkpointing, batch, context = parts
    kept = "-checkpointing" if checkpointing else ""
    return f"{str(size).replace('/', 'x')}-{device}-{dtype}-{mode}{kept}-b{batch}-t{context}"


def make_step(
    model: "GPT",
    mode: str,
    dtype: str,
    batch: int,
    context: int,
) -> "Callable[[PhaseContext], None]":
    """A step of inference or training whose phases can be watched."""
    import torch

    device = model.lm_head.weight.device
    cast = partial(autocast, dtype, device)
    x, y = (torch.randint(10_000, (batch, context), device=device) for _ in range(2))
    if mode == "inference":
        model.eval()

        def infer(phase: "PhaseContext") -> None:
            with phase("forward"), torch.no_grad(), cast():
                logits = model(x)
            del logits  # until here: held

        return infer
    optimizer = TrainingOptimizer(model, device, dtype)

    def train(phase: "PhaseContext") -> None:
        with phase("forward"), cast():
            loss = model(x, y)
        with phase("backward"):
            optimizer.backward(loss)
        with phase("optimizer"):
            optimizer.step()

    return train


def columns(memory: "Memory", residual: int, output: int) -> dict[str, Any]:
    """The measured columns, of bytes."""
    from gpt_lightning.bench.core.memory_meter import MIB

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


def draw(memory: "Memory", folder: Path, stem: str, snapshot: Path | None) -> str:
    """Draws the timeline; returns the names of the row's files."""
    from gpt_lightning.bench.core.curves import plot_timeline

    plot_timeline(folder / f"{stem}.png", stem, memory)
    return " ".join([f"{stem}.png", *([snapshot.name] if snapshot else [])])
