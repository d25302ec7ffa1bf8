"""A sweep: configurations in, a table out, whatever happens to single rows.

Each row is measured in a process of its own (worker.py). Rows are appended to `rows.jsonl` as they
come, and the report is written again after each: Ctrl-C, a crash or a full disk costs one row. An
interrupted sweep goes on with --resume.
"""

import dataclasses
import datetime
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_lightning.bench.worker import MARK
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser
from gpt_lightning.tables import Console, Row, write_report

ROOT = Path("lightning_logs") / "bench"
ROWS = "rows.jsonl"
Picture = Callable[[Path, Sequence[Row]], list[str]]  # draws into a folder; returns file names


@dataclass(frozen=True)
class Bench:
    """A benchmark: what its rows are and what measures one.

    Attributes:
        name: On the command line.
        title: Heading of the report.
        row: A dataclass made by `tables.column`, with `status` and `note` among its fields.
        measure: MODULE:FUNCTION; takes a configuration's fields, returns measured ones.
        notes: What a reader must know: conventions, units, what is counted.
        picture: Draws the rows, where a picture says more.
        hidden: Fields that the console can do without.
        files: Whether `measure` also takes `folder`, the report's, to leave files in.
        tables: Further tables of the report: name -> what their rows are. A measurement returns
            their rows as a list of mappings under that name; fields of the configuration come by
            themselves.
    """

    name: str
    title: str
    row: type[Row]
    measure: str
    notes: tuple[str, ...] = ()
    picture: Picture | None = None
    hidden: tuple[str, ...] = ("note",)
    files: bool = False
    tables: dict[str, type[Row]] = dataclasses.field(default_factory=dict)


def add_sweep_arguments(parser: OneLineParser, timeout_s: float = 600.0) -> None:
    """The options that every sweep has."""
    parser.add_argument(
        "--resume", action="store_true", help="Go on with the newest sweep of the same rows."
    )
    parser.add_argument("--timeout_s", type=float, default=timeout_s, help="Of a row, in seconds.")


def run_sweep(
    bench: Bench,
    configurations: list[dict[str, Any]],
    argv: list[str],
    resume: bool = False,
    timeout_s: float = 600.0,
) -> int:
    """Measures every configuration and prints a row as it comes.

    Returns:
        0: every row was measured, or could not be for want of memory; 1: a row failed otherwise.

    Raises:
        UserError: there is nothing to measure.
    """
    from gpt_lightning.machine import machine_record

    if not configurations:
        raise UserError(f"bench {bench.name}: no configuration is left to measure")
    folder, done = find_folder(bench, configurations) if resume else (new_folder(bench), {})
    machine = machine_record(argv)
    console = Console(bench.row, without=bench.hidden)
    for name, fact in machine.items():
        print(f"{name:<9} {fact}")
    print(f"\n{console.header()}", flush=True)
    rows: list[Row] = []
    more: dict[str, list[Row]] = {name: [] for name in bench.tables}
    for configuration in configurations:
        measured = done.get(key(configuration))
        if measured is None:
            place = {"folder": str(folder)} if bench.files else {}
            measured = isolated(bench.measure, configuration | place, timeout_s)
            keep(folder, configuration, measured)
        rows.append(make_row(bench.row, configuration | measured))
        print(console.line(rows[-1]), flush=True)
        for name, row_type in bench.tables.items():
            parts = measured.get(name, [])
            more[name] += [make_row(row_type, configuration | part) for part in parts]
        report(bench, folder, machine, rows, more)
    print(f"\n{folder}: results.md, results.json, rows.csv")
    return int(any(row.status not in ("ok", "out of memory", "skipped") for row in rows))


def isolated(address: str, configuration: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Measures a configuration in a process of its own; what goes wrong is a status."""
    command = [sys.executable, "-m", "gpt_lightning.bench.worker", address]
    process = subprocess.Popen(
        [*command, json.dumps(configuration)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"status": "timed out", "note": f"after {timeout_s:.0f} s"}
    except BaseException:  # Ctrl-C: nothing is left behind
        process.kill()
        process.communicate()
        raise
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    return crash(process.returncode, errors)


def crash(returncode: int, errors: str) -> dict[str, str]:
    """The row of a process that ended without a result."""
    if returncode == -signal.SIGKILL:
        return {"status": "out of memory", "note": "killed by the system"}
    last = (errors.strip().splitlines() or [""])[-1][:160]
    return {"status": "crashed", "note": f"exit code {returncode}: {last}"}


# ---- files ---------------------------------------------------------------------------------------


def key(configuration: dict[str, Any]) -> str:
    """What tells a row from the others."""
    return json.dumps(configuration, sort_keys=True)


def new_folder(bench: Bench) -> Path:
    """A folder for a new sweep."""
    stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    return ROOT / bench.name / stamp


def find_folder(
    bench: Bench, configurations: list[dict[str, Any]]
) -> tuple[Path, dict[str, dict[str, Any]]]:
    """The newest sweep that has rows of these, and what it measured well."""
    wanted = {key(configuration) for configuration in configurations}
    for path in sorted((ROOT / bench.name).glob(f"*/{ROWS}"), reverse=True):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        done = {key(row["configuration"]): row["measured"] for row in rows}
        if wanted & done.keys():
            good = {k: v for k, v in done.items() if v["status"] in ("ok", "out of memory")}
            return path.parent, good
    raise UserError(f"--resume: no sweep of these rows in {ROOT / bench.name}; leave it out")


def keep(folder: Path, configuration: dict[str, Any], measured: dict[str, Any]) -> None:
    """Appends a row to the sweep's file."""
    folder.mkdir(parents=True, exist_ok=True)
    row = {"configuration": configuration, "measured": measured}
    with (folder / ROWS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def make_row(row_type: type[Row], values: dict[str, Any]) -> Row:
    """A row of the fields that there are; the others keep their defaults."""
    names = {field.name for field in dataclasses.fields(row_type)}
    return row_type(**{name: value for name, value in values.items() if name in names})


def report(
    bench: Bench,
    folder: Path,
    machine: dict[str, str],
    rows: list[Row],
    more: dict[str, list[Row]] | None = None,
) -> None:
    """Writes the report of the rows so far, and of the bench's further tables."""
    pictures = bench.picture(folder, rows) if bench.picture is not None else []
    tables: dict[str, Sequence[Row]] = {"rows": rows, **(more or {})}
    write_report(folder, bench.title, machine, tables, bench.notes, pictures)


def listed(text: str, kind: Callable[[str], Any], option: str) -> list[Any]:
    """The values of an option with commas.

    Raises:
        UserError: one of them is no such value.
    """
    try:
        return [kind(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"{option} is {text!r}: {error}") from error


def one_of(choices: Sequence[str]) -> Callable[[str], str]:
    """A kind for `listed`: one of a few words."""

    def choice(text: str) -> str:
        if text not in choices:
            raise ValueError(f"{text!r} is none of {', '.join(choices)}")
        return text

    return choice


def switch(text: str) -> bool:
    """A kind for `listed`: true or false."""
    return {"true": True, "false": False}[one_of(("true", "false"))(text)]
