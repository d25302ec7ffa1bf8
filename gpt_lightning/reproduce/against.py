"""Any run beside a published curve, by tokens: `reproduce --against RUN CURVE`.

The published curve is interpolated linearly in the logarithm of tokens, and nowhere extended.
Equal tokens are equal data only if text, tokenizer and context are equal; tokenizers are compared.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from gpt_lightning.errors import UserError, warn
from gpt_lightning.files import Fields, numbered_folder
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.reproduce.cases import Curve
from gpt_lightning.reproduce.published import as_run, find_curve, interpolate, read_curve
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.history import find_run, read_curves
from gpt_lightning.tables.pictures import plot_runs
from gpt_lightning.tables.rows import Column, Console, Row, write_report

PICTURE = "curves.png"
CHARACTERS = 65  # tiny Shakespeare's, the text of all curves with the tokenizer char
# split -> its curve in runs/history.py, and its name
SPLITS = {
    "val": ("val", "validation loss"),
    "train": ("train_eval", "training loss, evaluated"),
    "batch": ("train", "loss of steps"),
}
LossColumn = Annotated[float, Column(".4f")]


@dataclass
class AgainstRow(Row):
    """Loss of the run, and the published curve at as many tokens."""

    split: Annotated[str, Column()]
    tokens: Annotated[float, Column(",.0f", width=13)]
    ours: LossColumn
    theirs: LossColumn
    difference: Annotated[float, Column("+.4f")]


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
    curve, path = find_curve(name), find_run(run)
    curves = read_curves(path)
    rows, line = compared(path, curves, name)
    title, folder = f"{path} against {curve.title}", numbered_folder(root)
    write_report(folder, title, machine_record(argv), {"losses": rows}, [line], [PICTURE])
    plot_runs([folder / PICTURE], {str(path): curves, name: as_run(curve)})
    console = Console(AgainstRow)
    evaluations = [row for row in rows if row.split != "batch"]  # hundreds more, in losses.csv
    print(title, console.header, *map(console.line, evaluations), sep="\n")
    print(f"{line}\n\n{folder}: results.md, losses.csv, {PICTURE}")


def compared(path: Path, curves: Fields, name: str) -> tuple[list[AgainstRow], str]:
    """Return the losses of a run beside a published curve, and the last difference in words.

    Args:
        path: Run folder.
        curves: Curves of the run.
        name: Name of the curve.

    Raises:
        UserError: The two have nothing to compare.
    """
    curve = find_curve(name)
    check_tokenizer(path, curve)
    theirs = read_curve(curve)
    rows = [
        AgainstRow(split, tokens, loss, published, loss - published)
        for split, (key, _) in SPLITS.items()
        for _, tokens, _, loss in curves[key]
        # None for tokens that are not known, too
        if loss == loss and (published := interpolate(theirs[split], tokens)) is not None
    ]
    if not rows:
        raise UserError(
            f"{path} has no loss within the tokens of {name}: train longer, or choose another curve"
        )
    end = [row for row in rows if row.split == rows[0].split][-1]
    line = (
        f"you are {end.difference:+.4f} at {end.tokens / 1e6:,.4g} M tokens "
        f"({SPLITS[end.split][1]} {end.ours:.4f}, theirs {end.theirs:.4f})"
    )
    return rows, line


def check_tokenizer(run: Path, curve: Curve) -> None:
    """Raise a UserError if a run has another tokenizer than a curve, as its checkpoint names it."""
    saved = RunPaths(run).saved()
    spec = read_checkpoint(saved[0].path, check=False).record.tokenizer if saved else None
    theirs = f"the curve's losses are per token of {curve.tokenizer}"
    if not spec:
        warn(f"{run} has no checkpoint; {theirs}")
    elif spec["name"] != curve.tokenizer:
        raise UserError(f"{run} counts tokens of {spec['name']}, but {theirs}: they do not compare")
    elif len(spec.get("characters", "")) not in (0, CHARACTERS):
        raise UserError(f"{run} has another text than the curve's: they do not compare")
