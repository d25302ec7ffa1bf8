"""The command `python -m experiments.course`: the report of the systems course's assignment.

Each section of sections.yaml is a sweep of a bench, in a folder of its own. Rows that an earlier
call has measured are kept. The rows of this machine and of the folders of --machines become one
report.md and one report.html.
"""

import base64
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from jsonargparse.typing import PositiveInt
from markdown import markdown as to_html

from experiments.course import answers
from gpt_lightning.bench import models
from gpt_lightning.bench.command import import_bench
from gpt_lightning.errors import UserError
from gpt_lightning.files import write_atomic
from gpt_lightning.parsing import OneLineParser
from gpt_lightning.tables import options
from gpt_lightning.tables.ledger import Ledger
from gpt_lightning.tables.rows import RESULTS, Values, markdown
from gpt_lightning.tables.sweep import Bench, Sweep, read_options

PROGRAM = "python -m experiments.course"
ROOT = Path("lightning_logs") / "report"
TABLE = yaml.safe_load(Path(__file__).with_name("sections.yaml").read_text(encoding="utf-8"))
TEXT = TABLE["text"]
# sizes by device; the first is profiled, the last one's memory is measured
SIZES = {"cpu": "small,medium", "mps": "small,medium,large", "cuda": ",".join(models.COURSE_SIZES)}


@dataclass(frozen=True)
class Section:
    """Section of the report; sections.yaml describes the fields."""

    name: str
    title: str
    bench: str
    options: str
    columns: Sequence[str] = ()
    tables: Sequence[str] = ()
    answer: str = ""
    compiles: bool = False


SECTIONS = {entry["name"]: Section(**entry) for entry in TABLE["sections"]}


def make_parser() -> OneLineParser:
    """Return the parser of the command."""
    parser = OneLineParser(
        prog=PROGRAM,
        description="Measure and write the report of the systems course's assignment. Another "
        "call measures only what is missing.",
    )
    names = ",".join(SECTIONS)
    parser.add_argument("--device", default="auto", help="cpu, mps, cuda or auto.")
    parser.add_argument("--sizes", type=str | None, help="Sizes; null: those that suit the device.")
    parser.add_argument("--sections", default=names, help=f"Sections to measure: {names}.")
    parser.add_argument("--machines", nargs="+", default=[], help="Reports of other machines.")
    parser.add_argument("--quick", action="store_true", help="A tiny model, in a minute.")
    parser.add_argument("--out", type=str | None, help=f"Folder; null: a folder in {ROOT}.")
    parser.add_argument("--passes", type=PositiveInt, default=100, help=TEXT["passes"])
    about = "Time limit of each row, in seconds."
    parser.add_argument("--timeout_s", type=options.PositiveFinite, default=1800.0, help=about)
    return parser


def run(argv: list[str]) -> int:
    """Run the command with these arguments.

    Returns:
        0: Every row was measured, or could not be for lack of memory; 1: a row failed otherwise.

    Raises:
        UserError: An option is wrong, or a folder of --machines has no report.
    """
    args = make_parser().parse_args(argv)
    chosen = options.listed(args, "sections", options.one_of(SECTIONS))
    device = options.listed(args, "device", options.device)[0]
    folder = Path(args.out or ROOT / ("course-quick" if args.quick else "course"))
    for machine in args.machines:
        if not list(Path(machine).glob(f"*/{RESULTS}")):
            raise UserError(f"--machines: {machine} has no report; give a folder of `{PROGRAM}`")
    failed = False
    for section in map(SECTIONS.__getitem__, chosen):
        if not (args.quick and section.compiles):
            print(f"\n{section.title}\n")
            words = filled(section, args, device)
            bench, rows = read(section, words)
            own, where = ["bench", section.bench, *words], folder / section.name
            failed |= bool(Sweep(bench, rows, own, args, Ledger(where)).run())
    write(folder, [folder, *map(Path, args.machines)], args.quick)
    print(f"\n{folder}: report.md, report.html")
    return int(failed)


def filled(section: Section, args: Any, device: str) -> list[str]:
    """Return the options of a section for a device."""
    sizes = args.sizes or SIZES[device]
    names = {"sizes": sizes, "one": sizes.split(",")[0], "last": sizes.split(",")[-1]}
    words = {word: f"--sizes {name}" for word, name in names.items()} | {"device": device}
    words = vars(args) | words | TABLE["words"]["quick" if args.quick else "full"]
    text = section.options.format_map(words)
    return shlex.split(text if "--device" in text else f"--device {device} {text}")


def read(section: Section, words: list[str]) -> tuple[Bench, list[Values]]:
    """Return the bench of a section, and its rows."""
    bench: Bench = import_bench(section.bench).BENCH
    return bench, read_options(bench, words)[1]


# ---- the document --------------------------------------------------------------------------------


def write(folder: Path, machines: Sequence[Path], quick: bool) -> None:
    """Write report.md and report.html from the rows of all machines."""
    parts = [TEXT["title"], TEXT["introduction"] + f" {TEXT['quick']}" * quick]
    for section in SECTIONS.values():
        parts.append(f"## {section.title}")
        found = [
            path / section.name for path in machines if (path / section.name / RESULTS).exists()
        ]
        parts += [part for path in found for part in described(section, path, folder)]
        if not found:
            parts.append(f"Not measured:\n\n```\n{PROGRAM} --sections {section.name}\n```")
    text = "\n\n".join(parts).replace("<", "&lt;") + "\n"  # templates in the names of kernels
    page = to_html(text, extensions=["tables", "fenced_code"])
    page = re.sub(r'src="([^"]+)"', lambda link: embedded(folder / link[1]), page)
    page = f"<!doctype html><meta charset=utf-8>{TEXT['style']}{page}"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "report.md", text.encode())
    write_atomic(folder / "report.html", page.encode())


def embedded(picture: Path) -> str:
    """Return the `src` of a picture that contains its bytes."""
    return f'src="data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}"'


def described(section: Section, path: Path, folder: Path) -> Iterator[str]:
    """Yield the machine, tables, pictures and answers of a section on one machine."""
    data = json.loads((path / RESULTS).read_text(encoding="utf-8"))
    machine = data["machine"]
    facts = [machine[name] for name in ("device", "CPU", "memory", "software", "date")]
    yield "; ".join(dict.fromkeys(facts)) + f"\n\n```\n{machine['command']}\n```"
    bench, _ = read(section, [])
    for name in ("rows", *section.tables):
        if rows := [*map(bench.tables[name].of, data.get(name, []))]:
            title = "" if name == "rows" else f"### {name.capitalize()}\n\n"
            yield title + markdown(rows, section.columns if name == "rows" else ()).rstrip()
    for name in data["pictures"]:
        yield f"![{Path(name).stem}]({os.path.relpath(path / name, folder)})"
    if section.answer:
        for question, answer in getattr(answers, section.answer)(data):
            yield f"**{question}** {answer}"
