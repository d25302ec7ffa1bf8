"""Measure the pages of this folder that take minutes, and compare them with their last measurement.

    python benchmarks/pages.py            all pages (`make pages`)
    python benchmarks/pages.py dtypes     some of them
    python benchmarks/pages.py --index    none: what has changed since, in README.md

Each page of PAGES is written by this script alone. It begins with its commands, commit, date and
machine. The rows behind it are in rows/NAME.json. Losses, counts and sizes of tensors are compared
on every machine. Times are compared on the machine that the page names, when both measurements were
taken on an idle machine; elsewhere their ratios are printed. The commands of CHECKS compare losses
with published ones themselves. The exit code is 1 if a comparison fails.
"""

import argparse
import contextlib
import json
import os
import re
import runpy
import shutil
import statistics
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt_lightning.bench.command import find_benches, import_bench
from gpt_lightning.tables.ledger import Ledger, identity
from gpt_lightning.tables.rows import RESULTS, Console, markdown
from gpt_lightning.tables.sweep import Bench

HERE = Path(__file__).resolve().parent
STORE = HERE / "rows"
IDLE = 0.5  # load average before a measurement; above it times are not compared
FACTOR = 1.25  # largest ratio of two times on the same machine
LOSS = 1e-3  # absolute; a loss in bfloat16 depends on the number of threads
SIZE = 0.02  # relative, of tensors
EXACT = ("products_calls", "products_outside_calls", "graphs", "replaced", "sum")
CODE = [f"gpt_lightning/{room}" for room in ("model", "training", "data")]  # figures depend on it
MACHINE = ("device", "CPU", "memory", "software")


@dataclass(frozen=True)
class Page:
    """Page that this script writes.

    Attributes:
        title: First words of the page.
        commands: Commands, without `gpt-lightning bench`; each becomes a table.
        time: Column of the printed ratios; empty: no time is measured.
        tables: Further tables to show.
        picture: Copy the first picture of each command.
    """

    title: str
    commands: tuple[str, ...]
    time: str = ""
    tables: tuple[str, ...] = ()
    picture: bool = False


PAGES = {
    "sizes": Page(
        "Forward, backward and optimizer by model, size and dtype",
        (
            "sizes --device cpu --model gpt2,course --sizes small --dtypes fp32,bf16 "
            "--compile false,true --steps 5",
            "sizes --device cpu --model course --sizes small --dtypes fp32 --optimizer false "
            "--warmup 0,1,2,5 --steps 5",
            "sizes --device cpu --model gpt2 --shapes 4x512,16x1024 --dtypes fp32,bf16 --steps 3",
            "sizes --device cpu --model course --sizes large --dtypes bf16 --optimizer false "
            "--warmup 1 --steps 2",
        ),
        time="forward_backward_ms",
    ),
    "attention": Page(
        "Attention alone",
        (
            "attention --device cpu --d 16,64 --contexts 256,1024,2048 "
            "--kernels naive,compiled,sdpa-flash",
        ),
        time="total_ms",
        picture=True,
    ),
    "memory": Page(
        "Memory by phase, saved tensors, and blocks per checkpoint",
        (
            "memory --device cpu --model gpt2,course --sizes small --contexts 256 --dtypes fp32 "
            "--groups 1,3,12",
        ),
        tables=("saved",),
    ),
    "matmul": Page(
        "Matrix products", ("matmul --device cpu --squares 512,1024,2048",), time="forward_ms"
    ),
    "profile": Page(
        "Where the time of a step goes",
        ("profile --device cpu --model gpt2,course --shapes 4x512 --modes inference,full-step",),
        time="timer_ms",
        tables=("attention",),
    ),
    "data": Page("The loader", ("data",), time="batch_ms"),
    "dtypes": Page("dtypes under autocast", ("dtypes --device cpu,cuda-rules",), "", ("norms",)),
    "accumulation": Page("A thousand times 0.01", ("accumulation --device cpu",)),
    "peers": Page(
        "The same GPT-2 through transformers and ours",
        ("peers --device cpu --sizes small --rounds 3",),
        time="ours_ms",
    ),
    "fit-batch": Page(
        "The largest micro-batch that fits",
        (
            "fit-batch --config quickstart --trainer.precision 32-true "
            "--model.config.vocab_size 65 --limit_gib 1",
        ),
        time="micro_batch_ms",
    ),
}
CHECKS = (
    "gpt-lightning reproduce lecture-ladder --rungs gpt2-init",
    "gpt-lightning reproduce shakespeare-char-small",
)


