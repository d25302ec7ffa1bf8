"""Repairs that error messages print, the rows of fixes.tsv: each works when it is typed."""

import ast
import csv
import os
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path
from typing import Any

import pytest

import gpt_lightning
from gpt_lightning.cli import COMMANDS, main
from gpt_lightning.remote import attempts

PACKAGE = Path(gpt_lightning.__file__).parent
TRAINER = "{accelerator: cpu, devices: 1, max_steps: 2, val_check_interval: 2, limit_val_batches: 1"
CONFIG = (
    f"trainer: {TRAINER}, check_val_every_n_epoch: null}}\nsamples: {{max_new_tokens: 0}}\n"
    "model: {config: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16, vocab_size: null}}\n"
)
# a run of each: its configuration, folder and dataset have this name
DATA = {
    "char": "{text_file: char.txt, tokenizer: char, batch_size: 4}",
    "byte": "{text_file: byte.txt, tokenizer: byte, batch_size: 4}",
    "dataset": "{dataset: data/dataset, batch_size: 4}",
}
EXCEPTIONS = 43  # lowered only; each has its reason in the table
# texts of the sources that name a command or an option: all that are raised, and others with advice
NAMES = re.compile(r"`(gpt-lightning|\{)|(?<![\w-])--[a-z{]")
ADVISES = re.compile(
    r"`(gpt-lightning|\{)|^--[a-z{]\S* |\b(add|allow|another|and|as|choose|fewer|fit|give|is|lower|"
    r"or|set|smaller|try|use|with) --[a-z{]"
)
# a word after an option that is no value of it
PROSE = "with|or|and|the|to|above|in|as|is|takes|another|of"
FLAG = re.compile(rf"(?<![\w-])(--[a-z][\w.-]*)(?:[ =](?!(?:{PROSE})\b|-)('[^']*'|[^\s,;:)']+))?")
VERBS = "add|allow|begin|choose|convert|give|make|replace|restore|resume|set|start|try|type|use"
ADVICE = re.compile(rf"\b({VERBS})\b.*|(?<=: )[^:]*$")


