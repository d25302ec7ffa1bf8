"""Mutants are edits of one line, of code and not of text, and each compiles or is not drawn."""

import ast
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import run
from edits import Sites
from lines import Lines, watch

ROOT = Path(__file__).resolve().parents[2]


def mutants(source: str) -> set[str]:
    return {edit.applied(source) for edits in Sites(source).found for edit in edits}


@pytest.mark.parametrize(
    ("source", "some"),
    [
        ("x = a < b", {"x = a <= b", "x = a >= b"}),
        ("x = a is not None", {"x = a is None"}),
        ("x = a not in b", {"x = a in b"}),
        ("x = (a + b) - c", {"x = (a - b) - c", "x = (a + b) + c"}),
        ("x = a and not b", {"x = a or not b", "x = a and  b"}),
        ("x = 8", {"x = 9", "x = 80", "x = 0"}),
        ("x = True", {"x = False"}),
        ("x = min(a, b)", {"x = max(a, b)", "x = min(b, a)"}),
        ('x = a["key"]', {'x = a["keyX"]'}),
        ("if a: b()", {"if (not (a)): b()", "if a: pass"}),
        ("def f(): return g(x)", {"def f(): return None"}),
        ("x += 1", {"x -= 1", "pass"}),
        ("raise ValueError(x + 1)", {"pass"}),
        ("def f(a=1): pass", {"def f(a=2): pass"}),
        ("x = 'é' + a if b < c else d", {"x = 'é' + a if b <= c else d"}),  # columns are bytes
    ],
)
def test_an_edit_is_one_of_the_usual(source, some):
    assert some <= mutants(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Text of 1 < 2."""',
        "def f(a: Literal[1], b: int | None = None) -> Literal[2]: ...",
        "from a import b",
        "if TYPE_CHECKING:\n    x = 1",
        'x = f"{a + 1}"',
        "@dataclass(frozen=True)\nclass A: ...",
    ],
)
def test_text_that_the_program_does_not_use_is_left_alone(source):
    assert not mutants(source)


def test_every_edit_of_a_file_changes_one_line():
    source = (ROOT / "gpt_lightning" / "training" / "steps.py").read_text()
    lines = source.splitlines()
    found = mutants(source)
    assert len(found) > 100
    for mutant in found:
        ast.parse(mutant)
        changed = [a != b for a, b in zip(lines, mutant.splitlines(), strict=True)]
        assert sum(changed) == 1


@pytest.mark.slow
def test_a_line_is_tested_by_the_tests_that_run_it_here_and_in_processes(tmp_path):
    texts = {
        "gpt_lightning/__init__.py": "",
        "gpt_lightning/a.py": "X = 1\n\ndef f(y=2):\n    if y:\n        return X\n    return 0\n",
        "tests/test_a.py": "import subprocess, sys\nfrom gpt_lightning.a import f\n"
        "def test_f(): f()\ndef test_zero(): f(0)\ndef test_none(): pass\ndef test_process():\n"
        "    code = 'from gpt_lightning.a import f; f(0)'\n"
        "    subprocess.run([sys.executable, '-c', code], check=True)\n",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    watch(tmp_path, tmp_path / "watched", jobs=1)
    lines = Lines(tmp_path, tmp_path / "watched")
    found = [
        {test.partition("::test_")[2] for test in lines.of(Path("gpt_lightning/a.py"), line)}
        for line in (1, 3, 4, 5, 6)
    ]
    every = {"f", "zero", "process"}
    assert found == [every, every, every, {"f"}, {"zero", "process"}]


def test_a_draw_keeps_its_places_when_other_lines_change(tmp_path, capsys):
    lines = [f"x{i} = {i} + 1\n" for i in range(40)]

    def drawn(*code: str) -> set[str]:
        path = tmp_path / "gpt_lightning" / "model" / "loss.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(code))
        return {mutant.after for mutant in run.draw(tmp_path, 10, 13, "")}

    first = drawn(*lines)
    assert len(first) == 10
    again = drawn("import os\n", *lines[:20], "y = 2\n", *lines[20:])
    assert len(first & again) >= 9  # the new line may be in the sample
    other = {mutant.after for mutant in run.draw(tmp_path, 10, 14, "")}
    assert len(first & other) < 8
