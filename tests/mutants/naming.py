"""Test files that name a module: import it, patch it, or have its name."""

import ast
import re
from pathlib import Path

DOTTED = re.compile(r"\bgpt_lightning(?:\.\w+)+")


class Names:
    """Modules by file, and the files of tests that name them.

    Args:
        root: Folder of the repository.
        package: Name of the package in it.
    """

    def __init__(self, root: Path, package: str = "gpt_lightning") -> None:
        self.root = root
        self.modules = {
            _dotted(path.relative_to(root)): path for path in sorted((root / package).rglob("*.py"))
        }
        stub = root / package / "__init__.pyi"  # `from gpt_lightning import fit` names training.fit
        self._exported = {
            f"{package}.{word.rpartition('.')[2]}": word
            for word in (_imports(stub) if stub.is_file() else ())
        }
        self.tests = {path: self._named(path) for path in sorted((root / "tests").rglob("*.py"))}
        helpers = {path.stem: path for path in self.tests if not path.name.startswith("test_")}
        for path, named in self.tests.items():  # one level: a helper of tests names for its user
            for word in _imports(path):
                if word in helpers and helpers[word].parent in path.parents:
                    named |= self.tests[helpers[word]]

    def _named(self, path: Path) -> set[str]:
        """Modules that a file imports, or names in a string."""
        found = {name for word in _imports(path) if (name := self._module(word))}
        text = path.read_text(encoding="utf-8")
        return found | {name for word in DOTTED.findall(text) if (name := self._module(word))}

    def _module(self, dotted: str) -> str:
        """Longest beginning of a dotted name that is a module of the package; "" if none is."""
        dotted = self._exported.get(dotted, dotted)
        while dotted and dotted not in self.modules:
            dotted = dotted.rpartition(".")[0]
        return dotted

    def of(self, module: str) -> list[Path]:
        """Test files that name a module; if there are none, those that name its importers."""
        level, seen = {module}, {module}
        while level:
            found = sorted({path for name in level for path in self._of(name)})
            if found:
                return found
            level = {n for n, path in self.modules.items() if level & self._named(path)} - seen
            seen |= level
        return self.of(module.rpartition(".")[0])  # found by its name in a folder

    def _of(self, module: str) -> list[Path]:
        folder = self.modules[module].relative_to(self.root).parts[1:-1]
        stem = self.modules[module].stem
        return [
            path
            for path, named in self.tests.items()
            if path.name.startswith("test_")
            and (
                module in named
                or path.relative_to(self.root / "tests").parts == (*folder, f"test_{stem}.py")
            )
        ]


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(path: Path) -> set[str]:
    """Dotted names of what a file imports: modules, and names in modules."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found
