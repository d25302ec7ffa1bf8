"""Two ranks over gloo of which one is killed, stopped or wrong: both end, and the run resumes."""

import os
import re
import signal
from pathlib import Path

import pytest
import torch
from processes import (
    RESUME,
    STEPS,
    checkpoints,
    fit,
    leftovers,
    must_equal,
    run_of,
    start_fit,
    step_of,
    write_inputs,
)
from tiny_fit import rows

TWO = ("--trainer.devices", "2", "--trainer.strategy", "ddp", "--data.batch_size", "4")
ENDLESS = ("--trainer.max_steps", "100000")
AGAIN = "start the same command with --resume auto to continue"
NAN = """
import lightning as L

class Nan(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_rank == 1 and trainer.global_step == 4:
            next(pl_module.parameters()).grad.fill_(float("nan"))
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    """A folder with an uninterrupted run of two ranks."""
    folder = write_inputs(tmp_path_factory.mktemp("pair") / "work")
    fit(folder, *TWO)
    return folder


@pytest.mark.parametrize(
    "rank", [pytest.param(1, marks=pytest.mark.slow), pytest.param(0, marks=pytest.mark.long)]
)
def test_a_signal_to_one_rank_stops_both(pair, folder, rank):
    with start_fit(folder, *TWO) as process:
        process.wait_for(9)
        os.kill(process.rank(rank), signal.SIGTERM)
        assert process.end(60) == 143, process.output[-2000:]
        process.wait_for_descendants(30)
    steps = [step_of(path) for path in checkpoints(folder)]
    assert steps.count(max(steps)) == 1
    assert leftovers(folder) == []
    fit(folder, *TWO, *RESUME)
    must_equal(pair, folder)


@pytest.mark.long
def test_both_ranks_are_killed(pair, folder):
    with start_fit(folder, *TWO) as process:
        process.wait_for(15)
        process.kill()
    fit(folder, *TWO, *RESUME)
    must_equal(pair, folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "code", "words"),
    [(1, 75, "has ended with exit code -9 (SIGKILL)"), (0, -9, "has ended")],
)
def test_a_rank_that_is_killed_ends_the_other(folder, rank, code, words):
    with start_fit(folder, *TWO, *ENDLESS) as process:
        process.wait_for(5)
        os.kill(process.rank(rank), signal.SIGKILL)
        assert process.end(60) == code, process.output[-2000:]
        process.wait_for_descendants(30)
    (line,) = process.errors()
    assert f"rank {rank} {words}" in line
    assert AGAIN in line


@pytest.mark.slow
def test_a_gradient_of_one_rank_that_is_not_finite_ends_both(folder):
    (folder / "spoiled.py").write_text(NAN)
    callback = ("--trainer.callbacks+=spoiled.Nan",)
    with start_fit(folder, *TWO, *callback, env={"PYTHONPATH": str(folder)}) as process:
        assert process.end() == 2, process.output[-2000:]
        process.wait_for_descendants(30)
    (line,) = process.errors()
    assert "step 5" in line
    assert step_of(checkpoints(folder)[0]) == 4
    state = torch.load(checkpoints(folder)[0], weights_only=True)["state_dict"]
    assert all(bool(torch.isfinite(weight).all()) for weight in state.values())


def listening(pids: list[int]) -> list[str]:
    """Return addresses beyond loopback, in hexadecimal, at which processes listen."""
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            match = re.match(r"socket:\[(\d+)\]", os.readlink(path)) if path.is_symlink() else None
            if match:
                inodes.add(match[1])
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address = fields[1].split(":")[0]
            if fields[3] == "0A" and fields[9] in inodes and address not in loopback:
                addresses.append(fields[1])
    return addresses


@pytest.mark.slow
def test_ranks_listen_to_nobody_outside(folder):
    with start_fit(folder, *TWO, *ENDLESS, "--data.num_workers", "2") as process:
        process.wait_for(5)
        pids = process.descendants()
        assert len(pids) > 2
        # one that may end meanwhile is a loader's worker
        assert listening(pids) == []


def losses(logged: list[dict]) -> list[float]:
    return [row["train/loss"] for row in logged if "train/loss" in row]


@pytest.mark.long
def test_another_number_of_ranks_has_the_losses_of_one(folder, tmp_path):
    """Gradients are averaged in another order; dropout is off, for its masks are by rank."""
    off = ("--model.config.dropout", "0.0")
    single = write_inputs(tmp_path / "single")
    fit(single, *off)
    with start_fit(folder, *TWO, *off) as process:
        process.wait_for(14)
        process.kill()
    fit(folder, *off, *RESUME)
    found, expected = (losses(rows(run_of(path))) for path in (folder, single))
    assert len(expected) == STEPS
    assert found == pytest.approx(expected, rel=1e-5)
