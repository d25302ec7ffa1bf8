"""Command `gpt-lightning bench`: find the benches and run one.

A bench is a file of this folder that defines `BENCH`, and `run(argv)` if it is no plain sweep. The
first line of its docstring is its help line.
"""

import importlib
import itertools
import sys
from pathlib import Path
from types import ModuleType

from gpt_lightning import bench
from gpt_lightning.output import wrapped
from gpt_lightning.parsing import pick


def find_benches() -> dict[str, str]:
    """Return name -> help line of all benches, without importing any."""
    found = {}
    files = (sorted(Path(folder).glob("*.py")) for folder in bench.__path__)
    for file in itertools.chain(*files):
        text = file.read_text(encoding="utf-8")
        if "\nBENCH = " in text:
            found[file.stem.replace("_", "-")] = text.partition("\n")[0].strip('".')
    return found


def import_bench(name: str) -> ModuleType:
    """Return the module of a bench."""
    return importlib.import_module(f"{__package__}.{name.replace('-', '_')}")


def usage() -> str:
    """Return the text of `gpt-lightning bench --help`."""
    benches = find_benches()
    width = max(map(len, benches))
    rows = [f"  {name:<{width}}  {line}" for name, line in benches.items()]
    lines = [wrapped(row, width + 4) for row in rows]
    first = "usage: gpt-lightning bench NAME [options]"
    return "\n".join([first, "", *lines, "", "gpt-lightning bench NAME --help explains one."])


def run(argv: list[str]) -> int:
    """Run `bench NAME ...`; return the exit code."""
    if len(argv) < 2:
        print(usage(), file=sys.stderr)
        return 2
    if argv[1] in ("-h", "--help"):
        print(usage())
        return 0
    module = import_bench(pick(argv[1], find_benches(), "no bench"))
    if hasattr(module, "run"):
        return module.run(argv)
    from gpt_lightning.tables.sweep import run_bench  # imports torch, which takes seconds

    return run_bench(module.BENCH, argv)
