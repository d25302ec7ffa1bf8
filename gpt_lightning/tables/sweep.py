"""Sweeps: measure every configuration of a bench in a process of its own and report the rows.

A row that fails is still a row. Rows are kept as they come (ledger.py) and the report is written
again after each: Ctrl-C, a crash or a full disk costs one row. --resume continues an interrupted
sweep.
"""

import datetime
import importlib
import json
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt_lightning.errors import EXIT_AGAIN, UserError, termination_as_exit
from gpt_lightning.files import numbered_folder
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.parsing import program, split_fit_options
from gpt_lightning.tables.ledger import Ledger, find_ledger, identity
from gpt_lightning.tables.options import Option, configurations, parse
from gpt_lightning.tables.rows import RESULTS, Console, Row, Values, make_row, write_report
from gpt_lightning.tables.verdicts import FINE, KEPT, finite, implausible
from gpt_lightning.tables.worker import isolated

ROOT = Path("lightning_logs") / "bench"
EARLIER = "earlier"  # machine fact of a resumed sweep: machine of the first rows
Tables = dict[str, Sequence[Row]]  # name -> rows
Picture = Callable[[Path, Sequence[Row]], list[str]]  # draws into a folder; returns file names


@dataclass(frozen=True)
class Bench:
    """A benchmark: its options, its rows, and the function that measures a row.

    Attributes:
        name: Name on the command line.
        title: Heading of the report.
        row: Class of the rows, made by `row_type`.
        measure: MODULE:FUNCTION, which `worker.call` calls with a configuration in a process of
            its own.
        options: Options in the order in which rows vary, slowest first.
        timeout_s: Default time limit of a row.
        takes_fit_options: Accept options of `fit` and put them into configurations as
            `fit_options`.
        picture: Function that draws the rows.
        files: Pass `measure` the report's folder as `folder`, for files of a row.
        tables: Further tables of the report: name -> row dataclass. A measurement returns their
            rows as a list of mappings under that name; fields of the configuration are added.
        beside: Function from the rows so far to tables that were not measured here, name -> rows,
            and to the notes on them.
        epilogue: Function from the parsed arguments and the sweep so far to last words, which is
            called after every row.
        relate: Function from a new row and the rows before it to the row with columns that depend
            on them, such as a speed-up.
    """

    name: str
    title: str
    row: type[Row]
    measure: str
    options: tuple[Option, ...] = ()
    timeout_s: float = 600.0
    takes_fit_options: bool = False
    picture: Picture | None = None
    files: bool = False
    tables: dict[str, type[Row]] = field(default_factory=dict)
    beside: Callable[[Sequence[Row]], tuple[Tables, tuple[str, ...]]] | None = None
    epilogue: Callable[[Any, "Sweep"], str] | None = None
    relate: Callable[[Row, Sequence[Row]], Row] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Conventions, units, definitions: paragraphs of the docstring of the bench's file."""
        return paragraphs(importlib.import_module(self.measure.partition(":")[0]).__doc__)


def paragraphs(docstring: str | None) -> tuple[str, ...]:
    """Return the paragraphs of a module's docstring after its first line, each in one line."""
    _, _, rest = (docstring or "").partition("\n\n")
    return tuple(" ".join(part.split()) for part in rest.split("\n\n") if part.strip())


def run_bench(bench: Bench, argv: list[str]) -> int:
    """Run `bench NAME ...`: parse the options, multiply them, and measure every row.

    Returns:
        0: Every row was measured, or could not be for lack of memory; 1: a row failed otherwise;
        75: --minutes ended before every row was measured.

    Raises:
        UserError: An option or its value is wrong.
    """
    args, rows = read_options(bench, argv[2:])
    sweep = Sweep(bench, rows, argv, args.resume, args.timeout_s)
    if bench.epilogue is not None:
        sweep.epilogue = partial(bench.epilogue, args, sweep)
    if minutes := getattr(args, "minutes", None):
        sweep.end_after(60 * minutes)
    code = sweep.run()
    if sweep.words:
        print(sweep.words)
    if sweep.left:
        names = [" ".join(v for v in row.values() if isinstance(v, str)) for row in sweep.left]
        print(f"{len(names)} of {len(rows)} rows left ({'; '.join(names)}): continue with")
        print(program(), shlex.join(argv if "--resume" in argv else [*argv, "--resume"]))
    return code


def read_options(bench: Bench, argv: list[str]) -> tuple[Any, list[Values]]:
    """Return the parsed arguments of a bench and the configurations to measure."""
    description, shared = bench.title, {}
    if bench.takes_fit_options:
        argv, fit_options = split_fit_options(argv)
        description += ". Options of `fit` follow: --data.batch_size 32."
        shared = {"fit_options": fit_options}
    args = parse(bench.name, description, bench.options, argv, bench.timeout_s)
    return args, [row | shared for row in configurations(bench.options, args)]


class TimeUpError(Exception):
    """The time of the call is over; the row is not measured."""


