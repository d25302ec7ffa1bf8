"""Page, picture and ledger of the speedrun's records.

    python -m experiments.speedrun.page

writes the pages of all records again, which a change of the model or of a configuration makes
necessary: a page names what has changed since its runs.
"""

import dataclasses
import functools
import hashlib
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

from experiments.speedrun.tracks import (
    NANOGPT,
    RECORDS,
    RULES,
    Figures,
    Result,
    Seconds,
    SeedRow,
    Track,
)
from gpt_lightning.files import explained, write_atomic
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.reproduce.published import find_curve, read_curve
from gpt_lightning.tables.pictures import LOSSES_COLUMNS, LOSSES_WIDTH_IN, styled
from gpt_lightning.tables.rows import (
    Console,
    Grouped,
    Row,
    TenThousandths,
    Tenths,
    Text,
    Whole,
    markdown,
)

LEDGER = "ledger.yaml"
WAYS = {f"nanoGPT_{way.replace(' ', '_')}": way for way in NANOGPT["cpu"]}
fill = functools.partial(textwrap.fill, width=100, break_on_hyphens=False)


@dataclasses.dataclass
class NanogptRow(Row):
    """Time of nanoGPT in one way."""

    nanoGPT: Text
    step_s: TenThousandths
    steps: Grouped
    time_s: Whole
    times_as_long: Tenths


@dataclasses.dataclass
class LedgerRow(Row):
    """Record, with the time of nanoGPT in the two ways that tracks.yaml has for a CPU."""

    track: Text
    device: Text
    date: Text
    commit: Text
    seeds: Text
    loss: TenThousandths
    bound: TenThousandths
    time_s: Seconds
    nanoGPT_eager_float32_s: Whole
    nanoGPT_eager_float32_ratio: Tenths
    nanoGPT_compiled_bfloat16_s: Whole
    nanoGPT_compiled_bfloat16_ratio: Tenths
    change: Text
    gain: Text
    changed_since: Text


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
    breaches = [*breaches, *result.shortfalls()]
    is_record = not breaches and change is not None
    folder = out if is_record else root
    stem = f"{result.track.name}-{result.device}"
    with explained("write", folder):
        folder.mkdir(parents=True, exist_ok=True)
        plot(result, folder / f"{stem}.png")
        data = {"machine": machine, "digests": digests(result.track.config)}
        data |= dataclasses.asdict(result) | {"figures": result.figures()}
        write_atomic(folder / f"{stem}.json", (json.dumps(data, indent=2) + "\n").encode())
        write_atomic(folder / f"{stem}.md", page(data, f"{stem}.png").encode())
        if is_record:
            enter(result, str(change), machine, out)
    for breach in breaches:
        print(f"no record   {breach}")
    if change is None and not breaches:
        print("no record   give --change TEXT, what the record changes, to enter the ledger")
    print(f"page        {folder / stem}.md")


def page(data: Figures, picture: str) -> str:
    """Return the page of a result as Markdown.

    Args:
        data: Contents of its .json file.
        picture: Name of its picture.
    """
    rows, track = [SeedRow(**row) for row in data["rows"]], Track(**data["track"])
    rest = {name: data[name] for name in ("device", "nanogpt_step_s", "breaches")}
    result = Result(track=track, rows=rows, **rest)
    figures, machine = result.figures(), data["machine"]
    blocks = [
        f"# Shakespeare speedrun: {track.title}, {result.device}",
        f"```\n{machine['command']}\n```",
        ". ".join(machine[key] for key in ("date", "CPU", "memory", "software")) + ".",
        markdown(rows, list(Console(SeedRow).columns)).rstrip(),
        f"Mean loss {figures['loss']:.4f}, worst {figures['worst_loss']:.4f}, over the whole "
        f"validation split. Mean time {figures['time_s']:.1f} s, worst "
        f"{figures['worst_time_s']:.1f} s: everything after the imports and the arguments, with "
        "compilation from an empty cache, without validations.",
    ]
    if since := changed_since(data):
        blocks.insert(
            2,
            f"**Changed since: {since}.** Commit {commit_of(machine)} has what this page measures. "
            "The files of today may have other figures.",
        )
    if "bound" in figures:
        blocks[-1] += f" The mean loss is below {figures['bound']:.4f} with p < 0.01."
    if result.nanogpt_step_s:
        blocks.append(
            "nanoGPT's time is the steps until its published log has reached the loss (on best: "
            "its own lowest, 1.4673), each of its median time, measured in turn with the runs."
        )
        beside = [
            NanogptRow(way, step_s, track.steps, time_s, time_s / figures["time_s"])
            for (way, step_s), time_s in zip(
                result.nanogpt_step_s.items(), figures["nanogpt_s"].values(), strict=True
            )
        ]
        blocks.append(markdown(beside).rstrip())
    blocks.append(f"![loss over wall time]({picture})")
    items = (f"- No record: {text}." for text in [*result.breaches, *result.shortfalls()])
    blocks.append("\n".join(fill(item, subsequent_indent="  ") for item in items))
    # tables and code are as wide as they are
    filled = (block if block[:1] in "|`-" else fill(block) for block in blocks)
    return "\n\n".join(filled).rstrip() + "\n"


def digests(config: str) -> dict[str, str]:
    """Return the digests of the model's source and of a configuration.

    Comments, docstrings and white space do not count.
    """
    found = {}
    for name, file in {"the model": "model.py", "the configuration": f"{config}.yaml"}.items():
        text = Path(__file__).with_name(file).read_text("utf-8")
        code = re.sub(r'"""[\s\S]*?"""|#.*', "", text).split()
        found[name] = hashlib.sha256(" ".join(code).encode()).hexdigest()
    return found


