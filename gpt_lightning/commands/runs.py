"""The commands `runs`, `plot` and `report`: runs as a list, compared, as a picture or a page."""

import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatch
from json import dumps, loads
from math import isfinite, isnan
from pathlib import Path
from typing import Literal

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, new_path, write_atomic
from gpt_lightning.parsing import program
from gpt_lightning.runs.history import (
    COLUMNS,
    find_run,
    find_runs,
    read_changes,
    read_curves,
    read_events,
    summarize,
)
from gpt_lightning.tables.rows import short_names

PICTURES = (".png", ".svg", ".pdf")
SAMPLES = 24  # samples on a page
POINTS = 8_000  # points of all curves of a page, some 40 bytes each
PAGE_BYTES = 1_000_000
NOT_WRITTEN = "not known: the run has no timeline.jsonl"
TITLE = "gpt-lightning plot"  # stands in each picture, and another one may replace those
MARK = 'name="generator" content="gpt-lightning report"'  # the same for pages
State = Literal["running", "finished", "stopped", "failed", "killed", "unknown", "damaged"]


def runs(
    folders: list[str],
    state: State | None = None,
    name: str = "*",
    json: bool = False,
) -> None:
    """List the runs in a folder by the time of their start, or compare several runs.

    Args:
        folders: A folder; without one lightning_logs. Several runs are compared.
        state: Only runs in this state.
        name: Only runs of this name, such as 'quick*'.
        json: Print JSON.
    """
    if len(folders) > 1:
        return compare([find_run(address) for address in folders], json)
    root = Path(*folders or ["lightning_logs"])
    if folders and not (folders[0] and root.is_dir()):
        raise UserError(f"{folders[0]!r} is no folder: give one of runs, such as lightning_logs")
    found = [summarize(path, root) for path in find_runs(root)]
    if not found:
        raise UserError(f"no run in {root}: train one, `{program()} fit --config quickstart`")
    pattern = name.replace("[", "[[]") + "/*"  # no class of characters: a name may have brackets
    shown = [
        row
        for row in sorted(found, key=lambda row: (row["started"], row["run"]))
        if state in (None, row["state"]) and fnmatch(f"{row['run']}/", pattern)
    ]
    if json:
        print_json(shown)
    elif shown:
        titles = [column.get("title", name) for name, column in COLUMNS.items()]
        print_table([titles, *map(texts, shown)], list(COLUMNS.values()))
    else:
        print(f"none of the {len(found)} runs in {root}")


def compare(runs: list[Path], as_json: bool) -> None:
    """Print figures of runs side by side, and the settings that differ, and draw their curves."""
    rows = [summarize(path, Path()) for path in runs]
    settings = [read_changes(path) for path in runs]
    differ = [line for line in lines_of(settings) if len({*line[1:]}) > 1]
    if as_json:
        for row, own in zip(rows, settings, strict=True):
            row["settings"] = {key: own.get(key) for key, *_ in differ}
        return print_json(rows)
    lines = [line for line in zip(COLUMNS, *map(texts, rows), strict=True) if any(line[1:])]
    print_table([*lines, *differ])
    plot([str(path) for path in runs])


