"""Collectives and training steps over several processes: time, communication, memory.

all-reduce: sum of a float32 tensor of MiB on each process. all-gather: each process ends with MiB,
and begins with its part; reduce-scatter: the other way round. A time is the slowest process's,
medians over steps. bus: what each process sends over the time: 2 (n - 1) / n of MiB for all-reduce,
(n - 1) / n for the others, as NCCL's own tests define it.

ddp and fsdp2: the strategies of `fit`, with its settings, optimizer and clipping, not compiled.
zero1: ddp with ZeroRedundancyOptimizer, which shards AdamW's state. Each process has its own batch.
alone: the same step without a strategy, in all processes at once. communication: 1 - alone / step;
it is below 0 where a sharded update saves more than communication takes.

memory: of the process with the most, after the model was made, before the update, and after it. On
CUDA from the allocator; on a CPU bytes of parameters, gradients, optimizer state, and of ddp's
buckets, which exist from the start and hold the gradients.

predicted: step of ddp by the model of core/scaling.py, whose constants come from the rows of one
and two processes: alone, the all-reduces of two, and the share of them that ddp's step of two
hides. Processes of a CPU share its cores: alone of two is scaled by n / 2.

Processes are connected by gloo on a CPU, and by NCCL on CUDA with one GPU each.
"""

import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse.typing import PositiveInt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.parallel import DistributedDataParallel

from gpt_lightning.bench.core import memory_meter, scaling, timing, training_step
from gpt_lightning.bench.core.memory_meter import MIB
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables import options
from gpt_lightning.tables.options import COURSE_SIZES, Option, Values, listed
from gpt_lightning.tables.rows import Row, column, sweep_row
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError, failure

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
STRATEGIES = ("ddp", "fsdp2", "zero1")


@sweep_row
class ParallelRow(training_step.DeviceRow):
    """Collective of one size, or training step of one strategy."""

    work: str = column("work", width=14)
    processes: int = column("processes", "d")
    mib: int | None = column("MiB", "d", 5)
    size: str = column("size", width=6, default="")
    batch: int | None = column("batch", "d", console=False)
    context: int | None = column("context", "d", console=False)
    time_ms: float | None = column("time ms", ",.2f", 9)
    time_std_ms: float | None = column("std", ",.2f", 6, console=False)
    bus_gb_per_sec: float | None = column("bus GB/s", ",.2f")
    alone_ms: float | None = column("alone ms", ",.2f", 9)
    communication: float | None = column("communication", ".1%")
    predicted_ms: float | None = column("predicted ms", ",.2f")
    init_mib: float | None = column("init MiB", ",.1f", 8)
    before_update_mib: float | None = column("before update", ",.1f")
    after_update_mib: float | None = column("after update", ",.1f")
    gradient_mib: float | None = column("gradients MiB", ",.1f", console=False)


def read_work(args: Any) -> list[Values]:
    """Return the collectives with their sizes and the strategies with the model's, by processes."""
    work = listed(args, "work", options.one_of((*COLLECTIVES, *STRATEGIES)))
    processes = listed(args, "processes", options.at_least(1))
    sizes = options.read_sizes(args, COURSE_SIZES)
    model = {"batch": args.batch, "context": args.context}
    return [
        {"work": name, "processes": n} | own
        for name in work
        for n in processes
        if n > 1 or name == "ddp"  # a collective of one process does nothing
        for own in (
            [{"mib": mib} for mib in listed(args, "mib", options.at_least(1))]
            if name in COLLECTIVES
            else [size | model for size in sizes]
        )
    ]


def picture(folder: Path, rows: Sequence[Row]) -> list[str]:
    """Draw the collectives over their size."""
    from gpt_lightning.tables.pictures import plot_rows  # not in a row's process

    shown = [row for row in rows if row.mib is not None]
    if len({row.mib for row in shown}) < 2:
        return []
    quantities = {"time_ms": "time (ms)", "bus_gb_per_sec": "bus (GB/s)"}
    title = "Collectives by size and processes"

    def place(row: Row) -> tuple[str, str, str]:
        return row.work, f"{row.processes} processes", "-"

    plot_rows(folder / "collectives.png", title, shown, ("mib", "size (MiB)"), quantities, place)
    return ["collectives.png"]


def predict(row: Row, before: Sequence[Row]) -> Row:
    """Return a ddp row with the step that the model of core/scaling.py predicts, above 2 processes.

    Args:
        row: The new row.
        before: Rows before it, of which some have one and two processes.
    """
    found = None
    if row.work == "ddp" and row.status == "ok" and row.processes > 2:
        found = constants(row, before)
    if found is None:
        return row
    link, step = found
    if row.device == "cpu":  # processes share its cores
        step = dataclasses.replace(step, compute_s=step.compute_s * row.processes / 2)
    return dataclasses.replace(row, predicted_ms=step.time_s(link, row.processes) * 1e3)