def changed_since(data: Figures) -> str:
    """Return which files of a record have changed since its runs, in words; empty if none has."""
    now = digests(data["track"]["config"])
    return " and ".join(name for name in now if now[name] != data["digests"][name])


@styled
def plot(result: Result, path: Path) -> None:
    """Draw the losses over wall time, with nanoGPT's published losses at the time of its steps."""
    runs: dict[str, Any] = {f"seed {row.seed}": row.curve for row in result.rows}
    curve = find_curve(result.track.curve)
    published = [(n / curve.tokens_per_step, loss) for n, loss in read_curve(curve)["val"] if n]
    for way, step_s in result.nanogpt_step_s.items():
        points = [(step * step_s, loss) for step, loss in published]
        runs[f"nanoGPT, published losses, {way} here"] = points
    figure = Figure(figsize=(LOSSES_WIDTH_IN, 4.8))
    axes = figure.subplots()
    for label, points in runs.items():
        axes.plot(*zip(*points, strict=True), "o-", ms=3, lw=1, label=label)
    target = result.track.target
    axes.axhline(target, color="0.3", ls=":", lw=1, label=f"{target:g}")
    axes.set(xlabel="wall time (s)", ylabel="validation loss (nats per character)", xscale="log")
    axes.set_title(textwrap.fill(result.track.title, LOSSES_COLUMNS))
    axes.grid(True, which="both")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path)


# ---- ledger --------------------------------------------------------------------------------------


def enter(result: Result, change: str, machine: dict[str, str], out: Path) -> None:
    """Append a record to the ledger, and write the ledger's page."""
    path = out / LEDGER
    records = read_ledger(path)
    facts = {"track": result.track.name, "device": result.device, "date": machine["date"]}
    facts |= {"machine": machine["CPU"], "commit": commit_of(machine)}
    seeds = sorted(row.seed for row in result.rows)
    change = " ".join(change.split()).replace("|", "/")  # a cell of a table
    records.append({**facts, "seeds": seeds, **result.figures(), "change": change})
    write_atomic(path, yaml.safe_dump(records, sort_keys=False, default_flow_style=None).encode())
    write_atomic(out / "README.md", ledger_page(out).encode())


def read_ledger(path: Path) -> list[Figures]:
    """Return the records of a ledger, oldest first; none if there is no file."""
    return yaml.safe_load(path.read_text("utf-8")) if path.exists() else []


def not_better(result: Result, machine: dict[str, str], ledger: Path) -> list[str]:
    """Return that the newest record of the track on this machine is as good or better, if it is.

    A record of seeds that were used for tuning does not count.
    """
    key = "loss" if result.track.name == "best" else "time_s"
    own = {"track": result.track.name, "device": result.device, "machine": machine["CPU"]}
    records = (r for r in read_ledger(ledger) if min(r["seeds"]) >= RULES["first_seed"])
    before = [r for r in records if own.items() <= r.items()]
    value = result.figures()[key]
    if not before or value < before[-1][key]:
        return []
    return [f"the mean {key} is {value:.4f}; the record here has {before[-1][key]:.4f}"]


def commit_of(machine: dict[str, str]) -> str:
    """Return the commit of the package, or its version outside of a checkout."""
    version = machine["software"].split(",")[0]
    return version.partition("(")[2].rstrip(")") or version


def ledger_page(out: Path) -> str:
    """Return the ledger of a folder as Markdown: each record, and its gain over the one before."""
    rows, before = [], dict[str, Figures]()
    for record in read_ledger(out / LEDGER):
        stem = f"{record['track']}-{record['device']}"
        data = json.loads((out / f"{stem}.json").read_text("utf-8"))
        values = record | {"track": f"[{record['track']}]({stem}.md)"}
        values |= {"seeds": ", ".join(map(str, record["seeds"]))}
        values |= {"gain": gain(record, before.get(stem + record["machine"]))}
        if record["date"] == data["machine"]["date"]:  # the newest, whose page there is
            values |= {"changed_since": changed_since(data)}
        for name, way in WAYS.items():
            if seconds := record["nanogpt_s"].get(way):
                values |= {f"{name}_s": seconds, f"{name}_ratio": seconds / record["time_s"]}
        rows.append(LedgerRow.of(values))
        before[stem + record["machine"]] = record
    about = (
        "Each track and device has a page of its newest record. The rules: "
        "[README.md](../README.md). Written by `python -m experiments.speedrun`. Machines are on "
        "the pages. The mean loss is below its bound with p < 0.01. An empty time of nanoGPT was "
        "not measured. The gain is over the record before on the same track and machine. Changed "
        "since: files that are not those of the record any more."
    )
    return f"# Records of the Shakespeare speedrun\n\n{fill(about)}\n\n{markdown(rows)}"


def gain(record: Figures, before: Figures | None) -> str:
    """Return what a record gains over the record before it on its track."""
    if before is None:
        return "the first"
    if record["track"] == "best":
        return f"loss {record['loss'] - before['loss']:+.4f}"
    return f"{before['time_s'] / record['time_s']:.2f} times faster"


def rewrite(out: Path) -> None:
    """Write the pages of a folder's records and its ledger's page again."""
    for path in out.glob("*-*.json"):
        text = page(json.loads(path.read_text("utf-8")), f"{path.stem}.png")
        write_atomic(path.with_suffix(".md"), text.encode())
    write_atomic(out / "README.md", ledger_page(out).encode())


if __name__ == "__main__":
    rewrite(RECORDS)
