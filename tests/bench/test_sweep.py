"""Sweeps, with rows that go wrong in every way a row can."""

import json
import os
import re
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpt_lightning.bench import sweep
from gpt_lightning.bench.sweep import Bench, run_sweep
from gpt_lightning.errors import UserError
from gpt_lightning.tables import column

TOY = """
import os, signal, time
from gpt_lightning.bench.worker import SkippedError

def measure(kind, value):
    with open("calls.txt", "a") as file:
        file.write(f"{kind} {value}\\n")
    if kind == "error":
        raise ValueError("that will not do")
    if kind == "skip":
        raise SkippedError("this device has no such thing")
    if kind == "abort":
        os.abort()
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "memory":
        bytearray(8 * 2**30)
    if kind == "hang":
        time.sleep(60)
    if kind == "ctrl-c" and not os.path.exists("interrupted"):
        open("interrupted", "w").close()
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    print("a library that talks on standard output")
    return {"step_ms": 2.0 * value}
"""


@dataclass(frozen=True)
class ToyRow:
    kind: str = column("kind")
    value: int = column("value", "d")
    step_ms: float | None = column("step ms", ".1f")
    status: str = column("status", default="")
    note: str = column("note", default="")


BENCH = Bench("toy", "A toy", ToyRow, "toy_rows:measure")


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy_rows.py").write_text(TOY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # of the rows' processes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gpt_lightning.machine.machine_record", lambda argv: {"device": "a toy"})


def configurations(*kinds):
    return [{"kind": kind, "value": value} for value, kind in enumerate(kinds, start=1)]


def results():
    (path,) = sweep.ROOT.glob("toy/*/results.json")
    return json.loads(path.read_text())["rows"]


def calls():
    return Path("calls.txt").read_text().split("\n")[:-1]


@pytest.fixture
def limited_memory():
    """2 GiB of address space more than this process has, for it and those it starts."""
    if sys.platform != "linux":
        pytest.skip("the address space is limited on Linux only")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + 2 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_what_goes_wrong_is_a_row_and_the_sweep_goes_on(limited_memory, capsys):
    kinds = ("error", "abort", "memory", "kill", "skip", "fine")
    assert run_sweep(BENCH, configurations(*kinds), ["bench", "toy"]) == 1
    rows = results()
    assert [(row["kind"], row["status"]) for row in rows] == [
        ("error", "error"),
        ("abort", "crashed"),
        ("memory", "out of memory"),
        ("kill", "out of memory"),  # that is how Linux says it
        ("skip", "skipped"),
        ("fine", "ok"),
    ]
    assert [row["step_ms"] for row in rows] == [None] * 5 + [12.0]
    assert rows[0]["note"] == "ValueError: that will not do"
    assert "-6" in rows[1]["note"]
    assert rows[4]["note"] == "this device has no such thing"
    shown = capsys.readouterr().out
    assert all(re.search(rf"^{kind} ", shown, re.M) for kind in kinds)
    assert "a library that talks" not in shown


def test_want_of_memory_is_no_failure(limited_memory):
    assert run_sweep(BENCH, configurations("memory", "skip", "fine"), ["bench", "toy"]) == 0


def test_a_row_that_hangs_is_timed_out():
    found = sweep.isolated(BENCH.measure, {"kind": "hang", "value": 1}, timeout_s=0.5)
    assert found["status"] == "timed out"
    assert run_sweep(BENCH, configurations("hang", "fine"), [], timeout_s=0.5) == 1
    assert [row["status"] for row in results()] == ["timed out", "ok"]


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on():
    rows = configurations("fine", "error", "ctrl-c", "fine")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(BENCH, rows, [])
    assert [row["status"] for row in results()] == ["ok", "error"]
    (file,) = sweep.ROOT.glob("toy/*/rows.jsonl")
    kept = file.read_text()
    assert len(kept.splitlines()) == 2
    assert (file.parent / "results.md").exists()

    assert run_sweep(BENCH, rows, [], resume=True) == 1
    assert [row["status"] for row in results()] == ["ok", "error", "ok", "ok"]
    assert [row["step_ms"] for row in results()] == [2.0, None, 6.0, 8.0]
    assert file.read_text().startswith(kept)
    # what was measured is not measured again; what failed is
    assert sorted(calls()) == sorted(
        ["fine 1", "error 2", "ctrl-c 3", "error 2", "ctrl-c 3", "fine 4"]
    )


def test_an_interrupted_row_leaves_no_process_behind(monkeypatch):
    started = []
    popen = sweep.subprocess.Popen
    monkeypatch.setattr(
        sweep.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    with pytest.raises(KeyboardInterrupt):
        run_sweep(BENCH, configurations("ctrl-c"), [])
    assert started[0].returncode is not None
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)


def test_resume_of_nothing_takes_one_line():
    with pytest.raises(UserError, match="no sweep of these rows"):
        run_sweep(BENCH, configurations("fine"), [], resume=True)
    assert run_sweep(BENCH, configurations("fine"), []) == 0
    with pytest.raises(UserError, match="no sweep of these rows"):
        run_sweep(BENCH, configurations("fine", "other")[1:], [], resume=True)
    with pytest.raises(UserError, match="no configuration is left"):
        run_sweep(BENCH, [], [])
