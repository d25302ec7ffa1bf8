"""The command `gpt-lightning runs`: a list of runs, or several runs compared."""

import json
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

from gpt_lightning.commands.plot import draw
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import OneLineParser, program, underscored
from gpt_lightning.runs.history import COLUMNS, find_run, find_runs, read_settings, summarize

STATES = ("running", "finished", "stopped", "failed", "killed", "unknown", "damaged")


def make_parser() -> OneLineParser:
    """Return the parser of the command."""
    about = "List the runs in a folder by the time of their start, or compare several runs."
    parser = OneLineParser(prog="gpt-lightning runs", description=about)
    about = "A folder (default: lightning_logs), or several runs to compare."
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help=about)
    parser.add_argument("--state", type=Literal[STATES] | None, help="Only runs in this state.")
    parser.add_argument("--name", default="*", help="Only runs of this name, such as 'quick*'.")
    about = "Only runs that began then or later: 2026-11-22, or '2026-11-22 14:30'."
    parser.add_argument("--since", type=str | None, help=about)
    parser.add_argument("--json", action="store_true", help="Print JSON.")
    return parser


def run(argv: list[str]) -> None:
    """Print what the arguments `runs FOLDER...` name."""
    args = make_parser().parse_args(underscored(argv[1:]))
    if len(args.folders) > 1:
        return compare([find_run(address) for address in args.folders], args.json)
    root = Path(*args.folders or ["lightning_logs"])
    found = [summarize(path, root) for path in find_runs(root)]
    if not found:
        raise UserError(f"no run in {root}: train one, `{program()} fit --config quickstart`")
    try:
        since = datetime.fromisoformat(args.since or "0001-01-01").isoformat(" ", "minutes")
    except ValueError as error:
        raise UserError(f"--since {args.since}: expected a date such as 2026-11-22") from error
    name = args.name.replace("[", "[[]")  # no class of characters: a name may have brackets
    shown = [
        row
        for row in sorted(found, key=lambda row: (row["started"], row["run"]))
        if args.state in (None, row["state"])
        and (fnmatch(row["run"], name) or fnmatch(row["run"].partition("/")[0], name))
        and row["started"] >= since
    ]
    if args.json:
        print(json.dumps(shown, indent=2))
    elif shown:
        titles = [column.get("title", name) for name, column in COLUMNS.items()]
        print_table([titles, *map(texts, shown)], list(COLUMNS.values()))
    else:
        print(f"none of the {len(found)} runs in {root}")


def compare(runs: list[Path], as_json: bool) -> None:
    """Print figures of runs side by side, and the settings that differ, and draw their curves."""
    rows = [summarize(path, Path()) for path in runs]
    settings = [read_settings(path) for path in runs]
    keys = dict.fromkeys(key for each in settings for key in each)
    differ = [key for key in keys if len({str(each.get(key)) for each in settings}) > 1]
    if as_json:
        for row, own in zip(rows, settings, strict=True):
            row["settings"] = {key: own.get(key) for key in differ}
        return print(json.dumps(rows, indent=2))
    lines = [line for line in zip(COLUMNS, *map(texts, rows), strict=True) if any(line[1:])]
    print_table([*lines, *((key, *(str(own.get(key)) for own in settings)) for key in differ)])
    draw([str(path) for path in runs])


def texts(row: dict[str, Any]) -> list[str]:
    """Return the cells of a run."""
    cells = ((row[name], column.get("format", "")) for name, column in COLUMNS.items())
    return ["" if value is None else format(value, spec) for value, spec in cells]


def print_table(lines: Sequence[Sequence[str]], columns: Sequence[dict[str, str]] = ()) -> None:
    """Print aligned lines.

    Args:
        lines: Cells of each line.
        columns: Columns with a `format` are aligned to the right, and on a terminal the last ones
            that do not fit are left out. Empty: all columns, to the left.
    """
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    if columns and sys.stdout.isatty():
        widths[-1] = min(widths[-1], 40)  # the reason
        while len(widths) > 5 and sum(widths) + 2 * len(widths) > shutil.get_terminal_size()[0]:
            widths.pop()
    signs = [">" if "format" in column else "<" for column in columns] or ["<"] * len(widths)
    for line in lines:
        cells = zip(line, signs, widths, strict=False)
        print("  ".join(f"{text[:width]:{sign}{width}}" for text, sign, width in cells).rstrip())
