"""`gpt-lightning bench parallel`: the rows, and real processes."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ranks import METHOD
from torch.multiprocessing import start_processes

from gpt_lightning.bench import parallel
from gpt_lightning.bench.memory_meter import MIB
from gpt_lightning.bench.models import make_model
from gpt_lightning.cli import main
from gpt_lightning.tables import sweep
from gpt_lightning.tables.sweep import read_options
from gpt_lightning.tables.worker import measured

TINY = "--device cpu --sizes small --warmup 1 --steps 2"


# ---- the rows ------------------------------------------------------------------------------------


def test_collectives_have_sizes_and_strategies_a_model():
    words = f"{TINY} --work all-gather,ddp,zero1 --processes 1,2 --mib 1,10"
    _, rows = read_options(parallel.BENCH, words.split())
    found = [(row["work"], row["processes"], row.get("mib"), row.get("size")) for row in rows]
    assert found == [
        ("all-gather", 2, 1, None),
        ("all-gather", 2, 10, None),
        ("ddp", 1, None, "small"),
        ("ddp", 2, None, "small"),
        ("zero1", 2, None, "small"),
    ]


def row(work: str, **fields) -> SimpleNamespace:
    values = {"device": "cpu", "dtype": "fp32", "work": work, "processes": 1, "size": "1/2/32"}
    values |= {"batch": 1, "context": 8, "warmup": 1, "steps": 1, "memory_gib": None}
    return SimpleNamespace(**values | fields)


# ---- processes -----------------------------------------------------------------------------------


@pytest.fixture
def group(tmp_path):
    """A group of this process alone."""
    store = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_each_work_runs_in_one_process(group):
    device = torch.device("cpu")
    for work in parallel.COLLECTIVES:
        found = parallel.measure_collective(row(work, mib=1), device)
        assert found["time_ms"] > 0
        assert found["bus_gb_per_sec"] == 0  # nobody else is there
    with torch.device("meta"):
        weights = make_model("gpt2", "1/2/32", 8).num_params() * 4 / MIB
    for work in parallel.WORK[3:]:
        found = parallel.measure_step(row(work), device)
        assert found["gradient_mib"] == pytest.approx(weights)
        assert found["communication"] == pytest.approx(1 - found["alone_ms"] / found["time_ms"])


@pytest.mark.slow
def test_gradients_are_views_of_the_buckets(group):
    model, _ = parallel.make_strategy(row("ddp"), torch.device("cpu"))
    batch = torch.zeros(1, 8, dtype=torch.int64)
    model(batch, batch).backward()
    storages = {p.grad.untyped_storage().data_ptr(): p.grad for p in model.parameters()}
    held = sum(gradient.untyped_storage().nbytes() for gradient in storages.values())
    assert held == sum(p.nbytes for p in model.parameters())
    assert len(storages) < len(list(model.parameters()))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_rows_of_two_processes_and_one_that_does_not_fit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parallel, "COURSE_SIZES", ["small", "1/2/32"])  # for other processes too
    monkeypatch.setattr(sweep, "isolated", lambda address, row, timeout_s: measured(address, row))
    start = partial(start_processes, start_method=METHOD)
    monkeypatch.setattr(parallel, "spawn", start)
    words = f"{TINY} --sizes 1/2/32 --context 8 --work all-gather,fsdp2 --processes 2 "
    words += "--mib 2048 --memory_gib 2"
    assert main(["bench", "parallel", *words.split()]) == 0
    (folder,) = (sweep.ROOT / "parallel").iterdir()
    large, step = json.loads((folder / "results.json").read_text())["rows"]
    assert large["status"] == "out of memory", large["note"]
    assert step["status"] == "ok", step["note"]
