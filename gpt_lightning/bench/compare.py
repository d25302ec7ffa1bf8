"""`gpt-lightning bench compare A B`: two reports of one benchmark side by side."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_lightning.bench.core.results import ROWS, make_folder, read_rows
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, nearest, underscored
from gpt_lightning.reports.tables import RESULTS, Console, column, write_report

# what is no measured table of a report; published rows are the same in both
NO_TABLES = ("title", "machine", "notes", "published")
OUTCOME = ("status", "note")
MAIN = "rows"  # the table that every sweep has
ALONE = "only in"
Values = dict[str, Any]  # a row by field


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
class Table:
    """One table of a report.

    Attributes:
        rows: By field.
        keys: Fields that configure a row.
    """

    rows: list[Values]
    keys: list[str]


@dataclass(frozen=True)
class Report:
    """What a results.json holds.

    Attributes:
        path: Of the file.
        title: Of the benchmark.
        machine: Fact by fact.
        tables: By name.
    """

    path: Path
    title: str
    machine: dict[str, str]
    tables: dict[str, Table]


def make_parser() -> OneLineParser:
    """The parser of the command's options."""
    parser = OneLineParser(
        prog="gpt-lightning bench compare",
        allow_abbrev=False,
        description="Two reports of one benchmark side by side: rows of the same configuration, "
        "and the ratios of their numbers.",
    )
    parser.add_argument("a", help=f"A report's folder, or its {RESULTS}.")
    parser.add_argument("b", help="Another one of the same benchmark.")
    parser.add_argument(
        "--ignore",
        default="",
        help="Fields of the configuration that may differ, with commas: device for two machines.",
    )
    parser.add_argument(
        "--quantities", default="", help="Numbers to compare, with commas; empty: all."
    )
    return parser


def run(argv: list[str]) -> int:
    """Runs `bench compare A B`.

    Raises:
        UserError: a file is not there or no report, or the two are of different benchmarks or have
            no configuration in common.
    """
    args = make_parser().parse_args(underscored(argv[2:]))
    a, b = (read_report(Path(path)) for path in (args.a, args.b))
    if a.title != b.title:
        raise UserError(
            f"{a.path} is of {a.title!r}, {b.path} of {b.title!r}: give two of one benchmark"
        )
    pairs = common_tables(a, b)
    check_known("--ignore", split(args.ignore), [key for _, x, _ in pairs for key in x.keys])
    numbers = [name for _, *both in pairs for table in both for name in measured_numbers(table)]
    check_known("--quantities", split(args.quantities), numbers)
    quantities = split(args.quantities) or list(dict.fromkeys(numbers))
    rows = [
        row
        for name, x, y in pairs
        for row in side_by_side(name, x, y, split(args.ignore), quantities)
    ]
    if all(row.note.startswith(ALONE) for row in rows):
        raise UserError(
            f"{a.path} and {b.path} have no configuration in common; --ignore FIELD leaves a field "
            f"out: {', '.join(pairs[0][1].keys)}"
        )
    publish(a, b, rows, argv)
    return 0


def check_known(option: str, names: list[str], known: list[str]) -> None:
    """Refuses names that are not known.

    Raises:
        UserError: with the nearest one.
    """
    for name in names:
        if name not in known:
            raise UserError(f"{option} {name}: no such field{nearest(name, known)}")


def split(text: str) -> list[str]:
    """The words of an option with commas; none of an empty one."""
    return [word.strip() for word in text.split(",")] if text else []


# ---- reading -------------------------------------------------------------------------------------


def read_report(path: Path) -> Report:
    """A report by its folder or file.

    Raises:
        UserError: there is none, or it is no report.
    """
    file = path / RESULTS if path.is_dir() else path
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        configured = configured_fields(file.with_name(ROWS))
        tables = {
            name: Table(rows, key_fields(rows, configured, complete=name == MAIN))
            for name, rows in data.items()
            if name not in NO_TABLES and rows
        }
        return Report(file, data["title"], data["machine"], tables)
    except OSError as error:
        raise UserError(f"{file}: {error.strerror}; give a folder of `bench`") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise UserError(f"{file} is no report of `bench` ({error!r})") from error


def configured_fields(sweep: Path) -> list[str]:
    """Fields of a sweep's configurations; none where its rows.jsonl is not there."""
    if not sweep.exists():
        return []
    return next((list(configuration) for configuration, _ in read_rows(sweep)), [])


def key_fields(rows: list[Values], configured: list[str], complete: bool) -> list[str]:
    """Fields that configure a row, in order.

    Args:
        rows: One at least.
        configured: Fields of the sweep's configurations, as far as they are known.
        complete: They are all there are. Rows of further tables have keys of their own; those, and
            all where nothing is known, are the fields before the first measured one, which is a
            fraction or missing in some row.
    """
    fields = [name for name in rows[0] if name not in OUTCOME]
    if configured and complete:
        return [name for name in fields if name in configured]
    measured = [
        any(row.get(name) is None or isinstance(row[name], float) for row in rows)
        for name in fields
    ]
    before = fields[: measured.index(True)] if True in measured else fields
    return [name for name in fields if name in before or name in configured]


