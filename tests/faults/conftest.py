"""The table of `make faults`, and the runs that many cases start from."""

import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from folders import copied, run_folder, write_inputs
from harness import LIMIT_S, TRACE, SilentWrong, fit, gpt
from table import CASES, Row, markdown

RESULTS = Path(__file__).resolve().parents[2] / "lightning_logs" / "faults" / "results.md"
ROWS: dict[str, Row] = {}  # rows of this session, by case
TOLD = pytest.StashKey["Case"]()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "case(id): of tests/faults/cases.yaml that a test is of")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(2 * LIMIT_S))
            if sys.platform != "linux":  # /proc, prlimit, setpriv
                item.add_marker(pytest.mark.skip(reason="the fault bench needs Linux"))


class Case:
    """Outcome of a test, for the table."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.stock: list[str] = []

    def saw(self, text: str) -> None:
        """Record the outcome of the injection; print it too, for a test that fails later."""
        print(text)
        self.seen.append(text)


@pytest.fixture
def case(request: pytest.FixtureRequest) -> Case:
    request.node.stash[TOLD] = Case()
    return request.node.stash[TOLD]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Add the data of the table to the report: plain data, as it may cross processes."""
    report: Any = yield
    marker = next(reversed([*item.iter_markers("case")]), None)  # a parameter's own comes last
    if marker is None or (call.when != "call" and report.outcome == "passed"):
        return report
    told = item.stash.get(TOLD, Case())
    failure = call.excinfo if report.outcome == "failed" else None
    found = {
        "case": marker.args[0],
        "seen": [f"{item.name}: {failure.exconly(tryshort=True)}"] if failure else told.seen,
        "silent": failure is not None and failure.errisinstance(SilentWrong),
        "stock": told.stock,
        "of_stock_alone": bool(told.stock) and not told.seen,
    }
    report.user_properties.append(("fault", found))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    for name, found in report.user_properties:
        if name == "fault":
            row = ROWS.setdefault(found["case"], Row())
            row.stock += found["stock"]
            if not found["of_stock_alone"]:
                row.note(report.outcome, report.duration, found["seen"], found["silent"])


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if len(ROWS) < len(CASES) // 2:  # a few chosen cases are no result
        return
    import lightning
    import torch

    environment = (
        f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, lightning {lightning.__version__}"
    )
    text = markdown({case: ROWS[case] for case in CASES if case in ROWS}, environment)
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(text)
    terminalreporter.write(f"\n{text}\nwritten to {RESULTS.relative_to(RESULTS.parents[2])}\n")


# ---- runs that are made once ---------------------------------------------------------------------


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted run to the last step, its trace in trace.jsonl."""
    folder = write_inputs(tmp_path_factory.mktemp("whole"))
    fit(folder, faults=TRACE).ok()
    return folder


@pytest.fixture(scope="session")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run like `whole`, with the checkpoint of each step and without its trace."""
    folder = write_inputs(tmp_path_factory.mktemp("every"))
    fit(folder, "--checkpoint.every_n_steps", "1", "--checkpoint.keep_last", "99").ok()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the inputs of a run."""
    return write_inputs(tmp_path / "work")


@pytest.fixture
def stopped(every: Path, tmp_path: Path) -> Path:
    """A folder with a run as if killed right after its save at step 10."""
    copied(every, tmp_path / "work", step=10)
    assert (run_folder(tmp_path / "work") / "checkpoints").is_dir()
    return tmp_path / "work"


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of four training shards and a validation shard."""
    folder = write_inputs(tmp_path_factory.mktemp("prepared"))
    gpt(folder, "prepare", "text.txt", "--tokenizer", "char", "--out", "data/set",
        "--shard-tokens", "1000").ok()  # fmt: skip
    return folder


@pytest.fixture
def shards(prepared: Path, tmp_path: Path) -> Path:
    return copied(prepared, tmp_path / "work")
