"""Published figures that are no losses: a table of each report, with a verdict where it can be had.

Sums, dtypes and GPT-2's losses on OpenWebText are compared on every machine. The others are of one
GPU: on another GPU they are measured without a verdict, elsewhere the row has the command. Times
count as equal within a half of theirs, because the reports do not have the programs.
"""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch

from gpt_lightning.bench.command import run as run_bench
from gpt_lightning.files import Fields, numbered_folder, reference_rows
from gpt_lightning.hardware.device import (
    device_kind,
    device_name,
    free_memory,
    machine_record,
)
from gpt_lightning.model.gpt import SIZES
from gpt_lightning.model.weights import SHAPE_KEYS
from gpt_lightning.reproduce.cases import REPORTS, Verdict
from gpt_lightning.tables import sweep
from gpt_lightning.tables.rows import Column, Console, Row, Text, read_report, write_report
from gpt_lightning.training.fit import run_cli

Figure = dict[str, str]  # row of reference/figures.csv
Outcome = tuple[str, str, str]  # ours, verdict, note


@dataclass
class FigureRow(Row):
    """Published figure, and ours."""

    figure: Annotated[str, Column(width=46)]
    theirs: Text
    ours: Text
    verdict: Text
    note: Text


def run_report(name: str, root: Path, argv: list[str]) -> int:
    """Print and write every figure of a report.

    Returns:
        0: No figure differs. 1: One does.
    """
    console, rows = Console(FigureRow), []
    title, source = REPORTS[name]
    print(f"{title}\n{console.header}")
    for figure in reference_rows("figures.csv", name):
        measure = {"bench": bench_of, "loss": loss_of}[figure["measure"]]
        ours, verdict, note = measure(figure)
        rows.append(FigureRow(figure["figure"], figure["published"], ours, verdict, note))
        print(console.line(rows[-1]), flush=True)
    folder = numbered_folder(root)
    write_report(folder, title, machine_record(argv), {"figures": rows}, [f"Theirs: {source}."])
    print(f"\n{folder}: results.md, results.json, figures.csv")
    return int(any(row.verdict == Verdict.FAILED for row in rows))


def bench_of(figure: Figure) -> Outcome:
    """Return a measurement of `bench`, or the command that makes it on the report's GPU."""
    command, device = f"gpt-lightning bench {figure['command']}", figure["device"]
    needed = "mps" if device.startswith("Apple") else "cuda"
    if device and device_kind() != needed:
        return "", Verdict.SKIPPED, f"needs an {device}: {command}"
    where = [condition.split("=") for condition in figure["where"].split(";") if condition]
    rows = bench_results(figure["command"])[figure["table"]]
    row = next(row for row in rows if all(str(row[key]) == value for key, value in where))
    ours, verdict, note = compare(row[figure["field"]], figure)
    if device and device not in (here := device_name(torch.device(needed))):
        verdict, note = "", f"this is {here}, theirs an {device}"
    return ours, verdict, note


def compare(found: str | float, figure: Figure) -> Outcome:
    """Return a word, or a number with its bounds, and the verdict."""
    if isinstance(found, str):
        return found, Verdict.OK if found == figure["published"] else Verdict.FAILED, ""
    if not figure["low"]:
        return f"{found:.6g}", "", "counted without a verdict"
    fits = float(figure["low"]) <= found <= float(figure["high"])
    bounds = f"from {figure['low']} to {figure['high']}"
    return f"{found:.6g}", Verdict.OK if fits else Verdict.FAILED, bounds


def loss_of(figure: Figure) -> Outcome:
    """Return the mean loss of a model on all tokens of data/openwebtext, split `val`."""
    name = figure["where"]
    shape = vars(SIZES[name])
    options = [f"--model.config.{key}={shape[key]}" for key in SHAPE_KEYS]
    options += ["--model.config.loss_chunk=1024", "--model.compile=false"]
    options += ["--data.dataset=openwebtext", "--trainer.precision=auto", "--verbose=false"]
    options += [f"--model.init_from={name}", f"--run_name={name}"]
    trainer = run_cli(["validate", *options]).trainer
    loss = float(trainer.callback_metrics[figure["field"]])
    del trainer
    free_memory()
    return compare(loss, figure)


@functools.cache
def bench_results(command: str) -> Fields:
    """Run a benchmark once and return its report."""
    run_bench(["bench", *command.split()])
    folders = (sweep.ROOT / command.split()[0]).iterdir()
    folder = max(folders, key=lambda path: path.stat().st_mtime)
    return read_report(folder)
