"""A run of four steps, from which many tests begin."""

import os
import shutil
from pathlib import Path

import pytest
from tiny_fit import fit


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with text.txt and a run of four steps."""
    folder, before = tmp_path_factory.mktemp("trained"), Path.cwd()
    (folder / "text.txt").write_text("the cat sat on a mat and slept\n" * 400)
    os.chdir(folder)
    assert fit(4) == 0
    os.chdir(before)
    return folder


@pytest.fixture
def four_steps(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in a copy of that folder."""
    shutil.copytree(trained, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
