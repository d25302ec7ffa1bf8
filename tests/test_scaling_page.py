"""benchmarks/scaling.py: the constants of a bench and of a run, and the tables of its page."""

import json
import runpy
from pathlib import Path

import pytest

from gpt_lightning.bench.core.memory_meter import MIB
from gpt_lightning.bench.core.scaling import Link
from gpt_lightning.errors import UserError

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "scaling.py"))
LINK = Link(1e-3, 1e9)


@pytest.fixture
def run(tmp_path):
    """A run of 40 steps with two sessions; the second has taken back a checkpoint at step 30."""
    waits = [(10, 50.0), (20, 2.0), (40, 5.0)]
    metrics = [{"step": step, "perf/data_wait_ms": wait} for step, wait in waits]
    metrics.insert(1, {"step": 10, "val/loss": 1.0})
    saved = [(10, 0.3), (20, 0.5), (20, 0.1), (30, 99.0)]
    phases = [
        {"event": "phase", "step": step, "name": "checkpoint", "seconds": seconds}
        for step, seconds in saved
    ]
    events = [
        {"event": "begin", "step": 0},
        {"event": "phase", "step": 10, "name": "validation", "seconds": 7.0},
        *phases,
        {"event": "begin", "step": 20},
        phases[0] | {"step": 40, "seconds": 50.0},
        {"event": "end", "step": 40},
    ]
    for name, rows in (("metrics.jsonl", metrics), ("timeline.jsonl", events)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def bench() -> dict:
    """Rows of a bench whose model hides half of its communication."""
    shape = {"device": "cpu", "dtype": "fp32", "size": "small", "batch": 1, "context": 8}
    shape |= {"status": "ok", "note": "", "gradient_mib": 10.0}
    half = LINK.all_reduce_s(10 * MIB, 2) * 1e3 / 2
    rows = [
        shape | {"work": "ddp", "processes": 1, "time_ms": 60.0, "alone_ms": 60.0},
        shape | {"work": "ddp", "processes": 2, "time_ms": 100 + half, "alone_ms": 100.0},
    ]
    for mib in (1, 100):
        time = {"time_ms": LINK.all_reduce_s(mib * MIB, 2) * 1e3}
        rows.append(shape | {"work": "all-reduce", "processes": 2, "mib": mib} | time)
    return {"load": 0.1, "tables": [{"machine": {"device": "CPU", "CPU": "a CPU"}, "rows": rows}]}


def test_the_waits_of_a_run_are_means_without_its_first_log_and_last_checkpoint(run):
    found = {name: value for name, (value, _) in SCRIPT["run_constants"](run).items()}
    assert found == pytest.approx({"data": 4e-3, "checkpoint": 0.45, "interval": 10})


def test_the_table_has_each_constant_with_its_source(run):
    text = SCRIPT["measured"](bench(), run)
    cells = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [line[1] for line in cells] == [
        *("100.0 ms", "1,000 µs", "1.00 GB/s", "0.50"),
        *("4.000 ms", "450 ms"),
    ]
    assert "busy" not in text
    assert "busy" in SCRIPT["measured"](bench() | {"load": 2.0}, run)


def test_a_run_without_checkpoints_or_a_bench_without_rows_is_an_error(run):
    (run / "timeline.jsonl").unlink()
    with pytest.raises(UserError, match="has 3 logs of perf/data_wait_ms and 0 checkpoints"):
        SCRIPT["run_constants"](run)
    lacking = bench()
    del lacking["tables"][0]["rows"][0]
    with pytest.raises(UserError, match="lacks rows: python"):
        SCRIPT["measured"](lacking, run)


@pytest.mark.slow
def test_only_the_tables_of_the_page_change(run, tmp_path, monkeypatch, capsys):
    names = SCRIPT["main"].__globals__
    page, rows = tmp_path / "page.md", tmp_path / "rows.json"
    original = names["PAGE"].read_text()
    page.write_text(original)
    monkeypatch.setitem(names, "PAGE", page)
    monkeypatch.setitem(names, "ROWS", rows)
    monkeypatch.setattr("sys.argv", ["scaling.py"])
    assert SCRIPT["main"]() == 0
    assert page.read_text() == original  # the page is of this script
    monkeypatch.setattr("sys.argv", ["scaling.py", "--run", str(run)])
    assert SCRIPT["main"]() == 2
    assert "rows.json is missing: python benchmarks/pages.py parallel" in capsys.readouterr().err
    rows.write_text(json.dumps(bench()))
    assert SCRIPT["main"]() == 0
    head, _, tail = original.partition("<!-- measured -->\n")
    assert page.read_text().startswith(head)
    assert "| checkpoint | 450 ms |" in page.read_text()
    assert page.read_text().endswith(tail[tail.index("\n<!-- end -->") :])
