"""Rows of tables: typed columns, on the console row by row, and as Markdown, CSV and JSON.

A row is a dataclass whose fields are made by `column`: the name of a field carries its unit, the
title and the format of its column are for people. `row_type` makes such a class from names alone.
"""

import csv
import dataclasses
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpt_lightning.files import write_atomic, yaml_beside

RESULTS = "results.json"
Values = dict[str, Any]  # field -> plain value
Row = Any  # an instance of a dataclass whose fields are made by `column`
Tables = Mapping[str, Sequence[Row]]  # name -> rows
UNITS = yaml_beside(__file__, "units.yaml")


class Verdict(StrEnum):
    """Result of a comparison, or the reason why there is none."""

    OK = "ok"
    DRIFT = "drift"
    FAILED = "FAIL"
    ERROR = "error"
    SKIPPED = "skipped"


def column(title: str, spec: str = "", width: int = 0, console: bool = True) -> Any:
    """Return a dataclass field that is a column of a table.

    Args:
        title: Title of the column.
        spec: Format of its values, such as .4f; None is an empty cell.
        width: Width on the console in characters, at least that of the title.
        console: True if the console shows the column.
    """
    metadata = {"title": title, "spec": spec, "width": width, "console": console}
    return dataclasses.field(default=None, metadata=metadata)


def row_type(names: str) -> type[Row]:
    """Make a dataclass of rows from the names of its columns.

    Args:
        names: Names in their order, separated by spaces. NAME:FORMAT or NAME:FORMAT/WIDTH has a
            format and a width on the console of its own, else the unit at the end of the name
            decides. The console leaves out -NAME. Its title has words for underscores, and the
            units that people write.
    """
    fields = []
    for word in names.split():
        name, colon, form = word.removeprefix("-").partition(":")
        spec, _, width = (form if colon else by_unit("formats", name, "")).partition("/")
        parts = name.replace("_", " ").replace(" per sec", "/s").split(" ")
        title = " ".join(UNITS["words"].get(part, part) for part in parts)
        fields.append((name, Any, column(title, spec, int(width or 7), word[0] != "-")))
    return dataclasses.make_dataclass("Row", fields, frozen=True)


def types_of(module: str, name: str) -> dict[str, type[Row]]:
    """Return the tables of a name in columns.yaml beside a module, name -> class of its rows."""
    tables = yaml_beside(module, "columns.yaml")[name]
    return {table: row_type(columns) for table, columns in tables.items()}


def make_row(row_type: type[Row], values: Mapping[str, Any]) -> Row:
    """Make a row of the values that are its fields; other fields keep their defaults."""
    names = {field.name for field in dataclasses.fields(row_type)}
    return row_type(**{name: value for name, value in values.items() if name in names})


def titles(fields: Iterable[dataclasses.Field[Any]]) -> list[str]:
    """Return the titles of columns."""
    return [field.metadata["title"] for field in fields]


def cells(row: Row, fields: Iterable[dataclasses.Field[Any]]) -> list[str]:
    """Return the formatted values of a row."""
    values = ((getattr(row, field.name), field.metadata["spec"]) for field in fields)
    return ["" if value is None else format(value, spec) for value, spec in values]


class Console:
    """Aligned lines of a table whose rows are printed one at a time.

    Args:
        row_type: Dataclass of the rows.
        without: Names of the columns to leave out.
        rows: Rows that are known by now; the columns are wide enough for them.
    """

    def __init__(self, row_type: type[Row], without: Sequence[str] = (), rows: Sequence[Row] = ()):
        shown = (field for field in dataclasses.fields(row_type) if field.metadata["console"])
        self.fields = [field for field in shown if field.name not in without]
        lines = [titles(self.fields), *(cells(row, self.fields) for row in rows)]
        self.paddings = [
            f"{'>' if field.metadata['spec'] else '<'}"  # numbers to the right
            f"{max(field.metadata['width'], *map(len, texts))}"
            for field, *texts in zip(self.fields, *lines, strict=True)
        ]

    def header(self) -> str:
        """Return the line of titles."""
        return self._join(titles(self.fields))

    def line(self, row: Row) -> str:
        """Return the line of a row."""
        return self._join(cells(row, self.fields))

    def _join(self, texts: list[str]) -> str:
        return "  ".join(map(format, texts, self.paddings)).rstrip()