def lines_of(runs: Sequence[Fields], missing: str | None = None) -> list[tuple[str, ...]]:
    """Return for each key of some runs a line of the key and the runs' values."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [(key, *(str(run.get(key, missing)) for run in runs)) for key in keys]


def print_json(rows: list[Fields]) -> None:
    """Print rows as JSON, with null for what it has no number for."""
    plain = loads(dumps(rows, default=str), parse_constant=lambda word: None)
    print(dumps(plain, indent=2))


def texts(row: Fields) -> list[str]:
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
    hidden = ", ".join(lines[0][len(widths) :])
    if hidden:
        print(f"not shown: {hidden}; --json has all")


# ---- pictures ------------------------------------------------------------------------------------


def plot(runs: list[str], out: str | None = None, reference: list[str] | None = None) -> None:
    """Draw losses of runs over steps, tokens and wall time, their speed and its stalls.

    Args:
        runs: Run folders, or folders of runs, of which the newest run is taken.
        out: Picture, .png, .svg or .pdf; without a suffix .png and .svg; or a folder. null: in the
            first run. An earlier picture is replaced, and no other file.
        reference: Published curves to draw beside the runs, such as nanogpt-shakespeare-char.
            Repeat the option for several.
    """
    folders, curves = drawn("plot", runs, reference)
    paths = picture_paths(out, folders)
    from gpt_lightning.tables.pictures import plot_runs  # matplotlib takes half a second

    plot_runs(paths, curves, TITLE)
    print(f"curves      {', '.join(map(str, paths))}")


def drawn(
    command: str, runs: list[str], reference: list[str] | None
) -> tuple[list[Path], dict[str, Fields]]:
    """Return the folders of runs, and their curves and the published ones by folder or name.

    Args:
        command: Name of the command that draws them.
        runs: Runs of the command line.
        reference: Names of published curves.

    Raises:
        UserError: A run or a curve does not exist, or the runs have no loss.
    """
    if not runs:
        raise UserError(f"missing runs; `gpt-lightning {command} --help` lists the options")
    folders = list(dict.fromkeys(find_run(address) for address in runs))
    curves = {str(folder): read_curves(folder) for folder in folders}
    if not any(run[key] for run in curves.values() for key in ("train", "train_eval", "val")):
        raise UserError(f"{folders[0]}/metrics.jsonl has no loss yet: wait, or give another run")
    for name in reference or ():
        from gpt_lightning.reproduce.published import as_run, find_curve  # it imports torch

        curves[name] = as_run(find_curve(name))
    return folders, curves


def picture_paths(out: str | None, folders: list[Path]) -> list[Path]:
    """Return the files of a picture.

    Args:
        out: Value of --out.
        folders: Runs in the picture.

    Raises:
        UserError: A file is there that is no earlier picture, or `out` has another suffix.
    """
    path = folders[0] if out is None else Path(out)
    if path.is_dir() or str(out).endswith("/"):
        path /= "compared" if len(folders) > 1 else "curves"
    else:
        check_earlier(path, str(out), PICTURES, TITLE)
    suffix = path.suffix.lower()
    if suffix[1:].isalpha() and suffix not in PICTURES:
        raise UserError(f"--out {out} ends in {path.suffix}: give {', '.join(PICTURES)}, or none")
    paths = [path] if suffix in PICTURES else [Path(f"{path}{kind}") for kind in (".png", ".svg")]
    for file in paths:
        check_earlier(file, str(file), PICTURES, TITLE)
    return paths


def check_earlier(path: Path, name: str, suffixes: Sequence[str], mark: str) -> None:
    """Raise a UserError with a name unless a path is free or that of an earlier file of ours.

    Args:
        path: File to write.
        name: Name in the error message.
        suffixes: Suffixes that such a file may have.
        mark: Text in each such file.
    """
    may_be = path.suffix.lower() in suffixes and path.is_file() and not path.is_symlink()
    if not (may_be and mark.encode() in path.read_bytes()):
        new_path("--out", name, suffixes[0] if len(suffixes) == 1 else "")


# ---- pages ---------------------------------------------------------------------------------------


def report(runs: list[str], out: str | None = None, reference: list[str] | None = None) -> None:
    """Write a page about runs, one HTML file that needs no network.

    It has losses over steps, tokens and wall time, speed, phases, samples, settings, commands and
    machines.

    Args:
        runs: Run folders, or folders of runs, of which the newest run is taken.
        out: File, .html, or a folder. null: in the first run. An earlier page is replaced, and no
            other file.
        reference: Published curves to draw and to compare with, such as nanogpt-shakespeare-char.
            Repeat the option for several.
    """
    folders, curves = drawn("report", runs, reference)
    name = str(folders[0]) if out is None else out
    if Path(name).is_dir() or name.endswith("/"):
        name = f"{name.rstrip('/')}/{'compared' if len(folders) > 1 else 'report'}.html"
    check_earlier(Path(name), name, (".html",), MARK)
    data = facts_of(folders, curves, reference or [])
    most = POINTS // (6 * len(curves))
    data["names"] = short_names(list(curves))
    data["curves"] = [
        {key: extremes(run[key], most) for key in run if key != "phases"} for run in curves.values()
    ]
    # no "</script>" may end the data, and < stands in texts alone
    text = dumps(data, ensure_ascii=False, allow_nan=False).replace("<", r"\u003c")
    page = Path(__file__).with_name("report.html").read_text(encoding="utf-8")
    content = page.replace("REPORT_DATA", text).encode(errors="replace")
    if len(content) > PAGE_BYTES:
        raise UserError(f"a page of {len(folders)} runs is above 1 MB: give fewer runs")
    write_atomic(Path(name), content)
    print(f"report      {name}")


def facts_of(folders: list[Path], curves: dict[str, Fields], reference: list[str]) -> Fields:
    """Return the content of a page beside its curves.

    Args:
        folders: Runs.
        curves: Curves of the runs, and published ones.
        reference: Names of the published curves.
    """
    rows = [summarize(path, Path()) for path in folders]
    settings = lines_of([read_changes(path) for path in folders])
    facts = [read_changes(path, "facts") or {"command": NOT_WRITTEN} for path in folders]
    verdicts = [verdicts_of(path, curves[str(path)], reference) for path in folders]
    return {
        "runs": len(folders),
        "tables": {
            "Results": [*zip(COLUMNS, *map(texts, rows), strict=True)],
            "What was trained, by which command, on which machine": lines_of(facts, ""),
            "Settings that differ": [line for line in settings if len({*line[1:]}) > 1],
            "Beside published curves": lines_of(verdicts, ""),
            "Wall time": lines_of([seconds_of(path) for path in folders], ""),
            "All settings": settings,
        },
        "samples": [samples_of(path, max(2, SAMPLES // len(folders))) for path in folders],
    }


def samples_of(path: Path, most: int) -> list[tuple[int, str]]:
    """Return steps and beginnings of at most some samples of a run, the last one among them."""
    found = [event for event in read_events(path) if event["event"] == "sample"]
    spread = found[:: -(len(found) // most) - 1]  # the last one first
    return [(event["step"], event["text"][:2000]) for event in reversed(spread)]


def seconds_of(path: Path) -> dict[str, str]:
    """Return the wall time of a run by phase; a session without an end has no time of training."""
    seconds, session = Counter[str](), Counter[str]()
    for event in [*read_events(path), {"event": "begin"}]:
        if event["event"] == "phase":
            session[event["name"]] += event["seconds"]
        elif event["event"] in ("begin", "end"):
            seconds.update(event.get("seconds") or session)
            session.clear()
    return {name: f"{s:,.1f} s, {s / (seconds.total() or 1):.1%}" for name, s in seconds.items()}


def verdicts_of(path: Path, run: Fields, reference: list[str]) -> dict[str, str]:
    """Return how far off a run is from published curves, by their names."""
    found = {}
    for name in reference:
        from gpt_lightning.reproduce.against import compared  # it imports torch

        try:
            found[name] = compared(path, run, name)[1]
        except UserError as error:  # the two do not compare, which is a verdict, too
            found[name] = str(error)
    return found


def extremes(points: Sequence[Sequence[float]], most: int) -> list[list[float | None]]:
    """Return the lowest and the highest point of each group of points, and its first NaN.

    Args:
        points: Points of a curve, of which the first and the last one are kept.
        most: Largest number of points, about.

    Returns:
        Points of at most 9 digits, with None for NaN.
    """
    size = 3 * len(points) // max(most, 8) + 1
    kept = {*range(len(points))[-1:]}
    for start in range(0, len(points), size):
        losses = {i: points[i][3] for i in range(len(points))[start : start + size]}
        kept.add(max(losses, key=lambda i: isnan(losses[i])))
        kept.add(min(losses, key=lambda i: (isnan(losses[i]), losses[i])))
        kept.add(max(losses, key=lambda i: (not isnan(losses[i]), losses[i])))
    chosen = [points[i] for i in sorted(kept)]
    return [[float(f"{x:.9g}") if isfinite(x) else None for x in point] for point in chosen]