class Sweep:
    """Measures configurations one by one; keeps, prints and reports each row as it comes.

    Args:
        bench: The benchmark.
        configurations: Configurations to measure.
        argv: The command, for the report.
        resume: Continue the newest sweep that has one of these configurations.
        timeout_s: Time limit of a row.
        folder: Folder of the results, whose finished rows are not measured again; None: a new one.

    Raises:
        UserError: There is nothing to measure, or nothing to resume.
    """

    def __init__(
        self,
        bench: Bench,
        configurations: list[Values],
        argv: list[str],
        resume: bool = False,
        timeout_s: float = 600.0,
        folder: Path | None = None,
    ) -> None:
        if not configurations:
            raise UserError(f"bench {bench.name}: no configuration is left to measure")
        self.bench, self.configurations, self.timeout_s = bench, configurations, timeout_s
        self.ledger = Ledger(folder) if folder else open_ledger(bench.name, configurations, resume)
        self.folder, self._before = self.ledger.folder, self.ledger.by_key()
        machine = machine_of(configurations, argv)
        self.machine = machine | earlier_machine(self.folder, machine)
        self.rows: list[Row] = []
        self.pictures: list[str] = []  # drawn after the last row: it takes seconds
        self.left: list[Values] = []  # not measured because the time of `end_after` was over
        self.epilogue: Callable[[], str] = str  # last words
        self._deadline = math.inf
        self._first = True  # no row was measured in this call
        self._tables: dict[str, list[Row]] = {name: [] for name in bench.tables}
        known = [make_row(bench.row, row) for row in configurations]
        self._console = Console(bench.row, rows=known)
        for name, fact in self.machine.items():
            print(f"{name:<9} {fact}")
        print(f"\n{self._console.header()}", flush=True)

    def end_after(self, seconds: float) -> None:
        """Measure only what fits into a time; rows that failed in the resumed sweep come last."""
        self._deadline = time.monotonic() + seconds
        self.configurations.sort(
            key=lambda row: identity(row) in self._before and not self._done(row)
        )

    def _done(self, configuration: Values) -> bool:
        return self._before.get(identity(configuration), {}).get("status") in KEPT

    def run(self) -> int:
        """Measure every configuration.

        Returns:
            0: Every row was measured, or could not be for lack of memory; 1: a row failed
            otherwise; 75: rows are left.
        """
        for configuration in self.configurations:
            try:
                self.measure(configuration)
            except TimeUpError:
                self.left.append(configuration)
        if self.bench.picture is not None:
            self.pictures = self.bench.picture(self.folder, self.rows)
        self.report()
        self.print_files()
        failed = any(row.status not in FINE for row in self.rows)
        return EXIT_AGAIN if self.left else int(failed)

    def measure(self, configuration: Values) -> Row:
        """Measure a configuration, or take the row of the resumed sweep, and write the report.

        Raises:
            TimeUpError: The time of `end_after` was over before the row's, unless it was the
                call's first: that row has failed, because another call would not have more time.
        """
        if self._done(configuration):
            found = self._before[identity(configuration)]
        else:
            limit_s = min(self.timeout_s, self._deadline - time.monotonic())
            if limit_s <= 0:
                raise TimeUpError
            with termination_as_exit():
                found = measure_row(self.bench, self.folder, configuration, limit_s)
            if found["status"] == "timed out" and limit_s < self.timeout_s and not self._first:
                raise TimeUpError
            self._first = False
            self.ledger.append(configuration, found)
        row = make_row(self.bench.row, configuration | found)
        self.rows.append(self.bench.relate(row, self.rows) if self.bench.relate else row)
        print(self._console.line(self.rows[-1]), flush=True)
        for name, row_type in self.bench.tables.items():
            parts = found.get(name, [])
            self._tables[name] += [make_row(row_type, configuration | part) for part in parts]
        self.report()
        return self.rows[-1]

    def report(self, findings: Sequence[str] = ()) -> None:
        """Write the report of the rows so far, with findings below the notes."""
        tables: Tables = {"rows": self.rows, **self._tables}
        notes = self.bench.notes
        if self.bench.beside is not None:
            published, remarks = self.bench.beside(self.rows)
            tables, notes = tables | published, notes + remarks
        title, notes = self.bench.title, (*notes, *findings)
        write_report(self.folder, title, self.machine, tables, notes, self.pictures)
        self.words = self.epilogue()

    def print_files(self) -> None:
        """Print where the report is."""
        print(f"\n{self.folder}: results.md, results.json, rows.csv")


def open_ledger(name: str, keys: list[Values], resume: bool) -> Ledger:
    """Return the ledger of a new sweep, or the newest one with any of some rows.

    Raises:
        UserError: No sweep has any of the rows.
    """
    if not resume:
        stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
        return Ledger(numbered_folder(ROOT / name, f"{stamp}-"))
    ledger = find_ledger(ROOT / name, keys)
    if ledger is None:
        raise UserError(
            f"--resume: no sweep of these rows in {ROOT / name}; start one without --resume"
        )
    return ledger


def measure_row(bench: Bench, folder: Path, configuration: Values, timeout_s: float) -> Values:
    """Measure a configuration; impossible numbers are a failure too."""
    arguments = configuration | ({"folder": str(folder)} if bench.files else {})
    found = isolated(bench.measure, arguments, timeout_s)
    wrong = implausible(found) if found["status"] == "ok" else ""
    return finite(found) | {"status": "implausible", "note": wrong} if wrong else found


def machine_of(configurations: list[Values], argv: list[str]) -> dict[str, str]:
    """Return the head of the report, for the devices of the configurations."""
    named = dict.fromkeys(row.get("device") for row in configurations)
    devices = [torch.device(name) for name in named if name in ("cpu", "mps", "cuda")]
    records = [machine_record(argv, device) for device in devices] or [machine_record(argv)]
    return records[0] | {"device": "; ".join(record["device"] for record in records)}


def earlier_machine(folder: Path, machine: dict[str, str]) -> dict[str, str]:
    """Return facts of the machine of an interrupted sweep's rows, where they differ."""
    path = folder / RESULTS
    if not path.exists():
        return {}
    before: dict[str, str] = json.loads(path.read_text(encoding="utf-8"))["machine"]
    facts = ("device", "CPU", "memory", "software")
    other = [f"{name} {before[name]}" for name in facts if before.get(name) != machine.get(name)]
    known = [before[EARLIER]] if EARLIER in before else []
    known += [f"rows of {before.get('date')}: {', '.join(other)}"] if other else []
    return {EARLIER: "; ".join(known)} if known else {}
