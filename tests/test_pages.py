"""benchmarks/pages.py: a page is of its rows, and a changed loss or time is seen."""

import copy
import json
import runpy
import subprocess
from pathlib import Path

import pytest

from gpt_lightning.tables.sweep import read_options

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "benchmarks" / "pages.py"))
MACHINE = {"device": "a CPU", "CPU": "a CPU of 2", "memory": "9 GiB", "software": "0.1.0 (abc)"}
MACHINE |= {"command": "gpt-lightning bench x", "date": "today"}


def measurement(load: float = 0.1, **changes) -> dict:
    row = {"device": "cpu", "status": "ok", "note": "", "loss": 2.0, "peak_mib": 100.0}
    row |= {"total_ms": 10.0, "graphs": 2, "calls": 7} | changes
    table = {"machine": MACHINE, "configurations": [{"device": "cpu"}], "rows": [row]}
    return {"load": load, "tables": [table]}


def judged(old, new) -> list[str]:
    return list(SCRIPT["judged"](SCRIPT["Page"]("a page", (), "total_ms"), old, new))


@pytest.mark.parametrize("name", SCRIPT["PAGES"])
def test_the_commands_of_a_page_can_be_typed(name):
    for words in SCRIPT["PAGES"][name].commands:
        bench, *arguments = words.split()
        assert bench == name
        _, rows = read_options(SCRIPT["find_bench"](name), arguments)
        assert rows


def test_a_script_of_this_folder_is_called_as_a_module():
    assert SCRIPT["commands_of"]("data") == ["python -m benchmarks.data"]
    assert SCRIPT["commands_of"]("matmul")[0].startswith("gpt-lightning bench matmul --device")


def test_the_same_measurement_holds(capsys):
    assert judged(measurement(), measurement(total_ms=12.0, calls=9, note="x")) == []
    out = capsys.readouterr().out
    assert "total_ms: 1.20 times the last measurement (1.20 to 1.20, 1 rows)\n" in out


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"loss": 2.002}, ["device cpu: loss was 2.0, is 2.002"]),
        ({"graphs": 1}, ["device cpu: graphs was 2, is 1"]),
        ({"total_ms": 7.0}, ["total_ms is 0.70 times the last measurement"]),
        ({"loss": 2.0009, "peak_mib": 101.9}, []),
    ],
)
def test_a_change_is_a_failure(changes, lines):
    assert judged(measurement(), measurement(**changes)) == lines


def test_times_of_another_or_a_busy_machine_are_ratios_alone(capsys):
    other = measurement(total_ms=90.0, loss=3.0)
    other["tables"][0]["machine"] = MACHINE | {"device": "another"}
    busy = measurement(load=0.6, total_ms=90.0, loss=3.0)
    for new in (other, busy):
        assert judged(measurement(), new) == ["device cpu: loss was 2.0, is 3.0"]
        assert "9.00 times" in capsys.readouterr().out
    assert judged(busy, measurement(loss=3.0)) == []


def test_a_failed_row_is_a_failure():
    for status, lines in (("crashed", ["a row is crashed: why"]), ("skipped", [])):
        new = measurement()
        new["tables"][0]["rows"][0] |= {"status": status, "note": "why"}
        assert judged(None, new) == lines


def test_a_page_has_its_command_commit_date_and_machine(tmp_path, monkeypatch):
    monkeypatch.setitem(SCRIPT["write"].__globals__, "HERE", tmp_path)
    monkeypatch.setitem(SCRIPT["write"].__globals__, "STORE", tmp_path / "rows")
    (tmp_path / "rows").mkdir()
    row = {"device": "cpu", "accumulator": "float32", "addend": "float16", "upcast": True}
    row |= {"sum": 10.0021, "published": 10.0021, "error": 2.1e-3, "status": "ok", "note": ""}
    table = {"machine": MACHINE, "rows": [row], "configurations": [{}], "pictures": []}
    measured = {"load": 3.0, "tables": [table | {"notes": ["A note. " * 20], "folder": "x"}]}
    SCRIPT["write"]("accumulation", SCRIPT["PAGES"]["accumulation"], copy.deepcopy(measured))
    text = (tmp_path / "accumulation.md").read_text()
    head, _, rest = text.partition("|")
    assert "\ngpt-lightning bench accumulation --device cpu\n" in head
    assert "today. a CPU; a CPU of 2; 9 GiB; 0.1.0 (abc). Load average before: 3.0." in head
    assert "The machine was busy" in " ".join(head.split())
    assert "| cpu | float32 | float16 | True | 10.0021 |" in rest
    assert all(len(line) <= 100 for line in text.splitlines() if line[:1] not in "|!")
    stored = json.loads((tmp_path / "rows" / "accumulation.json").read_text())
    assert stored == {
        "load": 3.0,
        "tables": [{"machine": MACHINE, "configurations": [{}], "rows": [row]}],
    }
    measured["load"] = 0.2
    SCRIPT["write"]("accumulation", SCRIPT["PAGES"]["accumulation"], measured)
    assert "busy" not in (tmp_path / "accumulation.md").read_text()


def test_the_section_of_the_baby_gpt_has_each_seed_and_their_spread():
    script = runpy.run_path(str(ROOT / "benchmarks" / "shakespeare_page.py"))
    row = {"step": 250, "theirs": 1.5, "verdict": None, "split": "train", "ours": 1.4}
    missed = row | {"step": 240, "split": "batch", "verdict": "FAIL"}
    runs = {
        seed: {
            "machine": MACHINE | {"command": f"--seed_everything {seed}"},
            "losses": [row, missed, row | {"split": "val", "ours": ours, "verdict": "ok"}],
        }
        for seed, ours in (("1337", 1.47), ("1338", 1.49))
    }
    text = " ".join(script["section"](runs).split())
    assert "of 2 seeds: **1.4800 (standard deviation 0.0141)**" in text
    assert "1.4673, 1.4745, 1.4697: 1.4705 (standard deviation 0.0037)" in text
    assert "to step 250 of 5,000; 1 of 2 losses within their tolerance, not batch 240." in text
    assert "| 250 | 1.5000 | 1.4000 | 1.4000 | 1.5000 | 1.4700 | 1.4900 |" in text


def test_a_section_of_a_page_is_replaced_and_the_rest_stays():
    script = runpy.run_path(str(ROOT / "benchmarks" / "shakespeare_page.py"))
    insert, heading = script["insert"], script["HEADING"]
    first = insert("# Page\n\n## Other\n\ntext\n", f"{heading}\n\none\n")
    assert first == f"# Page\n\n## Other\n\ntext\n\n{heading}\n\none\n"
    page = first + "\n## Later\n\nend\n"
    assert insert(page, f"{heading}\n\ntwo\n") == page.replace("one", "two")


def test_the_index_names_what_has_changed_since_a_page_was_measured():
    ask = ["git", "rev-parse", "--is-shallow-repository"]
    if subprocess.run(ask, cwd=ROOT, capture_output=True, text=True).stdout != "false\n":
        pytest.skip("this checkout has no history")
    text = (ROOT / "benchmarks" / "README.md").read_text()
    found = SCRIPT["index"]()
    assert text == found, "run python benchmarks/pages.py --index, or measure the pages again"