def main() -> int:
    """Measure pages, compare them, and write them; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pages", nargs="*", metavar="NAME", help=", ".join(PAGES))
    parser.add_argument("--index", action="store_true", help="write README.md alone")
    args = parser.parse_args()
    names = args.pages or list(PAGES) * (not args.index)
    if unknown := set(names) - set(PAGES):
        parser.error(f"no page {', '.join(unknown)}; expected any of {', '.join(PAGES)}")
    failures = []
    load = round(os.getloadavg()[0], 1)  # load of other programs: the pages make their own
    measured: dict[str, Any] = {}
    try:
        for name in names:
            tables = [read(run(words)) for words in commands_of(name)]
            measured[name] = {"load": load, "tables": tables}
            stored = STORE / f"{name}.json"
            old = json.loads(stored.read_text()) if stored.exists() else None
            failures += [f"{name}: {line}" for line in judged(PAGES[name], old, measured[name])]
    finally:  # not before: a changed page would be a change of the commit that is measured
        for name, new in measured.items():
            write(name, PAGES[name], new)
        (HERE / "README.md").write_text(index())
    if names == list(PAGES):
        for words in CHECKS:
            with contextlib.suppress(subprocess.CalledProcessError):
                run(words)
                continue
            failures.append(words)
    print("\n" + ("\n".join(f"FAILED {line}" for line in failures) or "Every comparison holds."))
    return int(bool(failures))


def find_bench(name: str) -> Bench:
    """Return the bench of a page: of the package, or a script of this folder."""
    if name in find_benches():
        return import_bench(name).BENCH
    return runpy.run_path(str(HERE / f"{name}.py"))["BENCH"]


def commands_of(name: str) -> list[str]:
    """Return the commands of a page as they are typed."""
    start = " ".join(find_bench(name).command)
    return [f"{start}{words.removeprefix(name)}" for words in PAGES[name].commands]


def run(typed: str) -> Path | None:
    """Run a command, show its output, and return the folder of the report that it names."""
    words = typed.replace("gpt-lightning", "python -m gpt_lightning", 1).split()
    command = [sys.executable, *words[1:]]
    print(f"\n{typed}", flush=True)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=HERE.parent) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found = [match[1] for line in lines if (match := re.match(r"(\S+): results\.md", line))]
    return HERE.parent / found[-1] if found else None


def read(folder: Path | None) -> dict[str, Any]:
    """Return the report of a folder, with the configuration of each row."""
    assert folder is not None, "the bench wrote no report"
    data: dict[str, Any] = json.loads((folder / RESULTS).read_text(encoding="utf-8"))
    configurations = [configuration for configuration, _ in Ledger(folder).read()]
    return data | {"folder": str(folder), "configurations": configurations}


# ---- the comparison ------------------------------------------------------------------------------


def judged(page: Page, old: dict[str, Any] | None, new: dict[str, Any]) -> Iterator[str]:
    """Compare two measurements of a page; print the ratios and yield the failures."""
    for table in new["tables"]:
        yield from (f"a row is {row['status']}: {row['note']}" for row in failed(table))
    if old is None:
        print("There is no measurement to compare with.")
        return
    facts = [{name: m["tables"][0]["machine"][name] for name in MACHINE[:3]} for m in (old, new)]
    comparable = facts[0] == facts[1] and max(old["load"], new["load"]) <= IDLE
    before = dict(identified(old))
    ratios = []
    for row_key, row in identified(new):
        then = before.get(row_key, {})
        for name in row.keys() & then.keys():
            if wrong := difference(name, then[name], row[name]):
                words = (f"{k} {v}" for k, v in json.loads(row_key).items() if k in row)
                yield f"{', '.join(words)}: {name} {wrong}"
        if page.time and row.get(page.time) and then.get(page.time):
            ratios.append(row[page.time] / then[page.time])
    if ratios:
        middle = statistics.median(ratios)
        print(
            f"{page.time}: {middle:.2f} times the last measurement "
            f"({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} rows)"
            + ("" if comparable else "; another machine or a busy one: not compared")
        )
        if comparable and not 1 / FACTOR <= middle <= FACTOR:
            yield f"{page.time} is {middle:.2f} times the last measurement"


def failed(table: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that failed; memory that ran out and skipped rows are results."""
    return [row for row in table["rows"] if row["status"] not in ("ok", "skipped", "out of memory")]