# ---- comparing -----------------------------------------------------------------------------------


def common_tables(a: Report, b: Report) -> list[tuple[str, Table, Table]]:
    """Tables of both, with the keys that both have.

    Raises:
        UserError: there is none.
    """
    names = [name for name in a.tables if name in b.tables]
    if not names:
        raise UserError(f"{a.path} and {b.path} have no table in common that has rows")
    found = []
    for name in names:
        x, y = a.tables[name], b.tables[name]
        keys = [key for key in x.keys if key in y.keys]
        found.append((name, Table(x.rows, keys), Table(y.rows, keys)))
    return found


def is_number(value: Any) -> bool:
    """Whether there is a ratio to it."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def measured_numbers(table: Table) -> list[str]:
    """Names of the numbers that no configuration sets."""
    found = {name: None for row in table.rows for name, value in row.items() if is_number(value)}
    return [name for name in found if name not in table.keys]


def indexed(table: Table, keys: Sequence[str]) -> dict[tuple[str, ...], Values]:
    """Rows by their configuration; equal ones are numbered in order."""
    found: dict[tuple[str, ...], Values] = {}
    seen: Counter[tuple[str, ...]] = Counter()
    for row in table.rows:
        configuration = tuple(json.dumps(row.get(key)) for key in keys)
        found[(*configuration, str(seen[configuration]))] = row
        seen[configuration] += 1
    return found


def side_by_side(
    name: str, a: Table, b: Table, ignored: list[str], quantities: list[str]
) -> Iterator[CompareRow]:
    """Rows of a table of both, in A's order, then those that B alone has."""
    keys = [key for key in a.keys if key not in ignored]
    in_a, in_b = indexed(a, keys), indexed(b, keys)
    everything = in_a | in_b
    varied = [key for i, key in enumerate(keys) if len({known[i] for known in everything}) > 1]
    for known in everything:
        left, right = in_a.get(known), in_b.get(known)
        row = left or right or {}
        words = [] if name == MAIN else [name]
        words += [f"{key} {row[key]}" for key in varied]
        configuration = ", ".join(words) or "all"
        if left is None or right is None:
            yield CompareRow(configuration, note=f"{ALONE} {'B' if left is None else 'A'}")
            continue
        yield from numbers_of(configuration, left, right, quantities)
        yield from words_of(configuration, left, right, a.keys)


def numbers_of(
    configuration: str, left: Values, right: Values, quantities: list[str]
) -> Iterator[CompareRow]:
    """The numbers of two rows of one configuration."""
    for name in quantities:
        x, y = left.get(name), right.get(name)
        if x is not None or y is not None:
            ratio = y / x if x and y is not None else None
            yield CompareRow(configuration, name, x, y, ratio)


def words_of(
    configuration: str, left: Values, right: Values, keys: list[str]
) -> Iterator[CompareRow]:
    """What else differs between them: a status, a dtype."""
    for name in left:
        x, y = left[name], right.get(name)
        told = name in keys or name == "note" or is_number(x) or is_number(y)
        if not told and x != y:
            yield CompareRow(configuration, name, note=f"A: {x}, B: {y}")


# ---- telling -------------------------------------------------------------------------------------


def facts(a: Report, b: Report) -> dict[str, str]:
    """What both machines have in common, and what they have not."""
    found = {"A": str(a.path), "B": str(b.path)}
    for name in a.machine | b.machine:
        values = a.machine.get(name, "unknown"), b.machine.get(name, "unknown")
        if values[0] == values[1]:
            found[name] = values[0]
        else:
            found |= {f"A {name}": values[0], f"B {name}": values[1]}
    return found


def publish(a: Report, b: Report, rows: list[CompareRow], argv: list[str]) -> None:
    """Prints the table and writes it as a report."""
    machine = facts(a, b)
    width, widest = max(map(len, machine)), max(len(row.configuration) for row in rows)
    field = ("configuration", str, column("configuration", width=widest))
    console = Console(
        dataclasses.make_dataclass("WideRow", [field], bases=(CompareRow,), frozen=True)
    )
    lines = [f"{name:<{width}} {fact}" for name, fact in machine.items()]
    print("\n".join([*lines, "", console.header(), *map(console.line, rows)]))
    folder = make_folder("compare")
    notes = (f"B/A of every number: {a.title}.", f"`gpt-lightning {' '.join(argv)}`")
    write_report(folder, f"Two reports: {a.title}", machine, {"rows": rows}, notes)
    print(f"\n{folder}: results.md, results.json, rows.csv")
