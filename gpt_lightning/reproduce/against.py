"""Any run beside a published curve, by tokens: `reproduce --against RUN CURVE`.

The published curve is interpolated linearly in the logarithm of tokens, and nowhere extended.
Equal tokens are equal data only if text, tokenizer and context are equal; tokenizers are compared.
"""

import math
import sys
from pathlib import Path
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.files import numbered_folder
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.reproduce.cases import Curve
from gpt_lightning.reproduce.published import Points, as_run, find_curve, interpolate, read_curve
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.history import find_run, read_curves
from gpt_lightning.tables.pictures import plot_runs
from gpt_lightning.tables.rows import Console, Row, column, row_type, write_report

PICTURE = "curves.png"
SPLITS = {"val": "validation loss", "train": "training loss, evaluated", "batch": "loss of steps"}


# one loss of the run, and the published curve at as many tokens
AgainstRow = row_type(
    "split tokens ours:.4f theirs:.4f difference:+.4f", tokens=column("tokens", ",.0f", 13)
)


def compare_run(run: str, name: str, root: Path, argv: list[str]) -> None:
    """Print and write the losses of a run beside a published curve.

    Args:
        run: Run folder, or a folder of runs `version_N`, of which the newest is taken.
        name: Name of the curve.
        root: Folder in which the folder of the results is made.
        argv: Command line, for the report.

    Raises:
        UserError: There is no such curve or run, or the two have nothing to compare.
    """
    curve = find_curve(name)
    path = find_run(run)
    check_tokenizer(path, curve)
    curves = read_curves(path)
    ours, theirs = read_run(curves, path), read_curve(curve)
    rows = compare(ours, theirs)
    if not rows:
        ends = [points[-1][0] for points in theirs.values() if points]
        raise UserError(
            f"{path} has no loss within the tokens of {name}, {curve.tokens_per_step:,} (its first "
            f"step) to {max(ends):,.0f}: train longer, or choose another curve"
        )
    last = [row for row in rows if row.split == rows[0].split][-1]
    line = (
        f"you are {last.difference:+.4f} at {last.tokens / 1e6:,.4g} M tokens "
        f"({SPLITS[last.split]} {last.ours:.4f}, theirs {last.theirs:.4f})"
    )
    title = f"{path} against {curve.title}"
    folder = numbered_folder(root)
    write_report(folder, title, machine_record(argv), {"losses": rows}, [line], [PICTURE])
    plot_runs([folder / PICTURE], {str(path): curves, name: as_run(curve)})
    console = Console(AgainstRow)
    print(f"{title}\n{console.header()}")
    for row in rows:
        if row.split != "batch":  # hundreds, in losses.csv
            print(console.line(row))
    print(f"{line}\n\n{folder}: results.md, losses.csv, {PICTURE}")


def check_tokenizer(run: Path, curve: Curve) -> None:
    """Raise a UserError if a run has another tokenizer than a curve, as its checkpoint names it."""
    saved = RunPaths(run).saved()[:1]
    specs = [read_checkpoint(checkpoint.path, check=False).record.tokenizer for checkpoint in saved]
    names = [spec["name"] for spec in specs if spec]
    theirs = f"the curve's losses are per token of {curve.tokenizer}"
    if not names:
        print(f"warning: {run} has no checkpoint; {theirs}", file=sys.stderr)
    elif names[0] != curve.tokenizer:
        raise UserError(f"{run} counts tokens of {names[0]}, but {theirs}: they do not compare")


def read_run(curves: dict[str, Any], path: Path) -> Points:
    """Return the losses of a run by tokens.

    Args:
        curves: Curves of the run, from read_curves.
        path: Run folder, for errors.

    Raises:
        UserError: The run counts no tokens.
    """
    counted = (tokens for key in ("train", "val") for _, tokens, *_ in curves[key])
    if all(map(math.isnan, counted)):
        raise UserError(f"{path} has no perf/tokens: the run ended before its first log step")
    keys = {"val": "val", "train": "train_eval", "batch": "train"}
    found = {split: [(t, loss) for _, t, _, loss in curves[key]] for split, key in keys.items()}
    return {split: [p for p in points if p[1] == p[1]] for split, points in found.items()}  # no NaN


def compare(ours: Points, theirs: Points) -> list[Row]:
    """Return a row for each of our losses within the tokens of the published ones."""
    return [
        AgainstRow(split, tokens, loss, published, loss - published)
        for split in SPLITS
        for tokens, loss in ours[split]
        if (published := interpolate(theirs[split], tokens)) is not None
    ]
