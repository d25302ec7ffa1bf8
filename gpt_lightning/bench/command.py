"""Command `gpt-lightning bench`: find the benches and run one.

A bench is a file of this folder. The first line of its docstring is its help line. It defines
`BENCH`, or `run(argv)` if it is no plain sweep.
"""

import ast
import importlib
import importlib.util
import pkgutil
import sys
from pathlib import Path

from gpt_lightning import bench
from gpt_lightning.errors import UserError
from gpt_lightning.parsing import nearest

# benches that compare with a published table
REPRODUCTIONS = {
    "accumulation": "gpt_lightning.reproduce.float16_sums",
    "dtypes": "gpt_lightning.reproduce.autocast_dtypes",
}


def find_benches() -> dict[str, str]:
    """Return name -> module of all benches, without importing any."""
    files = [found.name for found in pkgutil.iter_modules(bench.__path__) if not found.ispkg]
    names = [name for name in files if name != "command"]
    here = {name.replace("_", "-"): f"{__package__}.{name}" for name in names}
    return dict(sorted((here | REPRODUCTIONS).items()))


def help_line(module: str) -> str:
    """Return the first line of a module's docstring, read from its file."""
    spec = importlib.util.find_spec(module)
    assert spec is not None, module
    assert spec.origin is not None, module
    text = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].removesuffix(".")


def usage() -> str:
    """Return the text of `gpt-lightning bench --help`."""
    benches = find_benches()
    width = max(map(len, benches))
    lines = [f"  {name:<{width}}  {help_line(module)}" for name, module in benches.items()]
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
    if name not in benches:
        raise UserError(
            f"no bench {name!r}{nearest(name, benches)}; gpt-lightning bench --help lists them"
        )
    module = importlib.import_module(benches[name])
    if hasattr(module, "run"):
        code: int = module.run(argv)
        return code
    from gpt_lightning.tables.sweep import run_bench  # imports torch, which takes seconds

    return run_bench(module.BENCH, argv)
