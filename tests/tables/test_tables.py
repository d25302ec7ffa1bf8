"""Tables as text."""

import csv
import io
import json
from dataclasses import dataclass

from gpt_lightning.tables.rows import Console, column, csv_text, markdown, write_report


@dataclass(frozen=True)
class Row:
    name: str = column("name", width=6)
    step_ms: float | None = column("step ms", ",.1f", 9)
    note: str = column("note")


ROWS = [Row("a", 1234.56, ""), Row("b", None, "none")]


def test_console_lines_have_one_width_a_column():
    console = Console(Row, without=("note",))
    assert console.header() == "name      step ms"
    assert console.line(ROWS[0]) == "a         1,234.6"
    assert console.line(ROWS[1]) == "b"


def test_markdown_is_for_people():
    assert markdown(ROWS).splitlines() == [
        "| name | step ms | note |",
        "| --- | ---: | --- |",
        "| a | 1,234.6 |  |",
        "| b |  | none |",
    ]
    assert markdown([]) == ""


def test_csv_has_full_precision():
    first, second = csv.DictReader(io.StringIO(csv_text(ROWS)))
    assert first == {"name": "a", "step_ms": "1234.56", "note": ""}
    assert second["step_ms"] == ""


def test_a_report_is_one_page_and_its_data(tmp_path):
    write_report(
        tmp_path / "new", "A title", {"date": "today"}, {"rows": ROWS}, ["A note."], ["p.png"]
    )
    page = (tmp_path / "new" / "results.md").read_text()
    assert page.startswith(
        "# A title\n\nA note.\n\n- date: today\n\n![p](p.png)\n\n## Rows\n\n| name"
    )
    data = json.loads((tmp_path / "new" / "results.json").read_text())
    assert data["rows"][0] == {"name": "a", "step_ms": 1234.56, "note": ""}
    assert (tmp_path / "new" / "rows.csv").read_text() == csv_text(ROWS)
