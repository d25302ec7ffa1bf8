"""Table of results, ours beside the published figures of GPT-2, and the JSON file."""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from gpt_lightning.evaluate.tasks import FILES, Result, Task
from gpt_lightning.files import write_atomic
from gpt_lightning.model.gpt import SIZES, GPTConfig
from gpt_lightning.tables.rows import Console, column


@dataclass(frozen=True)
class Row:
    """A metric, ours beside the published figures of the four sizes of GPT-2."""

    task: str = column("task", width=11)
    protocol: str = column("protocol", width=21)
    metric: str = column("metric", width=18)
    ours: float | None = column("ours", ".4f", 9)
    stderr: float | None = column("std.err.", ".4f", 8)
    gpt2: float | None = column("gpt2", ".4f", 8)
    gpt2_medium: float | None = column("-medium", ".4f", 8)
    gpt2_large: float | None = column("-large", ".4f", 8)
    gpt2_xl: float | None = column("-xl", ".4f", 8)


def rows(result: Result) -> Iterator[Row]:
    """Yield a row for each metric, then one for each published figure of another protocol."""
    entries = FILES.get(result.task, {"published": []})["published"]
    published = {(p["protocol"], p["metric"]): p for p in entries}
    ours = {(m.protocol, m.name): (m.value, m.stderr) for m in result.metrics}
    for key in {**ours, **published}:
        theirs = {size.replace("-", "_"): published.get(key, {}).get(size) for size in SIZES}
        yield Row(result.task, *key, *ours.get(key, (None, None)), **theirs)


def shape_name(config: GPTConfig) -> str:
    """Return the name of the published GPT-2 with a model's shape, or the shape."""
    shape = (config.n_layer, config.n_head, config.n_embd)
    sizes = {(size.n_layer, size.n_head, size.n_embd): name for name, size in SIZES.items()}
    return sizes.get(shape, "/".join(map(str, shape)))


def report(tasks: list[Task], model: str, config: GPTConfig, out: Path | None) -> None:
    """Score tasks one after the other; print each result, and write all results so far.

    Args:
        tasks: The tasks.
        model: Origin and precision of the model.
        config: Shape of the model.
        out: JSON file; None: none is written.
    """
    shape, results = shape_name(config), {}
    shows, console = not dist.is_initialized() or dist.get_rank() == 0, Console(Row)
    if shows:
        print(f"# {model}, shape {shape}\n{console.header()}", flush=True)
    for task in tasks:
        result = task.run()
        results[task.name] = dataclasses.asdict(result)
        if shows:
            notes = (f"{task.name}: {note}" for note in result.notes)
            print(*map(console.line, rows(result)), *notes, sep="\n", flush=True)
        if shows and out is not None:
            facts = {"model": model, "shape": shape, "tasks": results}
            write_atomic(out, json.dumps(facts).encode())
