"""Wrong inputs: each ends with exit code 2 and one line that has the expected words."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch.cli import LightningCLI
from wrong_folder import make_folder
from wrong_inputs import FOUND, MORE, SLOW

from gpt_lightning.cli import COMMANDS, main
from gpt_lightning.remote import attempts
from gpt_lightning.training.fit import training_parser


@pytest.fixture(scope="module")
def parsers() -> Iterator[None]:
    """The parser of each training command is built once: it is three quarters of a parse error."""
    prepare = LightningCLI._prepare_subcommand_parser
    built = {}

    def prepare_once(self, klass, subcommand, **kwargs):
        if subcommand not in built:
            parser = prepare(self, klass, subcommand, **kwargs)
            built[subcommand] = parser, self._subcommand_method_arguments[subcommand]
        parser, self._subcommand_method_arguments[subcommand] = built[subcommand]
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LightningCLI, "_prepare_subcommand_parser", prepare_once)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory, parsers) -> tuple[Path, str]:
    """The folder of wrong_folder.py, and the path of its checkpoint."""
    path = tmp_path_factory.mktemp("wrong")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setenv("GPT_LIGHTNING_DATA", "")
        return path, make_folder(path)


def check(command: str, words: str, folder: tuple[Path, str], monkeypatch, capsys) -> None:
    """Run a command with its environment variables; compare exit code and message."""
    path, checkpoint = folder
    monkeypatch.chdir(path)
    monkeypatch.setenv("GPT_LIGHTNING_DATA", "")
    monkeypatch.setattr(attempts, "BACKOFF_S", 0.0)
    args = shlex.split(command.replace("CKPT", checkpoint))
    while args and re.match(r"[A-Z_]+=", args[0]):
        name, _, value = args.pop(0).partition("=")
        monkeypatch.setenv(name, value)
    runs = {run.name for run in (path / "lightning_logs").glob("*/*")}
    code = main(args)
    lines = capsys.readouterr().err.splitlines()
    assert code == 2, lines
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert words in lines[0]
    assert not re.search(r"Traceback|Namespace\(|object at 0x|\w+Error:", lines[0])
    assert not (path / "hacked").exists()
    assert runs == {run.name for run in (path / "lightning_logs").glob("*/*")}, "wrote a run"


@pytest.mark.parametrize(("command", "words"), FOUND, ids=[row[0] for row in FOUND])
def test_wrong_inputs_of_three_strangers(command, words, folder, monkeypatch, capsys):
    check(command, words, folder, monkeypatch, capsys)


@pytest.mark.parametrize(("command", "words"), MORE, ids=[row[0] for row in MORE])
def test_more_wrong_inputs_of_the_same_kinds(command, words, folder, monkeypatch, capsys):
    check(command, words, folder, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(("command", "words"), SLOW, ids=[row[0] for row in SLOW])
def test_wrong_inputs_that_are_found_late(command, words, folder, monkeypatch, capsys):
    check(command, words, folder, monkeypatch, capsys)


def test_messages_name_keys_and_commands_that_exist():
    """Keys and commands in the expected words can be typed."""
    parser = training_parser()
    fit = parser._subcommands_action.choices["fit"]
    keys = {option for action in fit._actions for option in action.option_strings}
    for command, words in (*FOUND, *MORE, *SLOW):
        for key in re.findall(r"did you mean '((?:model|data|trainer)\.[\w.]+)'", words):
            assert f"--{key}" in keys, (command, key)
        for name in re.findall(r"`gpt-lightning (\w+)", words):
            assert name in COMMANDS, (command, name)


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
    assert "which is no Callback" in capsys.readouterr().err
    assert (path / "imported").exists()
    (path / "lambda.yaml").write_text(
        "trainer:\n  callbacks:\n  - class_path: lightning.pytorch.callbacks.LambdaCallback\n"
        "    init_args: {on_fit_start: side_effects.touch}\n"
    )
    command = [
        "fit",
        "--config",
        "tiny.yaml",
        "--config",
        "lambda.yaml",
        "--trainer.max_steps",
        "1",
    ]
    assert main(command) == 0, capsys.readouterr().err
    assert (path / "called").exists()
    assert main(["fit", "--config", "bad/object.yaml"]) == 2
    assert not (path / "hacked").exists()
