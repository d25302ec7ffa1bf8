"""Sweeps: measure every configuration of a bench in a process of its own and report the rows.

A row that fails is still a row. Rows are kept as they come (ledger.py) and the report is written
again after each: Ctrl-C, a crash or a full disk costs one row. --resume continues an interrupted
sweep.
"""

import importlib
import itertools
import math
import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gpt_lightning.errors import EXIT_AGAIN, UserError, one_line, termination_as_exit
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.parsing import OneLineParser, program, split_fit_options
from gpt_lightning.tables.ledger import earlier_machine, identity, open_ledger
from gpt_lightning.tables.options import Option, PositiveFinite, shared
from gpt_lightning.tables.rows import Console, Row, Tables, Values, make_row, types_of, write_report
from gpt_lightning.tables.worker import isolated

ROOT = Path("lightning_logs") / "bench"
FINE = ("ok", "out of memory", "skipped")  # statuses that are no failure
KEPT = ("ok", "out of memory")  # statuses of rows that a resumed sweep does not measure again
Picture = Callable[[Path, Sequence[Row]], list[str]]  # draws into a folder; returns file names


@dataclass
class Bench:
    """A benchmark: its options, its rows, and the function that measures a row.

    Attributes:
        measure: MODULE:FUNCTION, which `worker.call` calls with a configuration in a process of
            its own. Its module names the bench, and the docstring describes it.
        options: Options in the order in which rows vary, slowest first.
        tables: Tables of the report, name -> class of its rows, made by `row_type`: `rows`, and
            others, whose rows a measurement returns as a list of mappings under the table's name;
            fields of the configuration are added. By default those in columns.yaml.
        timeout_s: Default time limit of a row.
        takes_fit_options: Accept options of `fit` and put them into configurations as
            `fit_options`.
        picture: Function that draws the rows.
        beside: Function from the rows so far to tables that were not measured here, name -> rows.
        publish: Function from the parsed arguments and the sweep so far to last words, which is
            called after every row.
        relate: Function from a new row and the rows before it to the row with columns that depend
            on them, such as a speed-up.
    """

    measure: str
    options: tuple[Option, ...] = ()
    tables: dict[str, type[Row]] = field(default_factory=dict)
    timeout_s: float = 600.0
    takes_fit_options: bool = False
    picture: Picture = lambda folder, rows: []
    beside: Callable[[Sequence[Row]], Tables] = lambda rows: {}
    publish: Callable[[Any, "Sweep"], str] = lambda args, sweep: ""
    relate: Callable[[Row, Sequence[Row]], Row] = lambda row, before: row

    def __post_init__(self) -> None:
        self.tables = self.tables or types_of(str(self._module.__file__), self.name)

    @property
    def row(self) -> type[Row]:
        """Class of the rows."""
        return self.tables["rows"]

    @property
    def name(self) -> str:
        """Name on the command line: that of the file."""
        return self._module.__name__.rpartition(".")[2].replace("_", "-")

    @property
    def command(self) -> list[str]:
        """Words of the command before its options."""
        module = self.measure.partition(":")[0]
        if module.startswith("gpt_lightning."):
            return ["gpt-lightning", "bench", self.name]
        return ["python", "-m", module]

    @property
    def about(self) -> list[str]:
        """Heading of the report, then conventions, units, definitions: the file's docstring."""
        heading, *notes = map(one_line, str(self._module.__doc__).split("\n\n"))
        return [heading.removesuffix("."), *notes]

    @property
    def _module(self) -> ModuleType:
        return importlib.import_module(self.measure.partition(":")[0])


def run_bench(bench: Bench, argv: list[str]) -> int:
    """Run a bench: parse the options, multiply them, and measure every row.

    Args:
        bench: The benchmark.
        argv: `bench NAME` or `-m MODULE`, then the options.

    Returns:
        0: Every row was measured, or could not be for lack of memory; 1: a row failed otherwise;
        75: --minutes ended before every row was measured.

    Raises:
        UserError: An option or its value is wrong.
    """
    args, rows = read_options(bench, argv[2:])
    return Sweep(bench, rows, argv, args).run()


def read_options(bench: Bench, argv: Sequence[str]) -> tuple[Any, list[Values]]:
    """Return the parsed arguments of a bench and the configurations to measure.

    The configurations are every combination of the options' values, the last option's varying
    fastest.

    Raises:
        UserError: An option is unknown, or its value cannot be.
    """
    about, same = bench.about[0], {}
    if bench.takes_fit_options:
        argv, fit_options = split_fit_options([*argv])
        about += ". Options of `fit` follow: --data.batch_size 32."
        same = {"fit_options": fit_options}
    parser = OneLineParser(prog=" ".join(bench.command), description=about)
    every = (
        Option("resume", False, "Continue the newest sweep of the same rows.", type=bool),
        shared("timeout_s", bench.timeout_s, "Time limit of each row, in seconds.", PositiveFinite),
    )
    for option in (*bench.options, *every):
        kind = {"type": option.type, "default": option.default}
        names = [f"--{name}" for name in (option.name, option.alias) if name]
        if option.type is bool:
            kind = {"action": "store_true"}
        parser.add_argument(*names, help=option.help, **kind)
    args = parser.parse_args(argv)
    args.fit_options = same.get("fit_options", [])
    read = [option.read(args) for option in bench.options]
    return args, [
        {name: value for fields in combination for name, value in fields.items()}
        for combination in itertools.product(*read, [same])
    ]


