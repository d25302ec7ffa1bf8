"""The floor plan, measured: size, folders, imports, private names of others, files of a step.

Every bound is what is reached. Bounds are lowered only: a commit that raises one says in
CHANGELOG.md what it gave up.
"""

import ast
import subprocess
import sys
from pathlib import Path

import house
import lightning as L
import pytest
import yaml
from house import PACKAGE
from tiny_fit import TINY_MODEL

from gpt_lightning.cli import main
from gpt_lightning.training import fit

ROOT = Path(__file__).parents[1]
PRIVATE_NAMES = PACKAGE / "private_names.yaml"
PACKAGE_FILES = 145
TOKENS_PER_LINE = 9.67
CPP_LINES = 289
FOLDERS = 15
ARROWS = 60
PRIVATE_NAMES_USED = 21
# Code lines of each room; "" has the files beside them.
ROOMS = {
    "": 962,
    "bench": 1_992,
    "commands": 1_233,
    "data": 1_968,
    "evaluate": 361,
    "hardware": 675,
    "model": 1_477,
    "prepare": 1_561,
    "remote": 431,
    "reproduce": 788,
    "runs": 1_633,
    "tables": 598,
    "training": 3_610,
}
PACKAGE_LINES = 17_289
# Code lines of Python outside of the package.
OTHERS = {"tests": 27_560, "experiments": 1_104, "benchmarks": 1_043, "docs": 85, "examples": 64}
TINY = (*TINY_MODEL, "--samples.max_new_tokens=4", "--data.batch_size=2", "--trainer.max_steps=8")


@pytest.fixture
def shards(text_file, tmp_path, monkeypatch) -> str:
    """A prepared dataset, and a working directory of its own for the run."""
    monkeypatch.chdir(tmp_path)
    assert main(["prepare", str(text_file), "--out", "shards", "--tokenizer", "char"]) == 0
    return "shards"


class Entered(L.Callback):
    """Notes which of our files Python enters in one optimizer step.

    From the start of the seventh step's batch to the start of the eighth's, past the warm-up of the
    rates: reading the batch, forward, backward, update, and every callback.
    """

    def __init__(self) -> None:
        self.files: set[str] = set()

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if batch_idx == 6:
            sys.setprofile(self._note)
        elif batch_idx == 7:
            sys.setprofile(None)

    def _note(self, frame, event, argument):
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.files.add(str(path.relative_to(PACKAGE)))


def test_an_optimizer_step_enters_few_files(shards):
    entered = Entered()
    fit.run_cli(["fit", *TINY, f"--data.dataset={shards}"], callbacks=[entered])
    assert "model/gpt.py" in entered.files
    assert len(entered.files) <= 14, "\n".join(sorted(entered.files))


@pytest.mark.slow
def test_a_fit_on_ready_shards_imports_few_files(shards):
    code = (
        "import sys; from gpt_lightning.cli import main; assert main(sys.argv[1:]) == 0; "
        "print(*(m for m in sys.modules if m.startswith('gpt_lightning')))"
    )
    command = [sys.executable, "-c", code, "fit", *TINY, f"--data.dataset={shards}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {*done.stdout.splitlines()[-1].split()} - {"gpt_lightning", "gpt_lightning.cli"}
    assert "gpt_lightning.training.module" in imported
    assert not any(name.startswith("gpt_lightning.prepare") for name in imported)
    assert len(imported) <= 55, "\n".join(sorted(imported))


def test_the_package_stays_within_its_size():
    rooms = house.lines_by_room()
    above = {room: n for room, n in rooms.items() if n > ROOMS[room]}
    assert not above, f"{above}: take the lines from another place, and say it in CHANGELOG.md"
    assert sum(rooms.values()) <= PACKAGE_LINES
    assert len(house.sources()) <= PACKAGE_FILES
    tokens = sum(house.code_size(path)[1] for path in house.sources())
    assert tokens <= TOKENS_PER_LINE * sum(rooms.values()), "lines are joined"
    cpp = sum(len(path.read_text().splitlines()) for path in house.PACKAGE.rglob("*.cpp"))
    assert cpp <= CPP_LINES


def test_the_other_folders_stay_within_their_size():
    above = {
        folder: n
        for folder, most in OTHERS.items()
        if (n := sum(house.lines_by_room(ROOT / folder).values())) > most
    }
    assert not above


def test_few_folders_and_arrows():
    assert len(house.folders()) <= FOLDERS, house.folders()
    arrows = house.arrows()
    assert len(arrows) <= ARROWS, "\n".join(f"{a} -> {b}" for a, b in sorted(arrows))


def test_private_names_of_other_libraries_stand_in_the_table():
    used = {name: sorted(files) for name, files in house.private_names().items()}
    table = yaml.safe_load(PRIVATE_NAMES.read_text(encoding="utf-8"))
    assert used == {name: sorted(row["files"]) for name, row in table.items()}
    assert all(row["reason"] and row["without"] for row in table.values())
    assert len(used) <= PRIVATE_NAMES_USED


def test_few_changes_of_a_process_have_no_way_back():
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    section = page.split("## Changes of the process that stay", 1)[1].split("\n## ", 1)[0]
    rows = [line.split("|")[1].strip(" `") for line in section.splitlines() if line[:3] == "| `"]
    assert 0 < len(rows) <= 5
    # each row's name is used in one file of the package, and no other such call stands anywhere
    text = {path: path.read_text(encoding="utf-8") for path in house.sources()}
    for name in rows:
        assert len([path for path, code in text.items() if name in code]) == 1, name
    for name in ("mallopt", "_SPINCOUNT", "register_at_fork", "set_start_method", "ALLOC_CONF"):
        known = any(name in row for row in rows)
        assert known or not any(name in code for code in text.values()), name


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= 72
    ]
    assert not long, long
