"""Page, picture and ledger of the speedrun's records."""

import dataclasses
import functools
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from experiments.speedrun.tracks import Result, SeedRow
from gpt_lightning.files import explained, write_atomic
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.reproduce.published import find_curve, read_curve
from gpt_lightning.tables.pictures import LOSSES_COLUMNS, LOSSES_WIDTH_IN, styled
from gpt_lightning.tables.rows import Console, column, markdown

LEDGER = "ledger.yaml"
Figures = dict[str, Any]
fill = functools.partial(textwrap.fill, width=100, break_on_hyphens=False)


@dataclasses.dataclass(frozen=True)
class LedgerRow:
    """Record in the ledger."""

    track: str = column("track")
    device: str = column("device")
    date: str = column("date")
    commit: str = column("commit")
    seeds: int = column("seeds", "d")
    loss: float = column("mean loss", ".4f")
    worst_loss: float = column("worst", ".4f")
    time_s: float = column("mean time s", ".1f")
    worst_time_s: float = column("worst s", ".1f")
    nanogpt_s: float = column("nanoGPT s", ",.0f")
    ratio: float = column("times faster", ".1f")
    change: str = column("what it changes")
    gain: str = column("gain over the record before")


def write(result: Result, change: str | None, out: Path, root: Path, command: str) -> None:
    """Write the page, the picture and the data of a result, and enter a record in the ledger.

    Args:
        result: The runs.
        change: Change of the record in words. None: the files go to `root`, and not into the
            ledger.
        out: Folder of the record pages.
        root: Folder of the runs.
        command: Command line, for the page.

    Raises:
        UserError: A file cannot be written.
    """
    command = re.sub(r"--nanogpt[= ]\S+", "--nanogpt nanoGPT", command)
    machine = machine_record([]) | {"command": command}
    breaches = [*result.breaches, *not_better(result, machine, out / LEDGER)]
    result = dataclasses.replace(result, breaches=breaches)
    is_record = not breaches and change is not None
    folder = out if is_record else root
    stem = f"{result.track.name}-{result.device}"
    with explained("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        plot(result, folder / f"{stem}.png")
        write_atomic(folder / f"{stem}.md", page(result, machine, f"{stem}.png").encode())
        data = {"machine": machine, **dataclasses.asdict(result), "figures": result.figures()}
        write_atomic(folder / f"{stem}.json", (json.dumps(data, indent=2) + "\n").encode())
        if is_record:
            enter(result, str(change), machine, out)
    for breach in result.breaches:
        print(f"no record   {breach}")
    if change is None and not result.breaches:
        print("no record   give --change TEXT, what the record changes, to enter the ledger")
    print(f"page        {folder / stem}.md")


def page(result: Result, machine: dict[str, str], picture: str) -> str:
    """Return the page of a result as Markdown."""
    figures = result.figures()
    lines = [f"# Shakespeare speedrun: {result.track.title}, {result.device}", ""]
    lines += ["```", machine["command"], "```", ""]
    facts = ". ".join(machine[key] for key in ("date", "CPU", "memory", "software"))
    lines += [fill(f"{facts}."), ""]
    lines += [markdown(result.rows, [field.name for field in Console(SeedRow).fields])]
    lines += [
        fill(
            f"Mean loss {figures['loss']:.4f}, worst {figures['worst_loss']:.4f}, over the whole "
            f"validation split. Mean time {figures['time_s']:.1f} s, worst "
            f"{figures['worst_time_s']:.1f} s: everything after the imports and the arguments, "
            "with compilation from an empty cache, without validations."
        ),
        "",
    ]
    if "nanogpt_s" in figures:
        lines += [
            fill(
                f"nanoGPT: {result.track.steps:,} steps of its published log, "
                f"{result.nanogpt_step_s or 0:.4f} s each (median, measured in turn): "
                f"{figures['nanogpt_s']:,.0f} s, "
                f"{figures['nanogpt_s'] / figures['time_s']:.1f} times as long."
            ),
            "",
        ]
    lines += [f"![loss over wall time]({picture})", ""]
    lines += [f"- No record: {breach}." for breach in result.breaches]
    return "\n".join(lines).rstrip() + "\n"


def plot(result: Result, path: Path) -> None:
    """Draw the losses over wall time, with nanoGPT's published losses at the time of its steps."""
    runs = {f"seed {row.seed}": row.curve for row in result.rows}
    if result.nanogpt_step_s is not None:
        curve = find_curve(result.track.curve)
        step_s = result.nanogpt_step_s / curve.tokens_per_step
        points = [(tokens * step_s, loss) for tokens, loss in read_curve(curve)["val"] if tokens]
        runs["nanoGPT, published losses at the steps' time here"] = points
    plot_times(path, result.track.title, runs, result.track.target)


# ---- ledger --------------------------------------------------------------------------------------


def enter(result: Result, change: str, machine: dict[str, str], out: Path) -> None:
    """Append a record to the ledger, and write the ledger's page."""
    path = out / LEDGER
    records = read_ledger(path)
    facts = {"track": result.track.name, "device": result.device, "date": machine["date"]}
    facts |= {"machine": machine["CPU"], "commit": commit_of(machine)}
    figures = {name: round(value, 4) for name, value in result.figures().items()}
    change = " ".join(change.split()).replace("|", "/")  # a cell of a table
    records.append({**facts, "seeds": len(result.rows), **figures, "change": change})
    write_atomic(path, yaml.safe_dump(records, sort_keys=False, width=100).encode())
    write_atomic(out / "README.md", ledger_page(records).encode())


def read_ledger(path: Path) -> list[Figures]:
    """Return the records of a ledger, oldest first; none if there is no file."""
    return yaml.safe_load(path.read_text("utf-8")) if path.exists() else []


def not_better(result: Result, machine: dict[str, str], ledger: Path) -> list[str]:
    """Return that the newest record of the track on this machine is as good or better, if it is."""
    key = "loss" if result.track.name == "best" else "time_s"
    own = {"track": result.track.name, "device": result.device, "machine": machine["CPU"]}
    before = [r for r in read_ledger(ledger) if own.items() <= r.items()]
    value = result.figures()[key]
    if not before or value < before[-1][key]:
        return []
    return [f"the mean {key} is {value:.4f}; the record here has {before[-1][key]}"]


def commit_of(machine: dict[str, str]) -> str:
    """Return the commit of the package, or its version outside of a checkout."""
    version = machine["software"].split(",")[0]
    return version.partition("(")[2].rstrip(")") or version


def ledger_page(records: Sequence[Figures]) -> str:
    """Return the ledger as Markdown: each record, and its gain over the one before."""
    rows, before = [], dict[tuple[str, str], Figures]()
    for record in records:
        track = record["track"], record["device"]
        ratio = record["nanogpt_s"] / record["time_s"]
        own = {key: value for key, value in record.items() if key != "machine"}
        own["track"] = "[{0}]({0}-{1}.md)".format(*track)
        rows.append(LedgerRow(**own, ratio=ratio, gain=gain(record, before.get(track))))
        before[track] = record
    about = (
        "Each track and device has a page of its newest record. The rules: "
        "[README.md](../README.md). Written by `python -m experiments.speedrun`. Machines are on "
        "the pages. The last column compares with the record before on the same track."
    )
    return f"# Records of the Shakespeare speedrun\n\n{fill(about)}\n\n{markdown(rows)}"


def gain(record: Figures, before: Figures | None) -> str:
    """Return what a record gains over the record before it on its track."""
    if before is None:
        return "the first"
    if record["track"] == "best":
        return f"loss {record['loss'] - before['loss']:+.4f}"
    return f"{before['time_s'] / record['time_s']:.2f} times faster"


@styled
def plot_times(
    path: Path, title: str, runs: dict[str, Sequence[tuple[float, float]]], target: float
) -> None:
    """Draw losses over wall time, with a logarithmic axis of seconds and a line at the target.

    Args:
        path: A .png file.
        title: Title of the picture.
        runs: Label -> (seconds, loss in nats).
        target: Loss of the line.
    """
    figure = Figure(figsize=(LOSSES_WIDTH_IN, 4.8))
    axes = figure.subplots()
    for label, points in runs.items():
        seconds, losses = zip(*points, strict=True) if points else ((), ())
        axes.plot(seconds, losses, "o-", ms=3, lw=1, label=label)
    axes.axhline(target, color="0.3", ls=":", lw=1, label=f"{target:g}")
    axes.set(xlabel="wall time (s)", ylabel="validation loss (nats per character)", xscale="log")
    axes.set_title(textwrap.fill(title, LOSSES_COLUMNS))
    axes.grid(True, which="both")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path)
