"""Which tests run a line: the default and the slow tests once, watched by coverage.py.

As a plugin of pytest this file tells coverage.py which test runs, and writes each test's seconds.
"""

import ast
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

import coverage

SELECTED = "not long and not gpu and not browser and not faults"
SETTINGS = """
[run]
source = {source}
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch = _exit, fork
sigterm = true
"""
_seconds: Counter[str] = Counter()
_others: set[str] = set()  # failed or skipped


def pytest_runtest_logstart(nodeid):
    if (now := coverage.Coverage.current()) is not None:
        now.switch_context(nodeid)


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] += report.duration
    if not report.passed:
        _others.add(report.nodeid)


def pytest_sessionfinish(session):
    if hasattr(session.config, "workerinput"):  # xdist ends a worker without its exit functions
        if (now := coverage.Coverage.current()) is not None:
            now.save()
    elif path := os.environ.get("SECONDS_OF_TESTS"):
        passed = {test: took for test, took in _seconds.items() if test not in _others}
        Path(path).write_text(json.dumps(passed))


def watch(repository: Path, folder: Path, jobs: int) -> None:
    """Run the tests of a repository, and write into a folder what `Lines` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "coveragerc").write_text(SETTINGS.format(source=repository / "gpt_lightning"))
    here = Path(__file__).resolve().parent
    environment = os.environ | {
        "PYTEST_CURRENT_TEST": "",  # this may be a test of it
        "COVERAGE_PROCESS_START": str(folder / "coveragerc"),
        "COVERAGE_FILE": str(folder / "coverage"),
        "SECONDS_OF_TESTS": str(folder / "seconds.json"),
        "PYTHONPATH": f"{repository}{os.pathsep}{here}",
    }
    subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "lines", "-p", "no:cacheprovider"),
            *("-m", SELECTED, f"--numprocesses={jobs}"),
        ],
        cwd=repository, env=environment,
    )  # fmt: skip
    combined = coverage.Coverage(data_file=str(folder / "coverage"))
    combined.combine([str(folder)])
    combined.save()


class Lines:
    """Tests of each line of a repository.

    Args:
        repository: Folder whose tests were watched.
        folder: Folder that `watch` wrote into.
    """

    def __init__(self, repository: Path, folder: Path) -> None:
        self.repository = repository
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        self._data = coverage.CoverageData(str(folder / "coverage"))
        self._data.read()

    def of(self, path: Path, line: int) -> set[str]:
        """Tests that pass and run a line; of code that runs at import, those that use the file.

        Args:
            path: File, relative to the repository.
            line: Line number, from 1.
        """
        file = self.repository / path
        ran = {
            number: {context.partition(" (")[0] for context in contexts} & self.seconds.keys()
            for number, contexts in self._data.contexts_by_lineno(str(file)).items()
        }
        statements, functions = _spans(ast.parse(file.read_text(encoding="utf-8")))
        if not any(line in function for function in functions):
            inside = (number for function in functions for number in function)
            return _union(ran, inside) or _union(ran, ran)
        return (line in statements[line] and ran.get(line)) or _union(ran, statements[line])


def _union(ran: dict[int, set[str]], lines: Iterable[int]) -> set[str]:
    return set().union(*(ran.get(line, set()) for line in lines))


def _spans(tree: ast.Module) -> tuple[dict[int, range], list[range]]:
    """Lines of the statement at each line, and of each function.

    A compound statement is its head alone; the head of a function, with its defaults, is its body.
    """
    statements: dict[int, range] = defaultdict(lambda: range(0))
    functions = []
    for node in ast.walk(tree):  # inner nodes come after outer ones
        if not isinstance(node, ast.stmt):
            continue
        last = (node.end_lineno or node.lineno) + 1
        body = getattr(node, "body", None)
        head = range(node.lineno, max(body[0].lineno, node.lineno + 1) if body else last)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions.append(range(node.lineno, last))
            statements.update(dict.fromkeys(head, range(node.body[0].lineno, last)))
        else:
            statements.update(dict.fromkeys(head, head))
    return statements, functions
