"""Sweeps: measure every configuration of a bench in a process of its own and report the rows.

A row that fails is still a row. Rows are kept as they come (ledger.py) and the report is written
again after each: Ctrl-C, a crash or a full disk costs one row. --resume continues an interrupted
sweep.
"""

import itertools
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from jsonargparse import Namespace

from gpt_lightning.errors import UserError, one_line, termination_as_exit
from gpt_lightning.files import Fields
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.parsing import OneLineParser, split_fit_options
from gpt_lightning.tables.ledger import Ledger, identity, open_ledger
from gpt_lightning.tables.options import Option, PositiveFinite, shared
from gpt_lightning.tables.rows import Console, Row, Tables, Values, write_report
from gpt_lightning.tables.worker import isolated

ROOT = Path("lightning_logs") / "bench"
KEPT = ("ok", "out of memory")  # statuses of rows that a resumed sweep does not measure again
FINE = (*KEPT, "skipped")  # statuses that are no failure


@dataclass
class Bench:
    """A benchmark: its options, its rows, and the function that measures a row.

    Attributes:
        measure: MODULE:FUNCTION, which `worker.call` calls with a configuration in a process of
            its own. Its module names the bench, and the docstring describes it.
        tables: Tables of the report, name -> class of its rows: `rows`, and others, whose rows a
            measurement returns as a list of mappings under the table's name; fields of the
            configuration are added.
        options: Options in the order in which rows vary, slowest first.
        timeout_s: Default time limit of a row.
        takes_fit_options: Accept options of `fit` and put them into configurations as
            `fit_options`.
        picture: Function that draws the rows into a folder and returns the names of its files.
        relate: Function from a new row and the rows before it to the row with columns that depend
            on them, such as a speed-up.
        beside: Function from the rows so far to tables that were not measured here, name -> rows.
    """

    measure: str
    tables: dict[str, type[Row]]
    options: tuple[Option, ...] = ()
    timeout_s: float = 600.0
    takes_fit_options: bool = False
    picture: Callable[[Path, Sequence[Any]], list[str]] = lambda folder, rows: []
    relate: Callable[[Any, Sequence[Any]], Row] = lambda row, before: row
    beside: Callable[[Sequence[Any]], Tables] = lambda rows: {}

    @property
    def name(self) -> str:
        """Name on the command line: that of the file."""
        return self._module.rpartition(".")[2].replace("_", "-")

    @property
    def command(self) -> list[str]:
        """Words of the command before its options."""
        if self._module.startswith("gpt_lightning."):
            return ["gpt-lightning", "bench", self.name]
        return ["python", "-m", self._module]

    @property
    def about(self) -> list[str]:
        """Heading of the report, then conventions, units, definitions: the file's docstring."""
        heading, *notes = map(one_line, resolve_name(self._module).__doc__.split("\n\n"))
        return [heading.removesuffix("."), *notes]

    @property
    def _module(self) -> str:
        return self.measure.partition(":")[0]


def run_bench(bench: Bench, argv: list[str]) -> int:
    """Run a bench: parse the options, multiply them, and measure every row.

    Args:
        bench: The benchmark.
        argv: `bench NAME` or `-m MODULE`, then the options.

    Returns:
        Exit code of `Sweep.run`.

    Raises:
        UserError: An option or its value is wrong.
    """
    args, rows = read_options(bench, argv[2:])
    return Sweep(bench, rows, argv, args).run()