def constants(row: Row, rows: Sequence[Row]) -> tuple[scaling.Link, scaling.Step] | None:
    """Return the link, and the step of a ddp row, from rows of one and two processes.

    The computation is that of one process, on a CPU that of one of two. None without these rows.
    """
    same = ("device", "dtype", "size", "batch", "context")
    found = [r for r in rows if r.status == "ok" and r.device == row.device]
    steps = {
        r.processes: r
        for r in found
        if r.work == "ddp" and all(getattr(r, name) == getattr(row, name) for name in same)
    }
    reduced = [r for r in found if r.work == "all-reduce" and r.processes == 2]
    link = scaling.fit_link([(r.mib * MIB, r.time_ms / 1e3) for r in reduced], 2)
    if link is None or not {1, 2} <= steps.keys():
        return None
    nbytes = steps[2].gradient_mib * MIB
    exposed = (steps[2].time_ms - steps[2].alone_ms) / 1e3
    overlap = scaling.measured_overlap(exposed, link.all_reduce_s(nbytes, 2))
    compute = steps[2 if row.device == "cpu" else 1].alone_ms
    return link, scaling.Step(compute / 1e3, nbytes, overlap)


BENCH = Bench(
    name="parallel",
    title="Collectives and data-parallel training steps",
    row=ParallelRow,
    measure="gpt_lightning.bench.parallel:measure_parallel",
    options=(
        options.DEVICE,
        options.dtypes("fp32", ("fp32", "bf16")),
        Option(
            "work",
            ",".join((*COLLECTIVES, *STRATEGIES)),
            f"Any of {', '.join((*COLLECTIVES, *STRATEGIES))}.",
            read_work,
        ),
        Option("processes", "1,2,4,6", "Processes, separated by commas; 1 is for ddp alone."),
        Option("mib", "1,10,100,1024", "MiB of the collectives, separated by commas."),
        Option("sizes", "small", f"Any of {', '.join(COURSE_SIZES)}."),
        Option("batch", 1, "Sequences per process.", type=PositiveInt),
        Option("context", 128, "Tokens per sequence.", type=PositiveInt),
        options.warmup(2, PositiveInt),
        options.steps(5),
        options.MEMORY_LIMIT,
    ),
    picture=picture,
    relate=predict,
)


# ---- in the row's own process --------------------------------------------------------------------


def measure_parallel(
    row: ParallelRow,
    warmup: int,
    steps: int,
    memory_gib: float | None,
    shape: list[int] | None = None,
) -> Values:
    """Start the processes of a row, and return what the first of them writes.

    Raises:
        SkippedError: There are fewer GPUs than processes.
    """
    if row.device == "cuda" and row.processes > torch.cuda.device_count():
        raise SkippedError(f"this machine has {torch.cuda.device_count()} GPUs")
    if row.device == "mps":
        raise SkippedError("PyTorch connects no processes on MPS")
    if memory_gib is None and (free := memory_meter.available_bytes()) is not None:
        memory_gib = free / 2**30
    share = None if memory_gib is None else memory_gib / row.processes
    values = dataclasses.asdict(row)  # the class has no module to be found in
    arguments = (values, warmup, steps, share, shape)
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(run_rank, (folder, *arguments), row.processes)
        except ProcessException:
            found = sorted(Path(folder).glob("failure*.json"))
            if not found:
                raise
            return dict(json.loads(found[0].read_text()))
        return dict(json.loads((Path(folder) / "result.json").read_text()))


def run_rank(
    rank: int,
    folder: str,
    values: Values,
    warmup: int,
    steps: int,
    memory_gib: float | None,
    shape: list[int] | None,
) -> None:
    """Measure as one of the processes; the first writes the result, each its own failure."""
    try:
        row = ParallelRow(**values)
        measured = measure_rank(rank, folder, row, warmup, steps, memory_gib, shape)
    except Exception as error:
        (Path(folder) / f"failure{rank}.json").write_text(json.dumps(failure(error)))
        os._exit(1)  # the others may wait for this one: spawn ends them
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(measured))


def measure_rank(
    rank: int,
    folder: str,
    row: ParallelRow,
    warmup: int,
    steps: int,
    memory_gib: float | None,
    shape: list[int] | None,
) -> Values:
    """Connect with the other processes and measure a collective or a step."""
    if row.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // row.processes))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    else:
        torch.cuda.set_device(rank)
    device = torch.device(f"cuda:{rank}" if row.device == "cuda" else row.device)
    memory_meter.limit_memory(device, memory_gib)
    training_step.use_dtype(row.dtype, device)
    backend = "gloo" if row.device == "cpu" else "nccl"
    store = f"file://{folder}/store"
    dist.init_process_group(backend, store, rank=rank, world_size=row.processes)
    try:
        if row.mib is not None:
            return measure_collective(row, device, warmup, steps)
        assert shape is not None
        return measure_step(row, device, shape, warmup, steps)
    finally:
        dist.destroy_process_group()


