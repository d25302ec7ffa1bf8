"""`gpt-lightning bench compare` on reports that were never measured."""

import dataclasses
import json
from dataclasses import dataclass

import pytest

from gpt_lightning.bench.core import results as folders
from gpt_lightning.cli import main
from gpt_lightning.reports.tables import column, write_report


@dataclass(frozen=True)
class ToyRow:
    device: str = column("device")
    compile: bool = column("compile")
    batch: int = column("batch", "d")
    step_ms: float | None = column("step ms", ".1f")
    graphs: int | None = column("graphs", "d")
    status: str = column("status", default="ok")
    note: str = column("note", default="")


KEYS = ("device", "compile", "batch")
ROWS = [ToyRow("cpu", c, b, 10.0 * b, int(c)) for c in (False, True) for b in (1, 2)]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def report(folder, rows, title="A toy", machine="this one", sweep_file=True, **tables):
    write_report(folder, title, {"device": machine, "CPU": "one"}, {"rows": rows, **tables})
    if sweep_file:
        lines = [
            {"configuration": {k: getattr(row, k) for k in KEYS} | {"steps": 5}, "measured": {}}
            for row in rows
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder)


def compared():
    (path,) = folders.ROOT.glob("compare/*/results.json")
    return json.loads(path.read_text())["rows"]


def slower(row, factor):
    return dataclasses.replace(row, step_ms=row.step_ms * factor)


def test_a_report_equals_itself(tmp_path, capsys):
    a = report(tmp_path / "a", ROWS)
    assert main(["bench", "compare", a, a]) == 0
    rows = compared()
    # four of step_ms; graphs are 0 in two of them, which has no ratio
    assert [row["quantity"] for row in rows] == ["step_ms", "graphs"] * 4
    assert {row["ratio"] for row in rows} == {1.0, None}
    assert rows[0]["configuration"] == "compile False, batch 1"
    assert "compile True, batch 2" in capsys.readouterr().out


def test_rows_are_matched_by_configuration_not_by_place(tmp_path):
    a = report(tmp_path / "a", ROWS)
    b = report(tmp_path / "b", [slower(row, 2.0) for row in reversed(ROWS)])
    assert main(["bench", "compare", a, b, "--quantities", "step_ms"]) == 0
    rows = compared()
    assert [row["ratio"] for row in rows] == [2.0] * 4
    assert [row["a"] for row in rows] == [10.0, 20.0, 10.0, 20.0]


def test_the_other_way_round_is_the_inverse(tmp_path):
    a = report(tmp_path / "a", ROWS)
    b = report(tmp_path / "b", [slower(row, 1.0 + row.batch) for row in ROWS])
    ratios = []
    for pair in ([a, b], [b, a]):
        assert main(["bench", "compare", *pair, "--quantities", "step_ms"]) == 0
        ratios.append([row["ratio"] for row in compared()])
        for path in folders.ROOT.glob("compare/*/results.json"):
            path.unlink()
    assert [x * y for x, y in zip(*ratios, strict=True)] == pytest.approx([1.0] * 4)


def test_what_one_alone_has_or_could_not_do_is_told(tmp_path):
    failed = dataclasses.replace(ROWS[1], step_ms=None, graphs=None, status="out of memory")
    a = report(tmp_path / "a", ROWS[:2])
    b = report(tmp_path / "b", [ROWS[0], failed, ROWS[3]])
    assert main(["bench", "compare", a, b]) == 0
    told = {(r["configuration"], r["quantity"], r["note"]) for r in compared() if r["note"]}
    assert told == {
        ("compile False, batch 2", "status", "A: ok, B: out of memory"),
        ("compile True, batch 2", None, "only in B"),
    }


def test_two_machines_with_the_device_ignored(tmp_path, capsys):
    a = report(tmp_path / "a", ROWS, machine="a laptop")
    others = [dataclasses.replace(slower(row, 0.1), device="cuda") for row in ROWS]
    b = report(tmp_path / "b", others, machine="a workstation")
    assert main(["bench", "compare", a, b]) == 2
    assert "no configuration in common; --ignore FIELD" in capsys.readouterr().err
    assert main(["bench", "compare", a, b, "--ignore", "device"]) == 0
    ratios = [row["ratio"] for row in compared() if row["quantity"] == "step_ms"]
    assert ratios == pytest.approx([0.1] * 4)
    page = next(folders.ROOT.glob("compare/*/results.md")).read_text()
    assert "- A device: a laptop\n- B device: a workstation\n- CPU: one" in page


@dataclass(frozen=True)
class KernelRow:
    batch: int = column("batch", "d")
    kernel: str = column("kernel")
    calls: int = column("calls", "d")
    step_ms: float | None = column("step ms", ".1f")


def test_further_tables_are_compared_too(tmp_path):
    kernels = [KernelRow(batch, name, 7, 3.0) for batch in (1, 2) for name in ("mm", "exp")]
    a = report(tmp_path / "a", ROWS, kernels=kernels)
    b = report(tmp_path / "b", ROWS, kernels=[slower(row, 3.0) for row in reversed(kernels)])
    assert main(["bench", "compare", a, b, "--quantities", "step_ms"]) == 0
    found = {r["configuration"]: r["ratio"] for r in compared() if "kernel" in r["configuration"]}
    names = [f"kernels, batch {batch}, kernel {name}" for batch in (1, 2) for name in ("mm", "exp")]
    assert found == dict.fromkeys(names, 3.0)


def test_configured_fields_that_no_table_shows_may_differ(tmp_path):
    a, b = (report(tmp_path / name, ROWS) for name in "ab")
    lines = (tmp_path / "b" / "rows.jsonl").read_text()
    (tmp_path / "b" / "rows.jsonl").write_text(lines.replace('"steps": 5', '"steps": 9') + '{"torn')
    assert main(["bench", "compare", a, b]) == 0
    assert {row["ratio"] for row in compared()} == {1.0, None}


def test_mistakes_take_one_line(tmp_path, capsys):
    a = report(tmp_path / "a", ROWS)
    other = report(tmp_path / "other", ROWS, title="Another benchmark")
    alone = report(tmp_path / "alone", ROWS, sweep_file=False)
    (tmp_path / "broken.json").write_text("[1, 2")
    (tmp_path / "list.json").write_text("[1, 2]")
    cases = {
        (a, other): "give two of one benchmark",
        (a, "nowhere"): "nowhere: No such file",
        (a, alone): "rows.jsonl: No such file or directory; give a folder of `bench`",
        (a, "broken.json"): "is no report of `bench`",
        (a, "list.json"): "is no report of `bench`",
        (a, a, "--ignore", "devise"): "--ignore is 'devise': 'devise' is none of device, compile",
        (
            a,
            a,
            "--quantities",
            "step_s",
        ): "--quantities is 'step_s': 'step_s' is none of step_ms, graphs",
    }
    for args, text in cases.items():
        assert main(["bench", "compare", *args]) == 2, args
        errors = capsys.readouterr().err
        assert text in errors
        assert errors.count("\n") == 1
    assert not folders.ROOT.exists()