def read_options(bench: Bench, argv: Sequence[str]) -> tuple[Namespace, list[Values]]:
    """Return the parsed arguments of a bench and the configurations to measure.

    The configurations are every combination of the options' values, the last option's varying
    fastest.

    Raises:
        UserError: An option is unknown, or its value cannot be.
    """
    about = bench.about[0]
    same: Fields = {}
    if bench.takes_fit_options:
        argv, same["fit_options"] = split_fit_options([*argv])
        about += ". Options of `fit` follow: --data.batch_size 32."
    parser = OneLineParser(prog=" ".join(bench.command), description=about)
    every = (
        Option("resume", False, "Continue the newest sweep of the same rows.", type=bool),
        shared("timeout_s", bench.timeout_s, "Time limit of each row, in seconds.", PositiveFinite),
    )
    for option in (*bench.options, *every):
        names = [f"--{name}" for name in (option.name, option.alias) if name]
        kind: Fields = {"type": option.type, "default": option.default}
        if option.type is bool:
            kind = {"action": "store_true"}
        parser.add_argument(*names, help=option.help, **kind)
    args = parser.parse_args(argv)
    args.fit_options = same.get("fit_options", [])
    values = [option.read(args) for option in bench.options]
    return args, [reduce(or_, fields, same) for fields in itertools.product(*values)]


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
    args: Namespace
    ledger: Ledger | None = None

    def __post_init__(self) -> None:
        bench, rows = self.bench, self.configurations
        if not rows:
            raise UserError(f"bench {bench.name}: no configuration is left to measure")
        self._ledger = self.ledger or open_ledger(ROOT / bench.name, rows, self.args.resume)
        self.folder = self._ledger.folder
        self.folder.mkdir(parents=True, exist_ok=True)  # the rows write their files there
        self.machine = machine_of(rows)
        facts = (fact for name, fact in self.machine.items() if name not in ("command", "date"))
        self._here = "; ".join(facts)
        self._earlier: dict[str, None] = {}  # machines and versions of the resumed sweep
        self.machine["command"] = shlex.join([*bench.command, *self.argv[2:]])
        self.tables: dict[str, list[Row]] = {name: [] for name in bench.tables}
        self.rows: list[Any] = self.tables["rows"]
        self._before = self._ledger.by_key()
        row_type = bench.tables["rows"]
        self._console = Console(row_type, map(row_type.of, rows))
        for name, fact in self.machine.items():
            print(f"{name:<9} {fact}")
        print(f"\n{self._console.header}", flush=True)

    def run(self) -> int:
        """Measure every configuration.

        Returns:
            0: Every row was measured, or could not be for lack of memory; 1: a row failed
            otherwise.
        """
        for configuration in self.configurations:
            self.measure(configuration)
        self.finish(pictures=self.bench.picture(self.folder, self.rows))
        return int(any(row.status not in FINE for row in self.rows))

    def measure(self, configuration: Values) -> Any:
        """Measure a configuration, or take the row of the resumed sweep, and write the report."""
        found = self._before.get(identity(configuration), {})
        if found.get("status") not in KEPT:
            own = configuration | {"folder": str(self.folder)}  # a row writes its files there
            with termination_as_exit():
                found = isolated(self.bench.measure, own, self.args.timeout_s)
            found["machine"] = self._here
            self._ledger.append(configuration, found)
        if found["machine"] != self._here:
            self._earlier[found["machine"]] = None
            self.machine["earlier"] = f"rows of {', and of '.join(self._earlier)}"
        for name, row_type in self.bench.tables.items():
            parts = [found] if name == "rows" else found.get(name, [])
            self.tables[name] += [row_type.of(configuration | part) for part in parts]
        row = self.rows[-1] = self.bench.relate(self.rows[-1], self.rows[:-1])
        print(self._console.line(row), flush=True)
        self.report()
        return row

    def report(self, findings: Sequence[str] = (), pictures: Sequence[str] = ()) -> None:
        """Write the report of the rows so far, with findings below the notes."""
        tables = {**self.tables, **self.bench.beside(self.rows)}
        title, *notes = [*self.bench.about, *findings]
        write_report(self.folder, title, self.machine, tables, notes, pictures)

    def finish(self, findings: Sequence[str] = (), pictures: Sequence[str] = ()) -> None:
        """Write the report with findings and pictures, and print where it is."""
        self.report(findings, pictures)
        print(f"\n{self.folder}: results.md, results.json, rows.csv")


def machine_of(configurations: list[Values]) -> dict[str, str]:
    """Return the head of the report, for the devices of the configurations."""
    named = dict.fromkeys(str(row.get("device")) for row in configurations)
    devices = [torch.device(name) for name in named if name in ("cpu", "mps", "cuda")]
    records = [machine_record([], device) for device in devices] or [machine_record([])]
    return records[0] | {"device": "; ".join(record["device"] for record in records)}