def slowest(work: Callable[[], object], device: torch.device, warmup: int, steps: int) -> Values:
    """Return median and standard deviation of the slowest process's time in each step."""

    def step(timer: timing.StepTimer) -> None:
        work()
        timer.end("work")

    times, _ = timing.record(step, device, warmup, steps)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, times["total"])
    found = timing.stats([max(each) for each in zip(*gathered, strict=True)])
    return {"time_ms": found.median, "time_std_ms": found.std}


def measure_collective(row: ParallelRow, device: torch.device, warmup: int, steps: int) -> Values:
    """Time one of COLLECTIVES."""
    assert row.mib is not None
    n = row.processes
    part = torch.ones(-(-row.mib * MIB // 4 // n), device=device)  # float32, rounded up
    whole = torch.ones(n * part.numel(), device=device)

    def work() -> None:
        if row.work == "all-reduce":
            dist.all_reduce(whole)
        elif row.work == "all-gather":
            dist.all_gather_into_tensor(whole, part)
        else:
            dist.reduce_scatter_tensor(part, whole)

    found = slowest(work, device, warmup, steps)
    share = scaling.bus_share(n) / (1 if row.work == "all-reduce" else 2)
    return found | {"bus_gb_per_sec": share * whole.nbytes / found["time_ms"] / 1e6}


def measure_step(
    row: ParallelRow, device: torch.device, shape: list[int], warmup: int, steps: int
) -> Values:
    """Time a training step alone and under its strategy; measure the strategy's memory."""
    assert row.batch is not None
    assert row.context is not None
    x, y = training_step.random_batch(row.batch, row.context, device)
    gradients, alone = alone_step(shape, row, device, warmup, steps)
    model, optimizer = make_strategy(row, shape, device)
    step = training_step.TrainingStep(model, device, row.dtype, optimizer)
    memory = {"init_mib": held_mib(model, None, device)}
    with training_step.autocast(row.dtype, device):
        model(x, y).backward()
    memory["before_update_mib"] = held_mib(model, optimizer, device)
    optimizer.step()
    memory["after_update_mib"] = held_mib(model, optimizer, device)
    optimizer.zero_grad()
    found = slowest(lambda: step(x, y), device, warmup, steps)
    gathered: list[Any] = [None] * row.processes
    dist.all_gather_object(gathered, memory)
    most = {name: max(each[name] for each in gathered) for name in memory}
    share = {"communication": 1 - alone / found["time_ms"]}
    return found | {"alone_ms": alone, "gradient_mib": gradients} | share | most


def alone_step(
    shape: list[int], row: ParallelRow, device: torch.device, warmup: int, steps: int
) -> tuple[float, float]:
    """Return MiB of the gradients, and milliseconds of a step without a strategy."""
    assert row.batch is not None
    assert row.context is not None
    x, y = training_step.random_batch(row.batch, row.context, device)
    model = make_alone(row, shape, device)
    step = training_step.TrainingStep(model, device, row.dtype)
    gradients = sum(p.nbytes for p in model.parameters()) / MIB
    return gradients, slowest(lambda: step(x, y), device, warmup, steps)["time_ms"]


def make_alone(row: ParallelRow, shape: list[int], device: torch.device) -> GPT:
    """Return a model, equal in all processes."""
    assert row.context is not None
    torch.manual_seed(0)
    return training_step.make_model(shape, row.context).to(device)


def make_strategy(
    row: ParallelRow, shape: list[int], device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under one of STRATEGIES, and its optimizer, as `fit` sets them."""
    model = make_alone(row, shape, device)
    if row.work == "fsdp2":
        from gpt_lightning.training.sharding import ShardedStrategy  # Lightning, for this row alone

        strategy = ShardedStrategy()
        strategy._device_mesh = init_device_mesh(
            device.type, (row.processes,), mesh_dim_names=("data_parallel",)
        )
        strategy.shard(model, row.dtype == "bf16")
        return model, training_step.fit_optimizer(model, device, row.dtype)
    optimizer: Any = training_step.fit_optimizer(model, device, row.dtype)
    if row.work == "zero1":
        fused = optimizer.defaults["fused"]
        optimizer = ZeroRedundancyOptimizer(optimizer.param_groups, torch.optim.AdamW, fused=fused)
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer


def held_mib(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> float:
    """Return the memory of this process: of all tensors on CUDA, else of the training state."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device) / MIB
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    if isinstance(model, DistributedDataParallel):  # views of its buckets, which exist without them
        gradients = [*parameters]
    while isinstance(optimizer, ZeroRedundancyOptimizer):
        optimizer = optimizer.optim  # of this process's share
    states = optimizer.state.values() if optimizer is not None else ()
    moments = [value for state in states for value in state.values()]
    return nbytes([*parameters, *gradients, *moments]) / MIB


def nbytes(tensors: Iterable[Any]) -> int:
    """Return the bytes of tensors; of a DTensor those of this process's part."""
    return sum(getattr(t, "_local_tensor", t).nbytes for t in tensors if torch.is_tensor(t))