def implausible(found: Values) -> str:
    """Describe the impossible numbers of a row, by the units in their names; empty if none is.

    A time of 0 is impossible: clocks are finer than anything timed here. An MFU above 1 has a wrong
    peak or a wrong time.
    """
    wrong = []
    for name, value in found.items():
        if isinstance(value, float):
            least, most = by_unit("bounds", name, (-math.inf, math.inf))
            if not (math.isfinite(value) and least <= value <= most):
                wrong.append(f"{name} is {value:.6g}")
    return "; ".join(wrong)


def by_unit(table: str, name: str, default: Any) -> Any:
    """Return the entry of a table of units.yaml for the end of a column's name."""
    return next((entry for end, entry in UNITS[table].items() if name.endswith(end)), default)


def markdown(rows: Sequence[Row], names: Sequence[str] = ()) -> str:
    """Return a Markdown table with numbers aligned to the right; empty if there are no rows.

    Args:
        rows: Rows of one type.
        names: Names of the columns to show; empty: all.
    """
    if not rows:
        return ""
    fields = [field for field in dataclasses.fields(rows[0]) if not names or field.name in names]
    rule = ["---:" if field.metadata["spec"] else "---" for field in fields]
    lines = [titles(fields), rule, *(cells(row, fields) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def csv_text(rows: Sequence[Row]) -> str:
    """Return rows as CSV: names of the fields, and values in full precision."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([vars(row) for row in rows[:1]])
    writer.writerows(vars(row).values() for row in rows)
    return text.getvalue()


def short_names(runs: Sequence[str]) -> list[str]:
    """Return names of runs for a legend: NAME of FOLDER/NAME/version_N, or more of it."""
    for kept in (r"\1", r"\1/\2"):
        names = [re.sub(r".*?([^/]+)/(version_\d+)$", kept, run) for run in runs]
        if len(set(names)) == len(runs):
            return names
    return list(runs)


def read_report(folder: Path) -> Values:
    """Return the content of the `results.json` of a folder; empty if there is none."""
    path = folder / RESULTS
    return json.loads(path.read_bytes()) if path.exists() else {}


def write_report(
    folder: Path,
    title: str,
    machine: dict[str, str],
    tables: Tables,
    notes: Sequence[str] = (),
    pictures: Sequence[str] = (),
) -> None:
    """Write `results.md`, `results.json` and a `NAME.csv` for each table.

    Args:
        folder: Folder for the files; created if it does not exist.
        title: Heading of the page.
        machine: Facts about the machine that was measured, name -> fact.
        tables: Tables, name -> rows.
        notes: Sentences below the heading.
        pictures: Names of picture files in the folder.
    """
    parts = [f"# {title}\n", *(f"{note}\n" for note in notes)]
    parts += ["".join(f"- {name}: {fact}\n" for name, fact in machine.items())]
    parts += [f"![{Path(name).stem}]({name})\n" for name in pictures]
    shown = {name: markdown(rows) for name, rows in tables.items() if rows}
    parts += [f"## {name.capitalize()}\n\n{table}" for name, table in shown.items()]
    data: Values = {"title": title, "machine": machine, "notes": notes, "pictures": pictures}
    data |= {name: [vars(row) for row in rows] for name, rows in tables.items()}
    texts = {"results.md": "\n".join(parts), RESULTS: json.dumps(data, indent=2) + "\n"}
    texts |= {f"{name}.csv": csv_text(tables[name]) for name in shown}
    for name, text in texts.items():
        write_atomic(folder / name, text.encode())
