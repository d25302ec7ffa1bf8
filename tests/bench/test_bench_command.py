"""`gpt-lightning bench`: a bench is one file, found and explained without being imported."""

import json
import subprocess
import sys

import pytest

from gpt_lightning import bench
from gpt_lightning.bench import command
from gpt_lightning.cli import main
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import measured

NEW = '''"""Times of nothing at all.

Every row is a guess.
"""

from dataclasses import dataclass

from gpt_lightning.tables import options
from gpt_lightning.tables.rows import (Count, Hundredths, Measured, Text)
from gpt_lightning.tables.sweep import Bench


@dataclass
class GuessRow(Measured):
    device: Text
    batch: Count
    total_ms: Hundredths


BENCH = Bench(
    tables={"rows": GuessRow},
    measure="gpt_lightning.bench.no_op:measure",
    options=(options.DEVICE, options.batches("1,2")),
)


def measure(row):
    return {"total_ms": 1.5 * row.batch}
'''


@pytest.mark.parametrize(("name", "line"), command.find_benches().items())
def test_a_bench_has_its_files_name_and_a_line_of_help(name, line):
    module = command.import_bench(name)
    assert module.BENCH.name == name
    assert f"{line}." == module.__doc__.partition("\n")[0]
    assert 20 < len(line) <= 100


def test_a_new_bench_is_one_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no_op.py").write_text(NEW)
    monkeypatch.setattr(bench, "__path__", [*bench.__path__, str(tmp_path)])
    assert main(["bench", "--help"]) == 0
    assert "  no-op         Times of nothing at all\n" in capsys.readouterr().out
    assert main(["bench"]) == 2
    assert "  no-op         Times of nothing at all\n" in capsys.readouterr().err
    monkeypatch.setattr(sweep, "isolated", lambda address, row, timeout_s: measured(address, row))
    assert main(["bench", "no-op", "--device", "cpu", "--batches", "2,4"]) == 0
    (path,) = sweep.ROOT.glob("no-op/*/results.json")
    report = json.loads(path.read_text())
    assert [(row["batch"], row["total_ms"]) for row in report["rows"]] == [(2, 3.0), (4, 6.0)]
    assert report["notes"] == ["Every row is a guess."]


@pytest.mark.slow
def test_the_list_imports_no_bench_and_no_torch():
    code = (
        "import sys; from gpt_lightning.cli import main;"
        "main(['bench']); main(['bench', '--help']); main(['bench', 'lader']);"
        "print([m for m in sys.modules if m == 'torch' or m.startswith('gpt_lightning.bench.c')])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.stdout.splitlines()[-1] == "['gpt_lightning.bench.command']", found.stderr
