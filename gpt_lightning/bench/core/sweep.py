"""A sweep: configurations in, a table out, whatever happens to single rows.

Each row is measured in a process of its own (worker.py) and kept as it comes (folders.py), and the
report is written again after each: Ctrl-C, a crash or a full disk costs one row. An interrupted
sweep goes on with --resume.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from gpt_lightning.bench.core.plausible import finite, implausible
from gpt_lightning.bench.core.results import find_folder, keep, key, make_folder
from gpt_lightning.bench.core.worker import MARK
from gpt_lightning.errors import UserError, is_out_of_memory
from gpt_lightning.parsing import OneLineParser
from gpt_lightning.reports.tables import RESULTS, Console, Row, write_report

EARLIER = "earlier"  # a fact of a resumed sweep: what its first rows were measured on
FINE = ("ok", "out of memory", "skipped")  # statuses that are no failure
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
        beside: Tables that were not measured here, for the rows so far: name -> rows.
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
    beside: Callable[[Sequence[Row]], dict[str, Sequence[Row]]] | None = None


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
    if not configurations:
        raise UserError(f"bench {bench.name}: no configuration is left to measure")
    if not timeout_s > 0:
        raise UserError(f"--timeout-s is {timeout_s}; it must be above 0")
    folder, done = (
        find_folder(bench.name, configurations) if resume else (make_folder(bench.name), {})
    )
    machine = machine_of(configurations, argv)
    machine |= earlier_machine(folder, machine)
    console = Console(bench.row, without=bench.hidden)
    for name, fact in machine.items():
        print(f"{name:<9} {fact}")
    print(f"\n{console.header()}", flush=True)
    rows: list[Row] = []
    more: dict[str, list[Row]] = {name: [] for name in bench.tables}
    with termination_as_exit():
        for configuration in configurations:
            measured = done.get(key(configuration))
            if measured is None:
                measured = measure_row(bench, folder, configuration, timeout_s)
                keep(folder, configuration, measured)
            rows.append(make_row(bench.row, configuration | measured))
            print(console.line(rows[-1]), flush=True)
            for name, row_type in bench.tables.items():
                parts = measured.get(name, [])
                more[name] += [make_row(row_type, configuration | part) for part in parts]
            report(bench, folder, machine, rows, more)
    print(f"\n{folder}: results.md, results.json, rows.csv")
    return int(any(row.status not in FINE for row in rows))


def measure_row(
    bench: Bench, folder: Path, configuration: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """Measures a configuration; numbers that cannot be are a failure too."""
    place = {"folder": str(folder)} if bench.files else {}
    measured = isolated(bench.measure, configuration | place, timeout_s)
    wrong = implausible(measured) if measured["status"] == "ok" else ""
    if not wrong:
        return measured
    return finite(measured) | {"status": "implausible", "note": wrong}


def machine_of(configurations: list[dict[str, Any]], argv: list[str]) -> dict[str, str]:
    """The head of the report, of the devices that are measured."""
    import torch

    from gpt_lightning.hardware.machine import machine_record

    named = dict.fromkeys(row.get("device") for row in configurations)
    devices = [torch.device(name) for name in named if name in ("cpu", "mps", "cuda")]
    records = [machine_record(argv, device) for device in devices] or [machine_record(argv)]
    together = "; ".join(record["device"] for record in records)
    precision = torch.get_float32_matmul_precision()
    return records[0] | {
        "device": together,
        "precision": f"float32 products: {precision}, but for rows in tf32",
    }


def earlier_machine(folder: Path, machine: dict[str, str]) -> dict[str, str]:
    """What the rows of an interrupted sweep were measured on, where that was something else."""
    path = folder / RESULTS
    if not path.exists():
        return {}
    before: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["machine"]
    facts = ("device", "CPU", "memory", "software", "precision")
    other = [f"{name} {before[name]}" for name in facts if before.get(name) != machine.get(name)]
    told = [before[EARLIER]] if EARLIER in before else []
    told += [f"rows of {before.get('date')}: {', '.join(other)}"] if other else []
    return {EARLIER: "; ".join(told)} if told else {}


@contextlib.contextmanager
def termination_as_exit() -> Iterator[None]:
    """A signal to terminate ends the row's process too: it becomes an exception, as Ctrl-C is."""

    def leave(number: int, frame: object) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- a row's process -----------------------------------------------------------------------------


def isolated(address: str, configuration: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    """Measures a configuration in a process of its own; what goes wrong is a status."""
    command = [sys.executable, "-m", "gpt_lightning.bench.core.worker", address]
    process = subprocess.Popen(
        [*command, json.dumps(configuration)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
        process_group=0,  # with the compilers and loaders that it starts
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end(process)
        return {"status": "timed out", "note": f"after {timeout_s:g} s"}
    except BaseException:  # Ctrl-C: nothing is left behind
        end(process)
        raise
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            found: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return found
    return crash(process.returncode, errors)


def end(process: subprocess.Popen[str]) -> None:
    """Ends a process and those that it has started, which would hold its pipes open."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def crash(returncode: int, errors: str) -> dict[str, str]:
    """The row of a process that ended without a result."""
    if returncode == -signal.SIGKILL:
        return {"status": "out of memory", "note": "killed, as Linux does for want of memory"}
    last = " ".join(errors.split())[-160:]
    status = "out of memory" if is_out_of_memory(RuntimeError(last)) else "crashed"
    return {"status": status, "note": f"{ending(returncode)}: {last}"}


def ending(returncode: int) -> str:
    """How a process ended, in words."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"exit code {returncode} ({signal.Signals(-returncode).name})"
    except ValueError:  # a real-time signal has no name
        return f"exit code {returncode}"


# ---- the report ----------------------------------------------------------------------------------


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
    pictures = draw(bench, folder, rows)
    tables: dict[str, Sequence[Row]] = {"rows": rows, **(more or {})}
    if bench.beside is not None:
        tables |= bench.beside(rows)
    write_report(folder, bench.title, machine, tables, bench.notes, pictures)


def draw(bench: Bench, folder: Path, rows: list[Row]) -> list[str]:
    """Draws the rows, unless this process itself has no memory left for that."""
    if bench.picture is None:
        return []
    try:
        return bench.picture(folder, rows)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(f"warning: no picture: {type(error).__name__} {error}", file=sys.stderr)
        return []