@dataclass(eq=False)
class Sweep:
    """Measures configurations one by one; keeps, prints and reports each row as it comes.

    Args:
        bench: The benchmark.
        configurations: Configurations to measure.
        argv: The command, for the report.
        args: Parsed arguments of the command, with `resume` and `timeout_s`.
        ledger: Rows of the results, of which the finished ones are not measured again; None: a new
            one, or with --resume the newest that has one of the configurations.

    Raises:
        UserError: There is nothing to measure, or nothing to resume.
    """

    bench: Bench
    configurations: list[Values]
    argv: list[str]
    args: Any
    ledger: Any = None

    def __post_init__(self) -> None:
        bench, rows = self.bench, self.configurations
        if not rows:
            raise UserError(f"bench {bench.name}: no configuration is left to measure")
        self.ledger = self.ledger or open_ledger(ROOT / bench.name, rows, self.args.resume)
        self.folder, self._before = self.ledger.folder, self.ledger.by_key()
        self.folder.mkdir(parents=True, exist_ok=True)  # the rows write their files there
        machine = machine_of(rows, self.argv)
        machine["command"] = shlex.join([*bench.command, *self.argv[2:]])
        self.machine = machine | earlier_machine(self.folder, machine)
        self.tables: dict[str, list[Row]] = {name: [] for name in bench.tables}
        self.rows = self.tables["rows"]
        self.pictures: list[str] = []  # drawn after the last row: it takes seconds
        self._measured = False  # a row was measured in this call
        self._console = Console(bench.row, rows=[make_row(bench.row, row) for row in rows])
        for name, fact in self.machine.items():
            print(f"{name:<9} {fact}")
        print(f"\n{self._console.header()}", flush=True)

    def run(self) -> int:
        """Measure every configuration; with --minutes those that fit into the time.

        Rows that failed in the resumed sweep come last in that case.

        Returns:
            0: Every row was measured, or could not be for lack of memory; 1: a row failed
            otherwise; 75: rows are left.
        """
        end, rows, left = math.inf, self.configurations, 0
        if minutes := getattr(self.args, "minutes", None):
            end = time.monotonic() + 60 * minutes
            rows = sorted(rows, key=lambda row: self._status(row) not in ("", *KEPT))
        for configuration in rows:
            left += self.measure(configuration, end) is None
        self.pictures = self.bench.picture(self.folder, self.rows)
        words = self.report()
        self.print_files()
        if words:
            print(words)
        if left:
            print(f"{left} of {len(rows)} rows left: continue with")
            argv = self.argv if self.args.resume else [*self.argv, "--resume"]
            print(program(), shlex.join(argv))
            return EXIT_AGAIN
        return int(any(row.status not in FINE for row in self.rows))

    def measure(self, configuration: Values, end: float = math.inf) -> Row:
        """Measure a configuration, or take the row of the resumed sweep, and write the report.

        Args:
            configuration: The configuration.
            end: Time at which the call ends, by time.monotonic.

        Returns:
            The row; None if the call ended before the row's time limit, unless it was the call's
            first: that row has failed, because another call would not have more time.
        """
        if self._status(configuration) in KEPT:
            found = self._before[identity(configuration)]
        else:
            limit_s = min(self.args.timeout_s, end - time.monotonic())
            if limit_s <= 0:
                return None
            own = configuration | {"folder": str(self.folder)}  # a row writes its files there
            with termination_as_exit():
                found = isolated(self.bench.measure, own, limit_s)
            cut = found["status"] == "timed out" and limit_s < self.args.timeout_s
            if cut and self._measured:
                return None
            self._measured = True
            self.ledger.append(configuration, found)
        row = make_row(self.bench.row, configuration | found)
        self.rows.append(self.bench.relate(row, self.rows))
        print(self._console.line(self.rows[-1]), flush=True)
        for name, row_type in self.bench.tables.items():
            parts = found.get(name, [])
            self.tables[name] += [make_row(row_type, configuration | part) for part in parts]
        self.report()
        return self.rows[-1]

    def _status(self, configuration: Values) -> str:
        """Return the status of a row in the resumed sweep; empty if it was not measured."""
        return self._before.get(identity(configuration), {}).get("status", "")

    def report(self, findings: Sequence[str] = ()) -> str:
        """Write the report of the rows so far, with findings below the notes; return last words."""
        tables = {**self.tables, **self.bench.beside(self.rows)}
        title, *notes = [*self.bench.about, *findings]
        write_report(self.folder, title, self.machine, tables, notes, self.pictures)
        return self.bench.publish(self.args, self)

    def print_files(self) -> None:
        """Print where the report is."""
        print(f"\n{self.folder}: results.md, results.json, rows.csv")


def machine_of(configurations: list[Values], argv: list[str]) -> dict[str, str]:
    """Return the head of the report, for the devices of the configurations."""
    named = dict.fromkeys(row.get("device") for row in configurations)
    devices = [torch.device(name) for name in named if name in ("cpu", "mps", "cuda")]
    records = [machine_record(argv, device) for device in devices] or [machine_record(argv)]
    return records[0] | {"device": "; ".join(record["device"] for record in records)}
