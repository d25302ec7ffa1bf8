"""Wrong inputs, the rows of wrong_inputs.tsv: each ends in one line that names key and fix."""

import csv
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from wrong_folder import make_folder

from gpt_lightning.cli import main
from gpt_lightning.remote import attempts


@pytest.fixture(scope="module")
def folder(tmp_path_factory, words) -> tuple[Path, str]:
    """The folder of wrong_folder.py, which has a copy `fixes`, and the path of its checkpoint."""
    path = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("GPT_LIGHTNING_DATA", "")
        checkpoint = make_folder(path, words)
    shutil.copytree(path, path.with_name("fixes"))
    return path, str(path / checkpoint)


def rows() -> Iterator[Any]:
    """Yield the rows of wrong_inputs.tsv; those marked slow run with `-m slow`."""
    with Path(__file__).with_name("wrong_inputs.tsv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
            marks = [pytest.mark.slow] if row.pop("when") else []
            yield pytest.param(row, marks=marks, id=row["input"])


def files_of_runs(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "lightning_logs").rglob("*") if path.is_file())


@pytest.mark.parametrize("row", rows())
def test_a_wrong_input_is_one_line_that_names_the_key_and_a_fix_that_works(
    row, folder, monkeypatch, capsys
):
    """Columns of a row.

    input: A command line. CKPT is the path of a whole checkpoint; variables before the command are
        its environment.
    file: A file that the command reads, NAME=CONTENT, with the escapes of JSON.
    names: Words of the error message: the key or the file.
    exit: Exit code.
    fix: The command as the message corrects it; its new words are in the message, and it runs.
    parsed: Reason why the fix is parsed and not run.
    """
    path, checkpoint = folder
    monkeypatch.chdir(path)
    monkeypatch.setenv("GPT_LIGHTNING_DATA", "")
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.0)
    name, _, content = row["file"].partition("=")
    if name:
        Path(name).write_text(json.loads(f'"{content}"'))
    args, fixed = (
        shlex.split(row[column].replace("CKPT", checkpoint)) for column in ("input", "fix")
    )
    while args and re.match(r"[A-Z_]+=", args[0]):
        monkeypatch.setenv(*args.pop(0).split("=", 1))
    before = files_of_runs(path)
    code = main(args)
    lines = capsys.readouterr().err.splitlines()
    assert code == int(row["exit"]), lines
    *warnings, line = lines
    assert line.startswith("error: ")
    assert all(each.startswith("warning: ") for each in warnings), warnings
    assert row["names"] in line
    assert not re.search(r"Traceback|Namespace\(|object at 0x|\w+Error:", line)
    assert not (path / "hacked").exists()
    assert files_of_runs(path) == before
    if fixed:
        new = {word.lstrip("-").partition("=")[0] for word in fixed if word not in args}
        assert all(word in line for word in new)
        monkeypatch.chdir(path.with_name("fixes"))
        trains = fixed[0] == "fit" and "trainer.max_" not in row["fix"]
        added = "--print_config" if row["parsed"] else "--trainer.max_steps=1"
        command = [*fixed, added] if row["parsed"] or trains else fixed
        assert main(command) == 0, capsys.readouterr().err
    if name:
        (path / name).unlink()


SIDE_EFFECTS = """
from pathlib import Path
Path("imported").touch()
def touch(*args): Path("called").touch()
class NoCallback: pass
"""


def test_what_a_configuration_may_run(folder, monkeypatch, capsys):
    """The sentences of SECURITY.md: imports run, named functions are called, tags are refused."""
    path, _ = folder
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(path)
    (path / "side_effects.py").write_text(SIDE_EFFECTS)
    (path / "side.yaml").write_text("trainer: {callbacks: [{class_path: side_effects.NoCallback}]}")
    assert main(["fit", "--config", "tiny.yaml", "--config", "side.yaml"]) == 2
    assert "subclass of Callback" in capsys.readouterr().err
    assert (path / "imported").exists()
    (path / "lambda.yaml").write_text(
        "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.LambdaCallback\n"
        "    init_args: {on_fit_start: side_effects.touch}\n"
    )
    command = shlex.split("fit --config tiny.yaml --config lambda.yaml --trainer.max_steps 1")
    assert main(command) == 0, capsys.readouterr().err
    assert (path / "called").exists()
    assert main(["fit", "--config", "bad/object.yaml"]) == 2
    assert not (path / "hacked").exists()
