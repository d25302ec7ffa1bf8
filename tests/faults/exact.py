"""Bit-exact: what an uninterrupted run and a hurt one must share, compared by bytes."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from folders import leftovers, run_folder
from harness import SilentWrong
from torch.utils._pytree import tree_leaves

# moments and places, which differ from run to run
# stamps of files (inodes, times) and the run's id are of a folder, not of a run
NOT_COMPARED = {"shards", "run_id", "time", "dirpath", "best_model_path", "last_model_path"}
Trace = dict[tuple[int, int, int], list[Any]]


def step_of(path: Path) -> int:
    match = re.match(r"step-(\d+)", path.name)
    return int(match[1]) if match else -1


def checkpoints(run: Path) -> list[Path]:
    """Return the checkpoints of a run, the newest first."""
    return sorted((run / "checkpoints").glob("step-*.ckpt"), key=step_of, reverse=True)


def newest(run: Path) -> Path:
    found = checkpoints(run)
    assert found, f"{run} has no checkpoint: {[p.name for p in run.rglob('*')]}"
    return found[0]


def load(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return loaded


def leaves(value: Any, name: str = "") -> dict[str, Any]:
    """Return every tensor as (dtype, shape, bytes), so that -0.0 is not 0.0, and other values."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return {name: (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())}
    if isinstance(value, dict):
        items = [(str(k), v) for k, v in value.items() if k not in NOT_COMPARED]
    elif isinstance(value, list | tuple):
        items = [(str(i), v) for i, v in enumerate(value)]
    else:
        return {name: value}
    merged: dict[str, Any] = {f"{name}#": len(items)}
    for key, item in items:
        merged |= leaves(item, f"{name}/{key}")
    return merged


def state_differences(one: Path, other: Path) -> list[str]:
    """Return the parts that differ in two checkpoints: weights, optimizer, counters, positions."""
    a, b = load(one), load(other)
    for state in (a, b):
        state.pop("callbacks", None)  # names of files; what they count is in the metrics
    a, b = leaves(a), leaves(b)
    return sorted(key for key in a.keys() | b.keys() if a.get(key, _ABSENT) != b.get(key, _ABSENT))


_ABSENT = object()


def rows(run: Path) -> list[dict[str, Any]]:
    """Return the rows of the metrics file without times and rates."""
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [
        {
            key: value
            for key, value in json.loads(line).items()
            if key != "time" and (not key.startswith("perf/") or key == "perf/tokens")
        }
        for line in lines
    ]


def read_trace(path: Path) -> tuple[Trace, list[str]]:
    """Return the batches by (rank, step, micro-batch), and the faults of their order.

    A step that was lost with a killed process is trained again: with the same windows, the same
    dropout and thus the same loss, or it is listed as wrong. So is a gap. A rank that joins later
    begins where the others are.
    """
    seen: Trace = {}
    wrong: list[str] = []
    last: dict[int, tuple[int, int]] = {}
    for line in path.read_text().splitlines():
        rank, session, step, micro, *what = json.loads(line)
        key = (rank, step, micro)
        if seen.setdefault(key, what) != what:
            wrong.append(f"{key} was {seen[key]} and is {what} in session {session}")
        before = last.get(rank, max(last.values(), default=(-1, 0)))
        if micro == 0 and step > before[0] + 1:
            wrong.append(f"a gap from step {before[0]} to {step} in rank {rank}")
        if micro > 0 and before != (step, micro - 1):
            wrong.append(f"micro-batch {key} follows {before}")
        last[rank] = (step, micro)
    return seen, wrong


def differences(one: Path, other: Path, traces: tuple[Path, Path] | None = None) -> list[str]:
    """Return the differences of two finished runs, compared bit for bit."""
    a, b = newest(one), newest(other)
    found = [] if step_of(a) == step_of(b) else [f"ended at {a.name} and {b.name}"]
    found += [f"checkpoint {key}" for key in state_differences(a, b)]
    ours, theirs = rows(one), rows(other)
    found += [f"row {x} is {y}" for x, y in zip(ours, theirs, strict=False) if x != y]
    if len(ours) != len(theirs):
        found.append(f"{len(ours)} rows and {len(theirs)}")
    if traces is not None:
        (u, wrong_u), (v, wrong_v) = map(read_trace, traces)
        found += wrong_u + wrong_v
        for key in sorted(u.keys() | v.keys()):
            if u.get(key) != v.get(key):
                found.append(f"trained on {u.get(key)} and {v.get(key)} at {key}")
    return found


def must_equal(one: Path, other: Path) -> None:
    """Compare two runs that ended with 0: a difference is a silent wrong result.

    Args:
        one: Run folder, or the folder in which a run was started, whose trace is compared too.
        other: The same.
    """
    both = one, other
    runs = [run_folder(path) if (path / "lightning_logs").exists() else path for path in both]
    traces = [path / "trace.jsonl" for path in both if (path / "trace.jsonl").exists()]
    found = differences(runs[0], runs[1], (traces[0], traces[1]) if len(traces) == 2 else None)
    if found:
        raise SilentWrong(f"{len(found)} differences: {'; '.join(found[:8])}"[:2000])
    assert leftovers(other) == []


def finite(path: Path) -> bool:
    """Return whether every number in a checkpoint's tensors is finite."""
    state = load(path)
    values = tree_leaves([state["state_dict"], state["optimizer_states"]])
    return all(bool(torch.isfinite(t).all()) for t in values if isinstance(t, torch.Tensor))


def sequences(path: Path) -> list[tuple[int, list[str]]]:
    """Return the sequences of every step in the global order, for any ranks and micro-batches.

    Rank r of W has rows r, r + W, ... of each global micro-batch.
    """
    found, wrong = read_trace(path)
    assert not wrong, wrong
    ordered: dict[int, list[str]] = {}
    for step, micro in sorted({key[1:] for key in found}):
        ranks = [found[key][0] for key in sorted(found) if key[1:] == (step, micro)]
        interleaved = [row for rows_ in zip(*ranks, strict=True) for row in rows_]
        ordered.setdefault(step, []).extend(interleaved)
    return sorted(ordered.items())
