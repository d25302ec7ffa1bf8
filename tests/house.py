"""Counters of the house: code lines, tokens, folders, arrows, private names of other libraries."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import gpt_lightning

PACKAGE = Path(gpt_lightning.__file__).parent
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources(folder: Path = PACKAGE) -> list[Path]:
    """Return the Python files below a folder."""
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def tree(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


def code_size(path: Path) -> tuple[int, int]:
    """Return a file's code lines (no blanks, comments, docstrings), and the tokens in them."""
    docstrings: set[int] = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
            tokens += 1
    return len(lines), tokens


def lines_by_room(folder: Path = PACKAGE) -> Counter[str]:
    """Return the code lines of each first folder; "" has the files beside them."""
    rooms: Counter[str] = Counter()
    for path in sources(folder):
        first, *rest = path.relative_to(folder).parts
        rooms[first if rest else ""] += code_size(path)[0]
    return rooms


def folders() -> set[str]:
    """Return the folders with Python inside the package."""
    inside = {path.parent.relative_to(PACKAGE) for path in sources()}
    return {str(folder) for folder in inside} - {"."}


def arrows() -> set[tuple[str, str]]:
    """Return the pairs of folders of which the first imports the second, functions included."""
    found = set()
    for path in sources():
        here = str(path.parent.relative_to(PACKAGE))
        for module in imported(tree(path)):
            place = Path(*module.split(".")[1:])
            while place != Path() and not (PACKAGE / place).with_suffix(".py").exists():
                if (PACKAGE / place).is_dir():
                    place = place / "__init__"
                    break
                place = place.parent  # it is a name inside of a module
            found.add((here, str(place.parent)))
    return {(a, b) for a, b in found if a != b and "." not in (a, b)}


def imported(module: ast.Module) -> Iterator[str]:
    """Yield the full names that a module imports from this package."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("gpt_lightning."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("gpt_lightning"):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def own_names() -> set[str]:
    """Return the private names that the package itself defines."""
    names: set[str] = set()
    for path in sources():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                names.update({node.attr} if owner in ("self", "cls") else ())
    return names


def private_names() -> dict[str, set[str]]:
    """Return the private names of other libraries, each with the files that use it.

    A name is private if it begins with one underscore, or if a module on its way does. It counts
    where it is imported, read, written, or named in a string as `getattr` needs it.
    """
    own = own_names()
    found: dict[str, set[str]] = {}
    for path in sources():
        for name in set(used_names(tree(path))):
            *module, last = name.strip(".").split(".")  # an imported name has a module
            ours = not module and last in own
            if not ours and last not in SUFFIXES and "gpt_lightning" not in last:
                found.setdefault(last, set()).add(str(path.relative_to(PACKAGE)))
    return found


# Endings of our columns and keys, and the public functions os._exit and namedtuple._replace
SUFFIXES = {"_exit", "_replace", "_gib", "_mib", "_ms", "_s", "_std", "_per_sec", "_pdrop"}
SUFFIXES |= {"_mean_ms", "_std_ms", "_spread", "_peak_mib", "_batches", "_batches "}
SUFFIXES |= {"_attention", "_dataloader"}


def used_names(module: ast.Module) -> Iterator[str]:
    """Yield the names in a module that look private and may belong to another library."""
    for node in ast.walk(module):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if not node.module.startswith(("gpt_lightning", "__future__")):
                hidden = any(part.startswith("_") for part in node.module.split("."))
                yield from (
                    f"{node.module}.{alias.name}"
                    for alias in node.names
                    if hidden or alias.name.startswith("_")
                )
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if any(part.startswith("_") for part in alias.name.split(".")):
                    yield alias.name
        elif isinstance(node, ast.Attribute):
            if node.attr.startswith("_") and not node.attr.startswith("__"):
                yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            word = node.value
            if word[:1] == "_" and word[1:2].isalpha() and len(word) < 40 and "\n" not in word:
                yield word
