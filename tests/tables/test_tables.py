"""Tables as text."""

import csv
import io
import json
from dataclasses import dataclass, make_dataclass
from typing import Annotated

from gpt_lightning.tables import rows
from gpt_lightning.tables.rows import Column, Console, Hidden, Row, csv_text, markdown, write_report


@dataclass
class ToyRow(Row):
    name: Annotated[str, Column(title="its name", width=6)]
    step_ms: Annotated[float | None, Column(",.1f", width=9)]
    note: Hidden


ROWS = [ToyRow("a", 1234.56, ""), ToyRow.of({"name": "b", "note": "none", "other": 1})]


def test_a_title_has_the_units_that_people_write():
    names = {"forward_tflops_per_sec": "forward TFLOP/s", "peak_gib": "peak GiB", "mfu": "MFU"}
    fields = [(name, rows.Whole) for name in names]
    columns = make_dataclass("Titles", fields, bases=(Row,)).columns()
    assert [column.title for column in columns.values()] == list(names.values())


def test_console_lines_have_one_width_a_column():
    console = Console(ToyRow)
    assert console.header == "its name    step ms"
    assert console.line(ROWS[0]) == "a           1,234.6"
    assert console.line(ROWS[1]) == "b"


def test_markdown_is_for_people():
    assert markdown(ROWS).splitlines() == [
        "| its name | step ms | note |",
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
        "# A title\n\nA note.\n\n- date: today\n\n![p](p.png)\n\n## Rows\n\n| its name"
    )
    data = json.loads((tmp_path / "new" / "results.json").read_text())
    assert data["rows"][0] == {"name": "a", "step_ms": 1234.56, "note": ""}
    assert (tmp_path / "new" / "rows.csv").read_text() == csv_text(ROWS)
