"""Collectives and training steps over several processes: time and communication.

all-reduce: sum of a float32 tensor of MiB on each process. all-gather: each process ends with MiB,
and begins with its part; reduce-scatter: the other way round. A time is the slowest process's,
medians over steps. bus: what each process sends over the time: 2 (n - 1) / n of MiB for all-reduce,
(n - 1) / n for the others, as NCCL's own tests define it.

ddp and fsdp2: the strategies of `fit`, with its settings, optimizer and clipping, not compiled.
zero1: ddp with ZeroRedundancyOptimizer, which shards AdamW's state. Each process has its own batch.
alone: the same step without a strategy, in all processes at once. communication: 1 - alone / step;
it is below 0 where a sharded update saves more than communication takes.

Processes are connected by gloo on a CPU, and by NCCL on CUDA with one GPU each.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from jsonargparse.typing import PositiveInt
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.nn.parallel import DistributedDataParallel

from gpt_lightning.bench import memory_meter, models, timing
from gpt_lightning.bench.memory_meter import MIB
from gpt_lightning.bench.models import COURSE_SIZES
from gpt_lightning.bench.step import Training, fit_optimizer, prepare, random_batch
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables import options
from gpt_lightning.tables.options import Option, listed
from gpt_lightning.tables.rows import Row, Values
from gpt_lightning.tables.sweep import Bench
from gpt_lightning.tables.worker import SkippedError, failure

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
WORK = (*COLLECTIVES, "ddp", "fsdp2", "zero1")


def read_work(args: Any) -> list[Values]:
    """Return the collectives with their sizes and the strategies with the model's, by processes."""
    work = listed(args, "work", options.one_of(WORK))
    processes = listed(args, "processes", options.at_least(1))
    model = {"batch": args.batch, "context": args.context}
    sized = [{"size": s} | model for s in listed(args, "sizes", options.one_of(COURSE_SIZES))]
    volumes = [{"mib": mib} for mib in listed(args, "mib", options.at_least(1))]
    return [
        {"work": name, "processes": n} | own
        for name in work
        for n in processes
        if n > 1 or name == "ddp"  # a collective of one process does nothing
        for own in (volumes if name in COLLECTIVES else sized)
    ]


BENCH = Bench(
    measure="gpt_lightning.bench.parallel:measure_parallel",
    options=(
        options.DEVICE,
        options.dtypes("fp32", ("fp32", "bf16")),
        replace(options.words("work", "work", WORK), read=read_work),
        Option("processes", "1,2,4,6", "Processes, separated by commas; 1 is for ddp alone."),
        Option("mib", "1,10,100,1024", "MiB of the collectives, separated by commas."),
        Option("sizes", "small", f"Any of {', '.join(COURSE_SIZES)}."),
        Option("batch", 1, "Sequences per process.", type=PositiveInt),
        Option("context", 128, "Tokens per sequence.", type=PositiveInt),
        options.warmup(2, type=PositiveInt),
        options.steps(5),
        options.MEMORY_LIMIT,
    ),
)


# ---- in the row's own process --------------------------------------------------------------------


def measure_parallel(row: Row) -> Values:
    """Start the processes of a row, and return what the first of them found.

    Raises:
        SkippedError: There are fewer GPUs than processes.
    """
    if row.device == "cuda" and row.processes > torch.cuda.device_count():
        raise SkippedError(f"this machine has {torch.cuda.device_count()} GPUs")
    if row.device == "mps":
        raise SkippedError("PyTorch connects no processes on MPS")
    row.memory_gib = row.memory_gib or memory_meter.available_gib()
    results = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        try:
            spawn(run_rank, (folder, row, results), row.processes)
        except ProcessException:
            if results.empty():
                raise
    return results.get()


def run_rank(rank: int, folder: str, row: Row, results: Any) -> None:
    """Measure as one of the processes; the first sends the result, each its own failure."""
    try:
        measured = measure_rank(rank, folder, row)
    except Exception as error:
        results.put(failure(error))
        os._exit(1)  # the others may wait for this one: spawn ends them
    if rank == 0:
        results.put(measured)


def measure_rank(rank: int, folder: str, row: Row) -> Values:
    """Connect with the other processes and measure a collective or a step."""
    if row.device == "cpu":
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // row.processes))
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    else:
        torch.cuda.set_device(rank)
    device = torch.device(f"cuda:{rank}" if row.device == "cuda" else row.device)
    memory_meter.limit_memory(device, row.memory_gib / row.processes)
    prepare(row)
    backend = "gloo" if row.device == "cpu" else "nccl"
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=row.processes)
    try:
        measure = measure_collective if row.work in COLLECTIVES else measure_step
        return measure(row, device)
    finally:
        dist.destroy_process_group()


def slowest(work: Callable[[], object], device: torch.device, row: Row) -> Values:
    """Return median and standard deviation of the slowest process's time in each step."""

    def step(timer: timing.StepTimer) -> None:
        work()
        timer.end("work")

    times, _ = timing.record(step, device, row.warmup, row.steps)
    slowest_ms = torch.tensor(times["work"], device=device)
    dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
    return timing.columns("time", slowest_ms.tolist(), "std")


def measure_collective(row: Row, device: torch.device) -> Values:
    """Time one of COLLECTIVES."""
    n = row.processes
    part = torch.ones(-(-row.mib * MIB // 4 // n), device=device)  # float32, rounded up
    whole = torch.ones(n * part.numel(), device=device)
    work = {
        "all-reduce": partial(dist.all_reduce, whole),
        "all-gather": partial(dist.all_gather_into_tensor, whole, part),
        "reduce-scatter": partial(dist.reduce_scatter_tensor, part, whole),
    }
    found = slowest(work[row.work], device, row)
    sent = (n - 1) / n * whole.nbytes * (2 if row.work == "all-reduce" else 1)
    return found | {"bus_gb_per_sec": sent / found["time_ms"] / 1e6}


def measure_step(row: Row, device: torch.device) -> Values:
    """Time a training step alone and under its strategy."""
    batch = random_batch(row.batch, row.context, device)
    single = make_alone(row, device)
    gradients = sum(p.nbytes for p in single.parameters()) / MIB
    alone = slowest(Training(single, batch, row.dtype), device, row)["time_ms"]
    model, optimizer = make_strategy(row, device)
    found = slowest(Training(model, batch, row.dtype, optimizer=optimizer), device, row)
    share = 1 - alone / found["time_ms"]
    return found | {"alone_ms": alone, "communication": share, "gradient_mib": gradients}


def make_alone(row: Row, device: torch.device) -> GPT:
    """Return a model, equal in all processes."""
    torch.manual_seed(0)
    return GPT(models.make_config(row.size, row.context)).to(device)


def make_strategy(row: Row, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model under the strategy of a row, and its optimizer, as `fit` sets them."""
    model = make_alone(row, device)
    if row.work == "fsdp2":
        from gpt_lightning.training.sharding import ShardedStrategy  # Lightning, for this row alone

        mesh = init_device_mesh(device.type, (row.processes,), mesh_dim_names=("data_parallel",))

        class OnMesh(ShardedStrategy):
            device_mesh = mesh  # Lightning sets it when a Trainer begins

        OnMesh().shard(model, row.dtype == "bf16")
        return model, fit_optimizer(model, device, row.dtype)
    optimizer: Any = fit_optimizer(model, device, row.dtype)
    if row.work == "zero1":
        fused = optimizer.defaults["fused"]
        optimizer = ZeroRedundancyOptimizer(optimizer.param_groups, torch.optim.AdamW, fused=fused)
    return DistributedDataParallel(model, gradient_as_bucket_view=True), optimizer
