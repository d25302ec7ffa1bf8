"""Rows of tables: typed columns, printed row by row, and written as Markdown, CSV and JSON.

A row is a dataclass, and the type of each field is a column: one of those below, or
`Annotated[float | None, Column(".2g")]`. Its title is the field's name in words.
"""

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Self, get_args

from gpt_lightning.files import Fields, write_atomic

RESULTS = "results.json"
Values = dict[str, object]  # field -> plain value
# part of a field's name -> part of its title
WORDS = {"_per_sec": "/s", "tflops": "TFLOP", "mfu": "MFU", "mib": "MiB", "gib": "GiB", "_": " "}

LAST = ("status", "note")


@dataclass(frozen=True)
class Column:
    """Column of a table.

    Attributes:
        form: Format of its values, such as .4f; empty for text. None is an empty cell.
        title: Title; empty for the field's name in words.
        console: True if the console shows the column.
        width: Least width on the console in characters.
    """

    form: str = ""
    title: str = ""
    console: bool = True
    width: int = 7


Number = float | None
Text = Annotated[str | None, Column()]
Flag = Annotated[bool | None, Column()]
Hidden = Annotated[str | None, Column(console=False)]
Count = Annotated[int | None, Column("d")]
Grouped = Annotated[int | None, Column(",d")]
Whole = Annotated[Number, Column(",.0f")]
Tenths = Annotated[Number, Column(",.1f")]
Hundredths = Annotated[Number, Column(",.2f")]
HiddenHundredths = Annotated[Number, Column(",.2f", console=False)]
Thousandths = Annotated[Number, Column(",.3f")]
HiddenThousandths = Annotated[Number, Column(",.3f", console=False)]
TenThousandths = Annotated[Number, Column(",.4f")]
Loss = Annotated[Number, Column(".5f")]
Share = Annotated[Number, Column(".1%")]


@dataclass
class Row:
    """Row of a table; its fields are the columns."""

    @classmethod
    def of(cls, values: Mapping[str, object]) -> Self:
        """Make a row of the values that are its fields; the other fields are None."""
        return cls(**{field.name: values.get(field.name) for field in fields(cls)})

    @classmethod
    def columns(cls) -> dict[str, Column]:
        """Return the columns by their fields."""
        found = {}
        for field in fields(cls):
            column: Column = get_args(field.type)[-1]
            title = column.title or field.name
            for part, written in WORDS.items():
                title = title.replace(part, written)
            found[field.name] = replace(column, title=title)
        return dict(sorted(found.items(), key=lambda item: item[0] in LAST))

    def cells(self, columns: Mapping[str, Column]) -> list[str]:
        """Return the formatted values of columns."""
        values = ((getattr(self, name), column.form) for name, column in columns.items())
        return ["" if value is None else format(value, form) for value, form in values]


@dataclass
class Measured(Row):
    """Row of a sweep; the last columns are its outcome."""

    status: Text
    note: Hidden


Tables = Mapping[str, Sequence[Row]]  # name -> rows


class Console:
    """Aligned lines of a table whose rows are printed one at a time; `header` has the titles.

    Args:
        row_type: Class of the rows.
        rows: Rows that are known by now; the columns are wide enough for them.
    """

    def __init__(self, row_type: type[Row], rows: Iterable[Row] = ()):
        self.columns = {name: c for name, c in row_type.columns().items() if c.console}
        self.titles = [column.title for column in self.columns.values()]
        lines = [self.titles, *(row.cells(self.columns) for row in rows)]
        self.paddings = [
            # numbers to the right
            f"{'>' if column.form else '<'}{max(column.width, *map(len, texts))}"
            for column, *texts in zip(self.columns.values(), *lines, strict=True)
        ]
        self.header = self._join(self.titles)

    def line(self, row: Row) -> str:
        """Return the line of a row."""
        return self._join(row.cells(self.columns))

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
            least = -math.inf
            if name.endswith(("_mib", "_gib", "_std", "_std_ms")):
                least = 0.0
            elif name.endswith(("_ms", "_s", "_per_sec", "mfu")):
                least = math.ulp(0.0)
            most = 1.0 if name.endswith("mfu") else math.inf
            if not (math.isfinite(value) and least <= value <= most):
                wrong.append(f"{name} is {value:.6g}")
    return "; ".join(wrong)


def markdown(rows: Sequence[Row], names: Sequence[str] = ()) -> str:
    """Return a Markdown table with numbers aligned to the right; empty if there are no rows.

    Args:
        rows: Rows of one type.
        names: Fields of the columns to show; empty: all.
    """
    if not rows:
        return ""
    columns = {name: c for name, c in rows[0].columns().items() if not names or name in names}
    titles = [column.title for column in columns.values()]
    rule = ["---:" if column.form else "---" for column in columns.values()]
    lines = [titles, rule, *(row.cells(columns) for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def csv_text(rows: Sequence[Row]) -> str:
    """Return rows as CSV: names of the fields, and values in full precision."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].columns(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(vars, rows))
    return text.getvalue()


def short_names(runs: Sequence[str]) -> list[str]:
    """Return names of runs for a legend: NAME of FOLDER/NAME/version_N, or more of it."""
    for kept in (r"\1", r"\1/\2"):
        names = [re.sub(r".*?([^/]+)/(version_\d+)$", kept, run) for run in runs]
        if len(set(names)) == len(runs):
            return names
    return list(runs)


def read_report(folder: Path) -> Fields:
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
    parts.append("".join(f"- {name}: {fact}\n" for name, fact in machine.items()))
    parts += [f"![{Path(name).stem}]({name})\n" for name in pictures]
    data: Values = {"title": title, "machine": machine, "notes": notes, "pictures": pictures}
    for name, rows in tables.items():
        data[name] = [vars(row) for row in rows]
        if rows:
            parts.append(f"## {name.capitalize()}\n\n{markdown(rows)}")
            write_atomic(folder / f"{name}.csv", csv_text(rows).encode())
    write_atomic(folder / "results.md", "\n".join(parts).encode())
    write_atomic(folder / RESULTS, (json.dumps(data, indent=2) + "\n").encode())
