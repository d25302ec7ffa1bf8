"""Write the tables of benchmarks/scaling.md: GPT-2's four sizes on up to 1,024 GPUs, by the model.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --run lightning_logs/NAME

The constants of the GPUs are at the top, and their sources in scaling.md. With --run the table
of measured constants is written too: compute, communication and overlap from rows/parallel.json
(`python benchmarks/pages.py parallel`), data and checkpoint from the files of the run.

The model of a step over n processes:

    step(n)    = compute + exposed(n) + data + checkpoint / interval
    exposed(n) = max((1 - overlap) comm(n), comm(n) - window)
    comm(n)    = alpha hops(n) + 2 (n - 1) / n bytes / bandwidth
    hops(n)    = min(n - 1, 2 ceil(log2 n))

All-reduce of n processes: a ring (Patarasuk and Yuan 2009) sends 2 (n - 1) / n of the bytes in
n - 1 pairs of steps, and a tree as much in 2 log2 n. alpha is the latency of one of them. overlap
is the share of the communication that the backward hides, and window the longest time that it can.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.bench import parallel
from gpt_lightning.bench.memory_meter import MIB
from gpt_lightning.errors import UserError
from gpt_lightning.model import flops
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.history import find_run, read_events, read_rows
from gpt_lightning.tables.rows import Row, make_row

PAGE = Path(__file__).with_suffix(".md")
ROWS = Path(__file__).parent / "rows" / "parallel.json"
SIZES = {"124M": (12, 12, 768), "350M": (24, 16, 1024), "774M": (36, 20, 1280)}
SIZES |= {"1558M": (48, 25, 1600)}
T = 1024  # tokens of a sequence
MICRO_BATCH = {"124M": 32, "350M": 16, "774M": 16, "1558M": 8}  # sequences
BATCH = 2**19  # tokens of a step with a fixed batch
PER_GPU = 2**15  # tokens of a step and a GPU, with a batch that grows
GPUS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
NODE = 8  # GPUs


@dataclass(frozen=True)
class Link:
    """Constants of an all-reduce.

    Attributes:
        alpha_s: Latency of a hop, in seconds.
        bytes_per_s: Bus bandwidth of a process.
    """

    alpha_s: float
    bytes_per_s: float

    def all_reduce_s(self, nbytes: float, n: int) -> float:
        """Return the seconds of an all-reduce of some bytes on each of n processes."""
        return self.alpha_s * hops(n) + bus_share(n) * nbytes / self.bytes_per_s


def hops(n: int) -> int:
    """Return the hops of an all-reduce of n processes."""
    return min(n - 1, 2 * math.ceil(math.log2(n)))


def bus_share(n: int) -> float:
    """Return the bytes that each of n processes sends in an all-reduce, over its bytes."""
    return 2 * (n - 1) / n


def fit_link(times: Sequence[tuple[float, float]], n: int) -> Link | None:
    """Return the link that explains times of all-reduces of n processes; None without two sizes.

    Args:
        times: Bytes and seconds. The line goes through the smallest and the largest size.
        n: Processes.
    """
    (small, fast), (large, slow) = min(times, default=(0, 0)), max(times, default=(0, 0))
    if large == small or slow <= fast:
        return None
    per_byte = (slow - fast) / (large - small)
    alpha = max(0.0, fast - small * per_byte)
    return Link(alpha / hops(n), bus_share(n) / per_byte)


@dataclass(frozen=True)
class Step:
    """Constants of a step on one process, in seconds.

    Attributes:
        compute_s: Forward, backward and update.
        gradient_bytes: Bytes that are all-reduced.
        overlap: Share of the communication that the backward hides, 0 to 1.
        window_s: Longest time that it hides: the backward of the last micro-batch.
        data_s: Wait for a batch.
        checkpoint_s: Stall of a checkpoint.
        interval: Steps between checkpoints.
    """

    compute_s: float
    gradient_bytes: float
    overlap: float
    window_s: float = math.inf
    data_s: float = 0.0
    checkpoint_s: float = 0.0
    interval: int = 1

    def time_s(self, link: Link, n: int) -> float:
        """Return the seconds of a step of n processes."""
        comm = link.all_reduce_s(self.gradient_bytes, n)
        exposed = max((1 - self.overlap) * comm, comm - self.window_s)
        return self.compute_s + exposed + self.data_s + self.checkpoint_s / self.interval


def measured_overlap(exposed_s: float, comm_s: float) -> float:
    """Return the hidden share of a communication, from what a step takes longer with it."""
    return min(1.0, max(0.0, 1 - exposed_s / comm_s))


def constants(row: Row, rows: Sequence[Row]) -> tuple[Link, Step] | None:
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
    link = fit_link([(r.mib * MIB, r.time_ms / 1e3) for r in reduced], 2)
    if link is None or not {1, 2} <= steps.keys():
        return None
    nbytes = steps[2].gradient_mib * MIB
    exposed = (steps[2].time_ms - steps[2].alone_ms) / 1e3
    overlap = measured_overlap(exposed, link.all_reduce_s(nbytes, 2))
    compute = steps[2 if row.device == "cpu" else 1].alone_ms
    return link, Step(compute / 1e3, nbytes, overlap)


PEAK, MFU = 989.4e12, 0.5  # FLOP/s, and what one GPU reaches of it
INSIDE = Link(10e-6, 350e9)  # NVLink 4
LINKS = {  # network between nodes
    "eight 400 Gb/s": Link(20e-6, 8 * 50e9 * 0.8),
    "one 400 Gb/s": Link(20e-6, 50e9 * 0.8),
}
OVERLAP = 0.9  # all but the last bucket of gradients
BACKWARD = 2 / 3  # share of a micro-batch's time
GRADIENT_BYTES = 4  # each parameter has one in float32
STATE_BYTES = 12  # each parameter in a checkpoint: float32 weight and two moments
COPY = 20e9  # bytes/s to the host; the file is written while training goes on
INTERVAL = 1000  # steps between checkpoints


@cache
def size_of(size: str) -> tuple[int, int]:
    """Return the parameters of a size, and its FLOPs of a training token."""
    n_layer, n_head, n_embd = SIZES[size]
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer, n_head, n_embd, block_size=T, vocab_size=50257))
    n = model.num_params(embeddings=False)
    return model.num_params(), flops.flops_per_token(n, n_layer, n_embd, T)


def step_s(size: str, gpus: int, link: Link, tokens: float) -> float:
    """Return the seconds of a step of some tokens for each GPU."""
    n, per_token = size_of(size)
    compute = tokens * per_token / (PEAK * MFU)
    micro = compute * min(1.0, MICRO_BATCH[size] * T / tokens)
    copy = STATE_BYTES * n / COPY
    step = Step(compute, GRADIENT_BYTES * n, OVERLAP, BACKWARD * micro, 0.0, copy, INTERVAL)
    return step.time_s(link, gpus)


def table(fixed: bool) -> str:
    """Return a table of the share of linear speed, by size, link and number of GPUs."""
    gpus = [n for n in GPUS if not fixed or BATCH // n >= T]
    lines = ["| size | network of a node | " + " | ".join(f"{n:,}" for n in gpus) + " |"]
    lines.append("| --- | --- |" + " ---: |" * len(gpus))
    for size in SIZES:
        for name, between in LINKS.items():
            cells = []
            for n in gpus:
                tokens = BATCH / n if fixed else PER_GPU
                link = INSIDE if n <= NODE else between
                time = step_s(size, n, link, tokens)
                alone = step_s(size, 1, INSIDE, tokens)
                cells.append(f"{tokens * n / time / 1e6:,.2f} ({alone / time:.0%})")
            lines.append(f"| {size} | {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run_constants(run: Path) -> dict[str, tuple[float, str]]:
    """Return seconds of a wait for data and of a checkpoint, and the interval, with their sources.

    The first log of a run waits for the loader's start, and the last checkpoint for its file.

    Raises:
        UserError: The run is too short.
    """
    logged = [row for row in read_rows(RunPaths(run).metrics) if "perf/data_wait_ms" in row]
    events = read_events(run)
    last = events[-1]["step"] if events else 0
    stalls: dict[int, float] = {}
    for event in events:
        if event["event"] == "phase" and event["name"] == "checkpoint" and event["step"] < last:
            stalls[event["step"]] = stalls.get(event["step"], 0.0) + event["seconds"]
    if len(logged) < 2 or not stalls:
        raise UserError(
            f"{run} has {len(logged)} logs of perf/data_wait_ms and {len(stalls)} checkpoints "
            "before its last step: give a run with two logs and one checkpoint"
        )
    steps = [b["step"] - a["step"] for a, b in itertools.pairwise(logged)]
    waited = sum(n * row["perf/data_wait_ms"] for n, row in zip(steps, logged[1:], strict=True))
    data = f"mean of `perf/data_wait_ms`, {sum(steps):,} steps"
    checkpoint = f"mean of the phase `checkpoint` in `timeline.jsonl`, {len(stalls)} checkpoints"
    return {
        "data": (waited / sum(steps) / 1e3, data),
        "checkpoint": (statistics.mean(stalls.values()), checkpoint),
        "interval": (max(stalls) / len(stalls), "steps between two"),
    }


def measured(stored: dict[str, Any], run: Path) -> str:
    """Return the table of measured constants.

    Args:
        stored: Content of rows/parallel.json.
        run: Folder of a run with checkpoints.

    Raises:
        UserError: A constant cannot be measured.
    """
    table = stored["tables"][0]
    rows = [make_row(parallel.BENCH.row, row) for row in table["rows"]]
    steps = [row for row in rows if row.work == "ddp" and row.processes == 2]
    found = constants(steps[0], rows) if steps else None
    if found is None:
        raise UserError(f"{ROWS} lacks rows: python benchmarks/pages.py parallel")
    (link, step), own = found, run_constants(run)
    wait, stall, interval = own["data"], own["checkpoint"], own["interval"]
    shared = ", beside another process on the same cores" if steps[0].device == "cpu" else ""
    model = f"{steps[0].size}, batch {steps[0].batch}, context {steps[0].context}, {steps[0].dtype}"
    lines = [
        ("compute", f"{step.compute_s * 1e3:,.1f} ms", f"`alone ms` of ddp ({model}){shared}"),
        ("alpha", f"{link.alpha_s * 1e6:,.0f} µs", "all-reduce of 2, the smallest size"),
        ("bandwidth", f"{link.bytes_per_s / 1e9:,.2f} GB/s", "all-reduce of 2, the largest size"),
        (
            "overlap",
            f"{step.overlap:.2f}",
            "step of ddp of 2 against `alone ms` and its all-reduce",
        ),
        ("data", f"{wait[0] * 1e3:,.3f} ms", wait[1]),
        ("checkpoint", f"{stall[0] * 1e3:,.0f} ms", f"{stall[1]}, every {interval[0]:,.0f} steps"),
    ]
    machine = "; ".join(dict.fromkeys(table["machine"][name] for name in ("device", "CPU")))
    head = f"{machine}. Load average before the bench: {stored['load']}."
    if stored["load"] > 0.5:
        head += " **The machine was busy: the times are not those of an idle one.**"
    cells = ["| constant | value | measured by |", "| --- | ---: | --- |"]
    return "\n".join(
        [
            textwrap.fill(head, 100, break_on_hyphens=False),
            "",
            *cells,
            *(f"| {' | '.join(line)} |" for line in lines),
        ]
    )


def main() -> int:
    """Replace the tables of the page; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--run", help="run with checkpoints, for the table of measured constants")
    given = parser.parse_args().run
    tables = {"fixed": table(fixed=True), "growing": table(fixed=False)}
    try:
        if given is not None:
            if not ROWS.exists():
                raise UserError(f"{ROWS} is missing: python benchmarks/pages.py parallel")
            tables["measured"] = measured(json.loads(ROWS.read_text()), find_run(given))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = PAGE.read_text(encoding="utf-8")
    for name, content in tables.items():
        before, begin, rest = text.partition(f"<!-- {name} -->\n")
        text = before + begin + content + rest[rest.index("\n<!-- end -->") :]
    PAGE.write_text(text, encoding="utf-8")
    print(PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
