"""The commands `gpt-lightning runs` and `plot`: runs as a list, compared, or as a picture."""

import shutil
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from json import dumps, loads
from pathlib import Path
from typing import Literal

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, new_path
from gpt_lightning.parsing import program
from gpt_lightning.runs.history import (
    COLUMNS,
    find_run,
    find_runs,
    read_changes,
    read_curves,
    summarize,
)

PICTURES = (".png", ".svg", ".pdf")
TITLE = "gpt-lightning plot"  # stands in each picture, and another one may replace those
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
    keys = dict.fromkeys(key for each in settings for key in each)
    differ = [key for key in keys if len({str(each.get(key)) for each in settings}) > 1]
    if as_json:
        for row, own in zip(rows, settings, strict=True):
            row["settings"] = {key: own.get(key) for key in differ}
        return print_json(rows)
    lines = [line for line in zip(COLUMNS, *map(texts, rows), strict=True) if any(line[1:])]
    lines += [(key, *(str(own.get(key)) for own in settings)) for key in differ]
    print_table(lines)
    plot([str(path) for path in runs])


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
    if not runs:
        raise UserError("missing runs; `gpt-lightning plot --help` lists the options")
    folders = [find_run(address) for address in runs]
    curves = {str(folder): read_curves(folder) for folder in folders}
    if not any(run[key] for run in curves.values() for key in ("train", "train_eval", "val")):
        raise UserError(f"{folders[0]}/metrics.jsonl has no loss yet: wait, or give another run")
    for name in reference or ():
        from gpt_lightning.reproduce.published import as_run, find_curve  # it imports torch

        curves[name] = as_run(find_curve(name))
    paths = picture_paths(out, folders)
    from gpt_lightning.tables.pictures import plot_runs  # matplotlib takes half a second

    with explained("write", paths[0]):
        paths[0].parent.mkdir(parents=True, exist_ok=True)
        plot_runs(paths, curves, TITLE)
    print(f"curves      {', '.join(map(str, paths))}")


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
        check_picture(path, str(out))
    suffix = path.suffix.lower()
    if suffix[1:].isalpha() and suffix not in PICTURES:
        raise UserError(f"--out {out} ends in {path.suffix}: give {', '.join(PICTURES)}, or none")
    paths = [path] if suffix in PICTURES else [Path(f"{path}{kind}") for kind in (".png", ".svg")]
    for file in paths:
        check_picture(file, str(file))
    return paths


def check_picture(path: Path, name: str) -> None:
    """Raise a UserError with a name unless a path is free or that of an earlier picture."""
    is_picture = path.suffix.lower() in PICTURES and path.is_file() and not path.is_symlink()
    if not (is_picture and TITLE.encode() in path.read_bytes()):
        new_path("--out", name)
