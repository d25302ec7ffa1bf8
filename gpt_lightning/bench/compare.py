"""Ratios between two reports of one benchmark, row by row: compare A B.

The configuration of a row is what the benchmark's rows.jsonl stores as such, and in the further
tables of a report also every text, such as the name of a kernel. All other numbers were measured.
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_lightning.bench.core.options import listed, one_of
from gpt_lightning.bench.core.results import ROWS, make_folder, read_rows
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser
from gpt_lightning.reports.tables import RESULTS, Console, column, write_report

# keys of a report; published rows never differ
NO_TABLES = ("title", "machine", "notes", "pictures", "published")
OUTCOME = ("status", "note")
ALONE = "only in"
Row = dict[str, Any]  # field -> value
Identity = tuple[tuple[str, str], ...]  # (field, value) of the fields that configure a row


@dataclass(frozen=True)
class CompareRow:
    """One number of one configuration in both reports."""

    configuration: str = column("configuration")
    quantity: str = column("quantity", width=20)
    a: float | None = column("A", ",.3f", 15)
    b: float | None = column("B", ",.3f", 15)
    ratio: float | None = column("B/A", ",.3f", 8)
    note: str = column("note", default="")


@dataclass(frozen=True)
class Report:
    """Content of a results.json, and its configured fields.

    Attributes:
        path: The results.json.
        title: Title of the benchmark.
        machine: Facts about the machine, by name.
        rows: Rows with the name of their table, the tables in their order.
        keys: Fields that configure a row.
    """

    path: Path
    title: str
    machine: dict[str, str]
    rows: list[Row]
    keys: list[str]

    def numbers(self) -> list[str]:
        """Return the names of the measured numbers."""
        found = dict.fromkeys(name for row in self.rows for name in row if is_number(row[name]))
        return [name for name in found if name not in self.keys]

    def by_identity(self, keys: list[str]) -> dict[Identity, Row]:
        """Return the rows by table and configuration; equal ones are numbered in their order."""
        found: dict[Identity, Row] = {}
        seen: Counter[Identity] = Counter()
        for row in self.rows:
            identity = tuple((name, str(row[name])) for name in row if name in ("table", *keys))
            found[*identity, ("number", str(seen[identity]))] = row
            seen[identity] += 1
        return found


def make_parser() -> OneLineParser:
    """Return the parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench compare",
        description="Print two reports of one benchmark side by side: rows of the same "
        "configuration, and the ratios of their numbers.",
    )
    parser.add_argument("a", help=f"Folder of a report, or its {RESULTS}.")
    parser.add_argument("b", help="Another report of the same benchmark.")
    parser.add_argument(
        "--ignore", default="", help="Configured fields that may differ, such as device,batch."
    )
    parser.add_argument(
        "--quantities", default="", help="Numbers to compare, separated by commas; empty: all."
    )
    return parser


def run(argv: list[str]) -> int:
    """Run `bench compare A B`.

    Raises:
        UserError: A file is missing or no report, or the two reports are of different benchmarks
            or have no configuration in common.
    """
    args = make_parser().parse_args(argv[2:])
    a, b = (read_report(Path(path)) for path in (args.a, args.b))
    if a.title != b.title:
        raise UserError(
            f"{a.path} is of {a.title!r}, {b.path} of {b.title!r}: give two of one benchmark"
        )
    keys = [name for name in a.keys if name in b.keys]
    numbers = list(dict.fromkeys([*a.numbers(), *b.numbers()]))
    ignored = listed(args, "ignore", one_of(keys)) if args.ignore else []
    quantities = listed(args, "quantities", one_of(numbers)) if args.quantities else numbers
    rows = list(side_by_side(a, b, [key for key in keys if key not in ignored], quantities))
    if all(row.note.startswith(ALONE) for row in rows):
        raise UserError(
            f"{a.path} and {b.path} have no configuration in common; --ignore FIELD leaves a field "
            f"out: {', '.join(keys)}"
        )
    publish(a, b, rows, argv)
    return 0


def read_report(path: Path) -> Report:
    """Read a report, by its folder or file.

    Raises:
        UserError: A file is missing, or it is no report.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        tables = [table for table in data if table not in NO_TABLES]
        rows = [{"table": table, **row} for table in tables for row in data[table]]
        stored = {name for fields, _ in read_rows(file.with_name(ROWS)) for name in fields}
        texts = {name for row in rows for name in row if isinstance(row[name], str)}
        keys = [name for name in rows[0] if name in stored]
        keys += sorted(texts - {*rows[0], *OUTCOME})  # of further tables
        return Report(file, data["title"], data["machine"], rows, keys)
    except OSError as error:
        raise UserError(
            f"{error.filename}: {error.strerror}; give a folder of `bench`, which holds {RESULTS} "
            f"and {ROWS}"
        ) from error
    except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is no report of `bench` ({error!r})") from error


def is_number(value: Any) -> bool:
    """Return whether a value is a number, which a bool is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def side_by_side(
    a: Report, b: Report, keys: list[str], quantities: list[str]
) -> Iterator[CompareRow]:
    """Yield the compared numbers of all rows in A's order, then the rows that only B has."""
    in_a, in_b = a.by_identity(keys), b.by_identity(keys)
    everything = in_a | in_b
    values = Counter(name for name, _ in {field for fields in everything for field in fields})
    for identity in everything:
        (_, table), *fields, _ = identity
        words = [] if table == a.rows[0]["table"] else [table]
        words += [f"{name} {value}" for name, value in fields if values[name] > 1]
        label = ", ".join(words) or "all"
        x, y = in_a.get(identity), in_b.get(identity)
        if x is None or y is None:
            yield CompareRow(label, note=f"{ALONE} {'B' if x is None else 'A'}")
        else:
            yield from compared(label, x, y, quantities, a.keys)


def compared(
    label: str, x: Row, y: Row, quantities: list[str], keys: list[str]
) -> Iterator[CompareRow]:
    """Yield the numbers of two rows of one configuration, then the measured texts that differ."""
    for name in quantities:
        a, b = x.get(name), y.get(name)
        if a is not None or b is not None:
            yield CompareRow(label, name, a, b, b / a if a and b is not None else None)
    for name, a in x.items():
        b = y.get(name)
        if name not in (*keys, "note") and a != b and not (is_number(a) or is_number(b)):
            yield CompareRow(label, name, note=f"A: {a}, B: {b}")


def publish(a: Report, b: Report, rows: list[CompareRow], argv: list[str]) -> None:
    """Print the comparison and write it as a report."""
    machine = {"A": str(a.path), "B": str(b.path)}
    for name in a.machine | b.machine:
        facts = {f"{x} {name}": of.machine.get(name, "unknown") for x, of in (("A", a), ("B", b))}
        machine |= facts if len(set(facts.values())) > 1 else {name: facts[f"A {name}"]}
    width, console = max(map(len, machine)), Console(CompareRow, rows=rows)
    lines = [f"{name:<{width}} {fact}" for name, fact in machine.items()]
    print("\n".join([*lines, "", console.header(), *map(console.line, rows)]))
    folder = make_folder("compare")
    notes = (f"B/A of every number: {a.title}.", f"`gpt-lightning {' '.join(argv)}`")
    write_report(folder, f"Two reports: {a.title}", machine, {"rows": rows}, notes)
    print(f"\n{folder}: results.md, results.json, rows.csv")