def table() -> list[dict[str, str]]:
    with Path(__file__).with_name("fixes.tsv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def cases() -> list[Any]:
    """Return each row with each of its kinds of runs; rows marked slow run with `-m slow`."""
    slow = {"slow": [pytest.mark.slow], "": []}
    return [
        pytest.param(row, kind, marks=slow[row["when"]], id=f"{kind}: {row['input']}")
        for row in table()
        for kind in row["runs"].split()
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, words) -> Path:
    """Folder with a configuration and a run of each kind of data."""
    path = tmp_path_factory.mktemp("fixes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("GPT_LIGHTNING_DATA", "")
        for kind, data in DATA.items():
            Path(f"{kind}.txt").write_text(words)
            Path(f"{kind}.yaml").write_text(f"{CONFIG}data: {data}\n")
        assert main(["prepare", "dataset.txt", "--tokenizer", "char", "--out", "data/dataset"]) == 0
        for kind in DATA:
            assert main(["fit", "--config", f"{kind}.yaml"]) == 0
    return path


def repairs(line: str, args: list[str], row: dict[str, str]) -> list[list[list[str]]]:
    """Return the alternatives that a message prints: the commands to type, one after the other."""
    for change in filter(None, row["fill"].split(" ; ")):
        old, new = change.split(" => ")
        assert old in line, line
        line = line.replace(old, new)
    found = []
    for part in re.split(r",? or (?=[^`]*(?:`[^`]*`[^`]*)*$)", ADVICE.search(line)[0]):
        typed = [re.sub(r"^\S*gpt-lightning ", "", text) for text in re.findall("`(.*?)`", part)]
        commands = [w for w in map(shlex.split, typed) if w[0] in (*COMMANDS, "--help")]
        flags = dict(FLAG.findall(re.sub("`.*?`", "", part)))
        again = []
        for before, word in zip(["", *args], args, strict=False):
            is_value = before in flags and word[:1] != "-"
            again += [] if is_value or word.partition("=")[0] in flags else [word]
        again += [w for flag, value in flags.items() for w in (flag, *shlex.split(value))]
        if row["then"]:
            again = shlex.split(row["then"].strip("-"))
        elif not flags and [words[0] for words in commands] != ["prepare"]:
            again = []
        if flags or commands:
            found.append([*commands, again] if again else commands)
    return found


@pytest.mark.parametrize(("row", "kind"), cases())
def test_the_fix_in_a_message_works_when_typed(row, kind, folder, tmp_path, monkeypatch, capsys):
    """Type each alternative that a message prints, in a new copy of the folder.

    Columns of a row, in which KIND is the kind of the run:

    message: Words of the message as the source has them, with {} for values.
    runs: Kinds of runs on which the message is tried.
    before: Commands that make the cause, separated by " && ".
    input: The command that prints the message.
    fill: Words of the message that its reader replaces, `old => new`, separated by " ; ".
    then: Command after the printed one. Empty: the input again with the printed options, or
        after `prepare`; -: none.
    when: slow, or empty for the default suite.
    why: Reason why the message is not tried; then it has no runs.
    """
    monkeypatch.setenv("GPT_LIGHTNING_DATA", "")
    monkeypatch.setattr(attempts, "PATIENCE_S", 0.0)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    row = {key: text.replace("KIND", kind) for key, text in row.items()}
    pattern = ".*".join(map(re.escape, row["message"].split("{}")))
    tried, all_tried = 0, 1
    while tried < all_tried:
        shutil.copytree(folder, tmp_path / str(tried))
        monkeypatch.chdir(tmp_path / str(tried))
        for command in filter(None, row["before"].split(" && ")):
            if command.startswith("gpt-lightning "):
                assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err
            else:
                subprocess.run(command, shell=True, check=True)
        args = [w for word in shlex.split(row["input"]) for w in sorted(glob(word)) or [word]]
        capsys.readouterr()
        code = main(args)
        printed = "\n".join(capsys.readouterr())
        line = next((each for each in printed.splitlines() if re.search(pattern, each)), "")
        assert line, (code, printed)
        fixes = repairs(line, args, row)
        for command in fixes[tried]:
            assert main(command) == 0, (command, line, capsys.readouterr().err)
        tried, all_tried = tried + 1, len(fixes)


def text_of(node: ast.AST) -> str:
    """Return the text of a string in the sources, with {} for values."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "{}"
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def test_each_message_with_a_command_or_an_option_has_a_row():
    texts, naming = set(), set()
    for path in PACKAGE.rglob("*.py"):
        nodes = [*ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
        inner = {part for n in nodes if isinstance(n, ast.JoinedStr) for part in ast.walk(n)} - {
            n for n in nodes if isinstance(n, ast.JoinedStr)
        }
        inner |= {n.value for n in nodes if isinstance(n, ast.Expr)}
        raised = {part for n in nodes if isinstance(n, ast.Raise) for part in ast.walk(n)}
        found = {node: text_of(node) for node in nodes if node not in inner}
        texts |= {*found.values()}
        naming |= {
            text
            for node, text in found.items()
            if " " in text and (NAMES if node in raised else ADVISES).search(text)
        }
    rows = table()
    places = {
        message: {message} & texts or {text for text in texts if message in text}
        for message in {row["message"] for row in rows}
    }
    unclear = {message: found for message, found in places.items() if len(found) > 1}
    assert not unclear, unclear
    missing = naming - {text for found in places.values() for text in found}
    assert not missing, "\n".join(sorted(missing))
    exceptions = [row for row in rows if row["why"]]
    assert not any(row["runs"] for row in exceptions)
    assert len(exceptions) <= EXCEPTIONS