def identified(measurement: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the rows of a measurement with their configuration; folders are none."""
    for table in measurement["tables"]:
        for configuration, row in zip(table["configurations"], table["rows"], strict=True):
            yield identity({k: v for k, v in configuration.items() if k != "folder"}), row


def difference(name: str, old: Any, new: Any) -> str:
    """Describe a loss, count, size or word that differs; empty if it does not."""
    if "loss" in name and isinstance(new, float) and isinstance(old, float):
        wrong = abs(new - old) > LOSS
    elif name.endswith("_mib") and old and new and not name.startswith("resident"):
        wrong = abs(new / old - 1) > SIZE
    elif name in EXACT or (isinstance(new, str) and name not in ("note", "trace", "files")):
        wrong = new != old
    else:
        return ""
    return f"was {old}, is {new}" if wrong else ""


# ---- the page ------------------------------------------------------------------------------------


def write(name: str, page: Page, measured: dict[str, Any]) -> None:
    """Write a page and its rows."""
    bench = find_bench(name)
    machine = measured["tables"][0]["machine"]
    commands = "\n".join(commands_of(name))
    load = f"Load average before: {measured['load']}."
    if measured["load"] > IDLE:
        load += " **The machine was busy: times and ratios of times are not those of an idle one.**"
    facts = f"{machine['date']}. " + "; ".join(dict.fromkeys(machine[n] for n in MACHINE))
    parts = [f"# {page.title}", f"```\n{wrapped(commands)}\n```", filled(f"{facts}. {load}")]
    for index, table in enumerate(measured["tables"]):
        for title in ("rows", *page.tables):
            rows = [*map(bench.tables[title].of, table[title])]
            head = f"{title.capitalize()}:\n\n" if title != "rows" else ""
            shown = list(Console(bench.tables[title]).columns)
            parts.append(head + markdown(rows, shown).rstrip())
        for picture in table["pictures"][: int(page.picture)]:
            target = f"{name}{index or ''}.png"
            shutil.copyfile(Path(table["folder"]) / picture, HERE / target)
            parts.append(f"![{page.title}]({target})")
    notes = measured["tables"][0]["notes"]
    parts += [filled(note) if len(note) > 100 else note for note in notes]
    parts.append(f"`make pages` measures this page again (`python benchmarks/pages.py {name}`).")
    (HERE / f"{name}.md").write_text("\n\n".join(parts) + "\n")
    kept = ("machine", "configurations", "rows")
    tables = [{field: table[field] for field in kept} for table in measured["tables"]]
    stored = json.dumps({"load": measured["load"], "tables": tables}, indent=1)
    (STORE / f"{name}.json").write_text(stored + "\n")


def index() -> str:
    """Return README.md: each page with its commit and the code that has changed since."""
    lines = ["# Pages that `make pages` measures\n\n| page | content | commit | changed since |"]
    lines.append("| --- | --- | --- | --- |")
    for name, page in PAGES.items():
        if (STORE / f"{name}.json").exists():
            lines.append(f"| [{name}.md]({name}.md) | {page.title} | {changed_since(name)} |")
    return "\n".join(lines) + "\n"


def changed_since(name: str) -> str:
    """Return two cells, the commit of a page and the rooms of CODE that have changed since."""
    machine = json.loads((STORE / f"{name}.json").read_text())["tables"][0]["machine"]
    commit = re.findall(r"\((\w+)", machine["software"])[0]
    diff = f"git diff --name-only {commit} -- {' '.join(CODE)}".split()
    files = subprocess.run(diff, check=True, stdout=subprocess.PIPE, text=True, cwd=HERE.parent)
    rooms = {Path(file).parts[1] for file in files.stdout.splitlines()}
    return f"{commit} | {', '.join(sorted(rooms)) or 'nothing'}"


def filled(text: str) -> str:
    """Wrap a paragraph; lines never begin with what Markdown reads as a list or a heading."""
    text = textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
    return re.sub(r"\n(?=[#+*-] |\d+\. )", " ", text)


def wrapped(commands: str) -> str:
    """Break long commands with backslashes."""
    return "\n".join(
        " \\\n    ".join(textwrap.wrap(line, 92, break_on_hyphens=False, break_long_words=False))
        for line in commands.splitlines()
    )


if __name__ == "__main__":
    sys.exit(main())
