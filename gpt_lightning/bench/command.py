"""Command `gpt-lightning bench`: find the benches and run one.

A bench is a file of this folder that defines `BENCH`, and `run(argv)` if it is no plain sweep. The
first line of its docstring is its help line.
"""

import ast
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path
from typing import Any

from gpt_lightning import bench
from gpt_lightning.output import wrapped
from gpt_lightning.parsing import pick


def find_benches() -> dict[str, str]:
    """Return name -> module of all benches, without importing any."""
    modules = [f"{__package__}.{found.name}" for found in pkgutil.iter_modules(bench.__path__)]
    benches = [module for module in modules if "\nBENCH = " in source(module)]
    return {module.rpartition(".")[2].replace("_", "-"): module for module in benches}


def source(module: str) -> str:
    """Return the text of a module that is not imported."""
    spec: Any = importlib.util.find_spec(module)
    return Path(spec.origin).read_text(encoding="utf-8")


def help_line(module: str) -> str:
    """Return the first line of a module's docstring, read from its file."""
    text = ast.get_docstring(ast.parse(source(module))) or ""
    return text.partition("\n")[0].removesuffix(".")


def usage() -> str:
    """Return the text of `gpt-lightning bench --help`."""
    benches = find_benches()
    width = max(map(len, benches))
    rows = [f"  {name:<{width}}  {help_line(module)}" for name, module in benches.items()]
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
    name, benches = argv[1], find_benches()
    module = importlib.import_module(benches[pick(name, benches, "no bench")])
    if hasattr(module, "run"):
        return int(module.run(argv))
    from gpt_lightning.tables.sweep import run_bench  # imports torch, which takes seconds

    return run_bench(module.BENCH, argv)
