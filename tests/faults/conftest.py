"""Runs that the tests of faults start from."""

import shutil
import sys
from pathlib import Path

import pytest
from processes import checkpoints, fit, step_of, write_inputs

collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]  # /proc, prlimit, setpriv


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an uninterrupted run."""
    folder = write_inputs(tmp_path_factory.mktemp("whole") / "work")
    fit(folder, "--checkpoint.every_n_steps", "1", "--checkpoint.keep_last", "99")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the inputs of a run."""
    return write_inputs(tmp_path / "work")


@pytest.fixture
def stopped(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run the test in a folder whose run was killed right after its save at step 10."""
    folder = shutil.copytree(whole, tmp_path / "stopped")
    for path in checkpoints(folder):
        if step_of(path) > 10:
            path.unlink()
            path.with_name(f"{path.name}.sha256").unlink()
    monkeypatch.chdir(folder)
    return folder
