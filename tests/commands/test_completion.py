"""Completion: the script of each shell has every word, and bash completes with it."""

import shutil
import subprocess
from argparse import Action
from pathlib import Path

import pytest

from gpt_lightning.bench.command import find_benches
from gpt_lightning.cli import COMMANDS, main
from gpt_lightning.commands import completion
from gpt_lightning.data.texts import CORPORA
from gpt_lightning.evaluate.tasks import FILES, TASKS
from gpt_lightning.parsing import config_names
from gpt_lightning.reproduce.cases import CASES

ROOT = Path(__file__).parents[2]

# line that is typed -> words that are offered
OFFERED = {
    "": {*COMMANDS},
    "fit --model.lea": {"--model.learning_rate", "--model.learning_rate_factors"},
    "fit --config q": {"qu.yaml", "quickstart"},
    "fit --model.optimizer ": {"adamw", "muon"},
    "fit --config quickstart --model.compile t": {"true"},
    "fit --data.text_file qu": {"qu.yaml"},
    "bench ": {*find_benches()},
    "bench sizes --dtypes b": {"bf16"},
    "reproduce shakespeare-char-s": {"shakespeare-char-small"},
    "checkpoint ": {"inspect", "verify", "convert"},
    "sample my": {"my_runs"},
    "runs --state k": {"killed"},
}
BASH = """source ./script
compopt() { :; }  # it works inside of a completion alone
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "gpt-lightning $line"
    [[ $line == *' ' || -z $line ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _shtab_gpt_lightning
    echo "${COMPREPLY[@]}"
done
"""


@pytest.fixture(scope="module")
def parser():
    """The parser of every command, which takes 5 s to make, made once."""
    return completion.program_parser()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_has_every_command_option_and_name(shell, parser, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(completion, "program_parser", lambda: parser)
    assert main(["completion", shell]) == 0
    script, errors = capfd.readouterr()
    assert errors == ""
    words = [*COMMANDS, *find_benches(), *config_names(), *CASES]
    words += ["model.config.n_layer", "ckpt_path", "dtypes", "split"]
    assert not [word for word in words if word not in script]
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    monkeypatch.chdir(tmp_path)
    Path("script").write_text(script)
    Path("my_runs").mkdir()
    Path("qu.yaml").touch()
    subprocess.run([shell, "-n", "script"], check=True)
    if shell == "bash":
        typed = "".join(f"{line}\n" for line in OFFERED)
        done = subprocess.run(["bash", "-c", BASH], input=typed, capture_output=True, text=True)
        assert done.stderr == ""
        found = [{*line.split()} for line in done.stdout.splitlines()]
        assert dict(zip(OFFERED, found, strict=True)) == OFFERED


def test_the_words_are_those_that_the_code_accepts():
    files = (ROOT / "gpt_lightning/training/optimizers").glob("[!_]*.py")
    names = {"model.optimizer": [path.stem for path in files], "data.corpus": CORPORA}
    for key, known in (names | {"tasks": TASKS, "evaluation.tasks": FILES}).items():
        assert {*completion.values_of(Action([], key))} == {*known}
