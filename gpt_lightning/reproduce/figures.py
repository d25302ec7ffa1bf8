"""Published figures that are no losses: a table of each report, with a verdict where it can be had.

Sums, dtypes and GPT-2's losses on OpenWebText are compared on every machine. The others are of one
GPU: on another GPU they are measured without a verdict, elsewhere the row has the command. Times
count as equal within a half of theirs, because the reports do not have the programs.
"""

import functools
from pathlib import Path

import torch

from gpt_lightning.bench.command import run as run_bench
from gpt_lightning.data.dataset import TokenDataset
from gpt_lightning.evaluate.scoring import Scorer
from gpt_lightning.evaluate.tasks import Task
from gpt_lightning.files import Fields, numbered_folder, reference_rows
from gpt_lightning.hardware.device import (
    device_kind,
    device_name,
    free_memory,
    machine_record,
)
from gpt_lightning.hardware.precision import fastest_precision
from gpt_lightning.reproduce.cases import REPORTS
from gpt_lightning.runs.sources import load_model
from gpt_lightning.tables import sweep
from gpt_lightning.tables.rows import Console, Verdict, read_report, row_type, write_report

Figure = dict[str, str]  # row of reference/figures.csv
Outcome = tuple[str, str, str]  # ours, verdict, note
FigureRow = row_type("figure:/46 theirs ours verdict note")


def run_report(name: str, root: Path, argv: list[str]) -> int:
    """Print and write every figure of a report.

    Returns:
        0: No figure differs. 1: One does.
    """
    console, rows = Console(FigureRow), []
    title, source = REPORTS[name]
    print(f"{title}\n{console.header()}")
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
    # This raises an error before a download of gigabytes.
    TokenDataset("openwebtext", Path("data"), cache_limit_gb=20.0)
    model, tokenizer = load_model(figure["where"])
    kind = device_kind()
    dtype = torch.bfloat16 if fastest_precision(kind)[0] == "bf16-mixed" else None
    scorer = Scorer(model.to(kind), tokenizer, dtype=dtype)
    metrics = Task("perplexity", scorer, text="openwebtext").run().metrics
    del model, scorer
    free_memory()
    return compare(next(m.value for m in metrics if m.name == figure["field"]), figure)


@functools.cache
def bench_results(command: str) -> Fields:
    """Run a benchmark once and return its report."""
    run_bench(["bench", *command.split()])
    folders = (sweep.ROOT / command.split()[0]).iterdir()
    folder = max(folders, key=lambda path: path.stat().st_mtime)
    return read_report(folder)
