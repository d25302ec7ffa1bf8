"""Sweeps, with rows that go wrong in every way a row can."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpt_lightning.errors import UserError
from gpt_lightning.tables import ledger as folders
from gpt_lightning.tables import sweep, worker
from gpt_lightning.tables.rows import Count, Measured, Tenths, Text, implausible
from gpt_lightning.tables.sweep import Bench, Sweep

TOY = """'''A toy.'''
import os, signal, time
from gpt_lightning.tables.worker import SkippedError

def measure(row):
    kind, value = row.kind, row.value
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
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
        bytearray(2**40)
    if kind == "hang":
        time.sleep(60)
    if kind == "child":  # as a compiler or a loader: it has our pipes
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        time.sleep(60)
    if kind == "allocator":  # of C++, without a Python exception
        os.write(2, b"terminate called\\n  what():  std::bad_alloc\\n")
        os.abort()
    if kind == "negative":
        return {"step_ms": -2.0}
    if kind == "nan":
        return {"step_ms": float("nan")}
    if kind == "ctrl-c" and not os.path.exists("interrupted"):
        open("interrupted", "w").close()
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)
    print("a library that talks on standard output")
    return {"step_ms": 2.0 * value}
"""


@dataclass
class ToyRow(Measured):
    kind: Text
    value: Count
    step_ms: Tenths


BENCH = Bench("toy:measure", tables={"rows": ToyRow})


@pytest.fixture(autouse=True)
def toy(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(TOY)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # path of the rows
    monkeypatch.syspath_prepend(tmp_path)  # path of their notes
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sweep, "machine_record", lambda argv, device="a toy": {"device": str(device)}
    )


def run_sweep(bench, rows, argv=(), resume=False):
    return Sweep(bench, rows, argv, SimpleNamespace(resume=resume, timeout_s=600.0)).run()


def configurations(*kinds):
    return [{"kind": kind, "value": value} for value, kind in enumerate(kinds, start=1)]


def results():
    (path,) = sweep.ROOT.glob("toy/*/results.json")
    return json.loads(path.read_text())["rows"]


def calls():
    return Path("calls.txt").read_text().split("\n")[:-1]


def test_what_goes_wrong_is_a_row_and_the_sweep_goes_on(limited_memory, capsys):
    expected = {
        "error": ("error", "ValueError: that will not do"),
        "abort": ("crashed", "exit code -6 (SIGABRT): "),
        "memory": ("out of memory", ""),
        "kill": ("out of memory", "killed, as Linux does when memory runs out"),
        "allocator": ("out of memory", ""),
        "skip": ("skipped", "this device has no such thing"),
        "negative": ("implausible", "step_ms is -2"),
        "nan": ("implausible", "step_ms is nan"),
        "fine": ("ok", ""),
    }
    assert run_sweep(BENCH, configurations(*expected), ["bench", "toy"]) == 1
    rows = results()
    assert [row["kind"] for row in rows] == list(expected)
    for row, (status, note) in zip(rows, expected.values(), strict=True):
        assert row["status"] == status
        assert row["note"].startswith(note)
    assert [row["step_ms"] for row in rows] == [None] * 6 + [-2.0, None, 18.0]
    shown = capsys.readouterr().out
    assert all(re.search(rf"^{kind} ", shown, re.M) for kind in expected)
    assert "a library that talks" not in shown


def test_ctrl_c_keeps_what_was_measured_and_resume_goes_on(monkeypatch):
    started = []
    popen = worker.subprocess.Popen
    monkeypatch.setattr(
        worker.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    rows = configurations("fine", "error", "ctrl-c", "fine")
    with pytest.raises(KeyboardInterrupt):
        run_sweep(BENCH, rows, [])
    assert started[-1].returncode is not None
    assert not alive(started[-1].pid)  # no process is left behind
    assert [row["status"] for row in results()] == ["ok", "error"]
    (file,) = sweep.ROOT.glob("toy/*/rows.jsonl")
    kept = file.read_text()
    assert len(kept.strip().splitlines()) == 2
    assert (file.parent / "results.md").exists()

    assert run_sweep(BENCH, rows, [], resume=True) == 1
    assert [row["status"] for row in results()] == ["ok", "error", "ok", "ok"]
    assert [row["step_ms"] for row in results()] == [2.0, None, 6.0, 8.0]
    assert file.read_text().startswith(kept)
    # what was measured is not measured again; what failed is
    assert sorted(calls()) == sorted(
        ["fine 1", "error 2", "ctrl-c 3", "error 2", "ctrl-c 3", "fine 4"]
    )


@pytest.mark.parametrize("cut", [1, 30, -1, None])  # end of the line's part that is left
def test_a_torn_row_is_measured_again_and_spoils_no_other(cut):
    rows = configurations("fine", "fine", "fine")
    assert run_sweep(BENCH, rows[:2], []) == 0
    (file,) = sweep.ROOT.glob("toy/*/rows.jsonl")
    *first, second = file.read_text().splitlines(keepends=True)
    file.write_text("".join(first) + second[:cut])

    assert run_sweep(BENCH, rows, [], resume=True) == 0
    whole = cut is None
    assert calls() == ["fine 1", "fine 2", *([] if whole else ["fine 2"]), "fine 3"]
    assert [row["step_ms"] for row in results()] == [2.0, 4.0, 6.0]
    kept = [configuration for configuration, _ in folders.Ledger(file.parent).read()]
    assert kept == rows
    assert run_sweep(BENCH, rows, [], resume=True) == 0
    assert calls()[-1] == "fine 3"
    assert len(calls()) == (3 if whole else 4)  # everything was there


@pytest.mark.parametrize(
    ("name", "value", "wrong"),
    [
        ("total_ms", 0.0, True),
        ("total_std_ms", 0.0, False),
        ("held_residuals", -0.1, False),
        ("held_residuals", math.inf, True),
        ("tokens_per_sec", 0.0, True),
        ("mfu", 1.01, True),
        ("mfu", 1.0, False),
        ("held_mib", -1.0, True),
        ("held_mib", 0.0, False),
        ("error", -0.5, False),
        ("sum", math.nan, True),
    ],
)
def test_what_a_number_can_be_goes_by_its_unit(name, value, wrong):
    assert bool(implausible({name: value})) == wrong


@pytest.mark.slow
def test_a_row_that_hangs_takes_its_children_with_it():
    began = time.monotonic()
    found = worker.isolated(BENCH.measure, {"kind": "child", "value": 1}, timeout_s=1.0)
    assert found["status"] == "timed out"
    assert time.monotonic() - began < 20  # the child would hold the pipes for a minute


@pytest.mark.slow
def test_a_signal_to_terminate_ends_the_row_too(tmp_path):
    code = (
        "from tests_toy import BENCH, configurations, run_sweep\n"
        "run_sweep(BENCH, configurations('fine', 'hang'), [])"
    )
    (tmp_path / "tests_toy.py").write_text(Path(__file__).read_text())
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not (Path("calls.txt").exists() and calls()[-1:] == ["hang 2"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not alive(int(Path("pid").read_text()))
    finally:
        process.kill()
    assert [row["status"] for row in results()] == ["ok"]


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_head_of_a_report_is_of_the_devices_measured():
    rows = [{"device": "cpu"}, {"device": "cpu"}]
    facts = sweep.machine_of(rows)
    assert facts["device"] == "cpu"  # not the best device there is, as the fixture says it
    assert sweep.machine_of([{"device": "cpu"}, {"device": "cuda"}])["device"] == "cpu; cuda"
    assert sweep.machine_of([{"kind": "fine"}])["device"] == "a toy"


def test_a_sweep_that_goes_on_elsewhere_says_so(monkeypatch):
    def on(software):
        monkeypatch.setattr(
            sweep, "machine_of", lambda *args: {"date": "today", "software": software}
        )

    rows = configurations("fine", "fine", "fine", "fine")
    for count, software in ((1, "torch 1"), (2, "torch 1"), (3, "torch 2"), (4, "torch 2")):
        on(software)
        assert run_sweep(BENCH, rows[:count], [], resume=count > 1) == 0
        (path,) = sweep.ROOT.glob("toy/*/results.json")
        facts = json.loads(path.read_text())["machine"]
        told = {} if count < 3 else {"earlier": "rows of torch 1"}
        command = {"command": "python -m toy"}
        assert facts == {"date": "today", "software": software} | command | told


def test_resume_of_nothing_takes_one_line():
    with pytest.raises(UserError, match="no sweep of these rows"):
        run_sweep(BENCH, configurations("fine"), [], resume=True)
    assert run_sweep(BENCH, configurations("fine"), []) == 0
    with pytest.raises(UserError, match="no sweep of these rows"):
        run_sweep(BENCH, configurations("fine", "other")[1:], [], resume=True)
    with pytest.raises(UserError, match="no configuration is left"):
        run_sweep(BENCH, [], [])
