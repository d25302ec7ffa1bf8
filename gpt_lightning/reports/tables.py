"""Rows of results as text: on the console while they come, and as Markdown, CSV and JSON.

A row is a dataclass whose fields are made by `column`: the field's name carries the unit, the
column's title and format are for people.
"""

import csv
import dataclasses
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RESULTS = "results.json"
Row = Any  # an instance of a dataclass whose fields are made by `column`


def column(title: str, spec: str = "", width: int = 0, default: Any = None) -> Any:
    """A field of a row.

    Args:
        title: Of the column, for people.
        spec: Format of its values, such as .4f; a missing value is an empty cell.
        width: Characters on the console; 0: as wide as the title.
        default: Of the field.
    """
    metadata = {"title": title, "spec": spec, "width": max(width, len(title))}
    return dataclasses.field(default=default, metadata=metadata)


def titles(row_type: type[Row]) -> list[str]:
    """What stands above the columns."""
    return [field.metadata["title"] for field in dataclasses.fields(row_type)]


def cells(row: Row) -> list[str]:
    """A row's values for people."""
    return [
        _cell(getattr(row, field.name), field.metadata["spec"]) for field in dataclasses.fields(row)
    ]


def _cell(value: Any, spec: str) -> str:
    return "" if value is None else format(value, spec)


class Console:
    """Lines of one width a column, for rows that are printed as they come.

    Args:
        row_type: The dataclass.
        without: Names of columns that the console can do without.
    """

    def __init__(self, row_type: type[Row], without: Sequence[str] = ()) -> None:
        self.fields = [f for f in dataclasses.fields(row_type) if f.name not in without]

    def header(self) -> str:
        """The titles."""
        return self._join([field.metadata["title"] for field in self.fields])

    def line(self, row: Row) -> str:
        """A row."""
        return self._join([_cell(getattr(row, f.name), f.metadata["spec"]) for f in self.fields])

    def _join(self, texts: list[str]) -> str:
        padded = [
            text.rjust(field.metadata["width"])
            if field.metadata["spec"]
            else text.ljust(field.metadata["width"])
            for text, field in zip(texts, self.fields, strict=True)
        ]
        return "  ".join(padded).rstrip()


def markdown(rows: Sequence[Row]) -> str:
    """A table in Markdown; numbers to the right. Empty for no rows."""
    if not rows:
        return ""
    fields = dataclasses.fields(rows[0])
    rule = ["---:" if field.metadata["spec"] else "---" for field in fields]
    lines = [titles(type(rows[0])), rule, *(cells(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def csv_text(rows: Sequence[Row]) -> str:
    """Rows as CSV: field names, and values in full precision."""
    if not rows:
        return ""
    text = io.StringIO()
    names = [field.name for field in dataclasses.fields(rows[0])]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(dataclasses.asdict(row) for row in rows)
    return text.getvalue()


def write_report(
    folder: Path,
    title: str,
    machine: dict[str, str],
    tables: dict[str, Sequence[Row]],
    notes: Sequence[str] = (),
    pictures: Sequence[str] = (),
) -> None:
    """Writes `results.md`, `results.json` and a `NAME.csv` for each table.

    Args:
        folder: Where; made if need be.
        title: Heading of the page.
        machine: What the results were measured on, fact by fact.
        tables: Name -> rows.
        notes: Sentences below the heading.
        pictures: File names of pictures in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {title}\n", *(f"{note}\n" for note in notes)]
    parts += ["".join(f"- {name}: {fact}\n" for name, fact in machine.items())]
    parts += [f"![{Path(name).stem}]({name})\n" for name in pictures]
    parts += [
        f"## {name.capitalize()}\n\n{markdown(rows)}" for name, rows in tables.items() if rows
    ]
    replace_text(folder / "results.md", "\n".join(parts))
    data = {
        "title": title,
        "machine": machine,
        "notes": list(notes),
        **{name: [dataclasses.asdict(row) for row in rows] for name, rows in tables.items()},
    }
    replace_text(folder / RESULTS, json.dumps(data, indent=2) + "\n")
    for name, rows in tables.items():
        replace_text(folder / f"{name}.csv", csv_text(rows))


def replace_text(path: Path, text: str) -> None:
    """Writes a file in one step: whoever is interrupted leaves the old one or the new one."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
