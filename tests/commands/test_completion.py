"""Completion, in the real shells: words, keys, values, configurations and paths."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
import yaml

from gpt_lightning.bench.command import find_benches
from gpt_lightning.cli import COMMANDS, main
from gpt_lightning.commands import completion
from gpt_lightning.data.texts import CORPORA
from gpt_lightning.parsing import OneLineParser, config_names
from gpt_lightning.reproduce.cases import CASES

ROOT = Path(__file__).parents[2]
# a table with each kind of row
ROWS = [
    ("", "fit", "", 'train it\'s a \\\\ "model": $HOME'),
    ("", "bench", "", "measure"),
    ("", "sample", "", ""),
    ("fit", "--config", "@config @file", "Configuration"),
    ("fit", "--model.optimizer", "adamw muon", "Name"),
    ("fit", "--model.learning_rate", "", "Peak"),
    ("fit", "--data.text_file", "@file", "Path"),
    ("fit", "--print_config", "-", ""),
    ("fit", "--seed", "", ""),
    ("bench", "sizes", "", "Times"),
    ("bench sizes", "@fit", "", ""),
    ("bench sizes", "--dtypes", "fp32 bf16", ""),
    ("sample", "", "@file", "A run"),
    ("sample", "--out", "@file", "New file"),
    ("check", "", "inspect mine", ""),
    ("check", "", "@file", ""),
    ("@config", "quickstart", "", ""),
    ("@config", "ladder/bf16", "", ""),
]
# line that is typed -> words that are offered
OFFERED = {
    "": ["bench", "fit", "sample"],
    "fit --model.lea": ["--model.learning_rate"],
    "fit --config q": ["qu.yaml", "quickstart"],
    "fit --config=q": ["qu.yaml", "quickstart"],
    "fit --config ladder/": ["ladder/bf16"],
    "fit --model.optimizer ": ["adamw", "muon"],
    "fit --model.optimizer=m": ["muon"],
    "fit --seed ": [],
    "fit --data.text_file qu": ["qu.yaml"],
    "fit --data.text_file=qu": ["qu.yaml"],
    "fit --print_config --model.l": ["--model.learning_rate"],
    "bench ": ["sizes"],
    "bench sizes --mo": ["--model.learning_rate", "--model.optimizer"],
    "bench sizes --d": ["--data.text_file", "--dtypes"],
    "bench sizes --dtypes ": ["bf16", "fp32"],
    "bench sizes --model.optimizer a": ["adamw"],
    "sample ": ["model.ckpt", "my runs/", "qu.yaml", "script"],
    "sample my": ["my runs/"],
    "sample --out my": ["my runs/"],
    "resume my": ["my runs/"],  # a command that reads its arguments by itself
    "check i": ["inspect"],
}
BASH = """source ./script
while IFS= read -r line; do
    read -ra COMP_WORDS <<< "gpt-lightning ${line//=/ = }"
    [[ $line == *' ' || -z $line ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _gpt_lightning
    # -o default: without words, readline completes paths, unless the function turns that off
    if [[ ${#COMPREPLY[@]} -eq 0 && -n $default ]]; then
        while IFS= read -r path; do
            COMPREPLY+=("$path$([[ -d $path ]] && echo /)")
        done < <(compgen -f -- "${COMP_WORDS[COMP_CWORD]}")
    fi
    printf '%s\\t' "${COMPREPLY[@]}"
    echo
done
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, request) -> str:
    """A folder with files, and ./script for a shell that is installed."""
    if shutil.which(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(completion, "rows", lambda: iter(ROWS))
    (tmp_path / "my runs").mkdir()
    (tmp_path / "qu.yaml").touch()
    (tmp_path / "model.ckpt").touch()
    with Path("script").open("w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        completion.completion(request.param)
        monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    return request.param


def run(*command: str, given: str = "") -> str:
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=60)
    assert done.stderr == "", done.stderr
    return done.stdout


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_bash_offers_words_and_paths(shell):
    # compopt works inside of a completion alone
    compopt = 'default=1; compopt() { [[ "$*" != "+o default" ]] || default=""; }\n'
    script = compopt + BASH.replace("    _gpt_lightning\n", "    default=1; _gpt_lightning\n")
    lines = run("bash", "-c", script, given="".join(f"{line}\n" for line in OFFERED)).splitlines()
    found = [sorted(filter(None, line.split("\t"))) for line in lines]
    assert dict(zip(OFFERED, found, strict=True)) == OFFERED


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_bash_quotes_a_path_beside_words_whatever_awk_is(shell):
    call = "awk() { false; }; source ./script; COMP_WORDS=(x check m); COMP_CWORD=2; "
    found = run("bash", "-c", call + "_gpt_lightning; printf '%s\\n' \"${COMPREPLY[@]}\"")
    assert sorted(found.splitlines()) == ["mine", "model.ckpt", "my\\ runs/"]


@pytest.mark.parametrize("shell", ["fish"], indirect=True)
def test_fish_offers_words_with_help_and_paths(shell):
    typed = "\n".join(f'echo == (complete -C "gpt-lightning {line}")' for line in OFFERED)
    found = run("fish", "--no-config", "-c", f"source ./script\n{typed}").split("==")[1:]
    for line, printed in zip(OFFERED, found, strict=True):
        for word in OFFERED[line]:
            assert word in printed, (line, printed)
    assert (
        run("fish", "--no-config", "-c", "source ./script; complete -C 'gpt-lightning f'")
        == 'fit\ttrain it\'s a \\\\ "model": $HOME\n'
    )
    option = "source ./script; complete -C 'gpt-lightning fit --data.text_file=q'"
    assert run("fish", "--no-config", "-c", option) == "--data.text_file=qu.yaml\n"
    number = "source ./script; complete -C 'gpt-lightning fit --seed '"
    assert run("fish", "--no-config", "-c", number) == ""


@pytest.mark.slow  # a pseudo-terminal, because zsh completes in its line editor alone
@pytest.mark.parametrize("autoload", [True, False])
@pytest.mark.parametrize("shell", ["zsh"], indirect=True)
def test_zsh_inserts_words_and_paths(shell, autoload):
    typed = {
        "be": "bench ",
        "fit --model.lea": "fit --model.learning_rate ",
        "fit --config=qui": "fit --config=quickstart ",
        "fit --model.optimizer=m": "fit --model.optimizer=muon ",
        "fit --config qu.": "fit --config qu.yaml ",
        "fit --data.text_file=q": "fit --data.text_file=qu.yaml ",
        "sample my": "sample my\\ runs/",
        "bench sizes --dtypes b": "bench sizes --dtypes bf16 ",
    }
    Path("_gpt-lightning").write_text(Path("script").read_text())
    start = "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D"
    start += "" if autoload else "; unfunction _gpt-lightning; source ./script"
    driver = f"""zmodload zsh/zpty; zpty z zsh -f -i
show='print -r -- "<$BUFFER>"; BUFFER="exit"; zle accept-line'
zpty -w z '{start}; show() {{ print -r -- "<$BUFFER>"; BUFFER=; }}
zle -N show; bindkey "^X" show; stty cols 500; echo RE''ADY'
zpty -r -m z line '*READY*'
while IFS= read -r typed; do
    zpty -n -w z "gpt-lightning $typed"$'\\t\\x18'
    zpty -r -m z line '*<gpt-lightning*>*'; print -r -- "$line"
done
zpty -d z
"""
    Path("driver").write_text(driver)
    found = run("zsh", "-f", "./driver", given="".join(f"{line}\n" for line in typed))
    for line in typed.values():
        assert f"<gpt-lightning {line}>" in found, found


@pytest.mark.parametrize("shell", ["bash"], indirect=True)
def test_bash_completion_loads_the_file_at_the_first_tab(shell):
    library = Path("/usr/share/bash-completion/bash_completion")
    if not library.exists():
        pytest.skip("bash-completion is not installed")
    folder = Path("home/.local/share/bash-completion/completions")
    folder.mkdir(parents=True)
    shutil.copy("script", folder / "gpt-lightning")
    load = (
        f"HOME=$PWD/home; . {library}; _completion_loader gpt-lightning; complete -p gpt-lightning"
    )
    printed = run("bash", "-c", load + "; true")
    assert printed == "complete -o default -F _gpt_lightning gpt-lightning\n"


# ---- the table -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (int, []),
        (str, ["@file"]),
        (Path | None, ["@file"]),
        (bool, ["true", "false"]),
        (Literal["a", 2] | bool | None, ["a", "2", "true", "false"]),
        (list[Literal["x"]], ["x"]),
        (dict[str, float], []),
    ],
)
def test_words_come_from_the_type(kind, words):
    assert list(completion.words_of(kind)) == words


def test_rows_of_a_parser():
    parser = OneLineParser(description="Options of `fit` follow.", add_help=False)
    parser.add_argument("case", help="One of a, b-1.0 and c, separated by commas.")
    parser.add_argument("--sizes", "--size", default="x", help="Any of 2.7B, small; or none.")
    parser.add_argument("--list", action="store_true", help="Show 5%% of it. Not more.")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--config", help="Configuration of `fit`.")
    parser.add_argument("--accelerator", type=str | None, default=None)
    assert list(completion.parser_rows("x y", parser)) == [
        ("x y", "@fit", "", ""),
        ("x y", "", "a b-1.0 c", "One of a, b-1.0 and c, separated by commas."),
        ("x y", "--sizes", "2.7B small", "Any of 2.7B, small"),
        ("x y", "--size", "2.7B small", "Any of 2.7B, small"),
        ("x y", "--list", "-", "Show 5% of it"),
        ("x y", "--steps", "", ""),
        ("x y", "--config", "@config @file", "Configuration of `fit`."),
        ("x y", "--accelerator", "auto cpu gpu mps", ""),
    ]


def test_texts_have_the_words_that_the_code_accepts():
    words = completion.WORDS
    optimizers = ROOT / "gpt_lightning" / "training" / "optimizers"
    names = {path.stem for path in optimizers.glob("[!_]*.py")}
    assert set(words["model.optimizer"].split()) == names
    assert set(words["data.corpus"].split()) == {*CORPORA, "null"}


@pytest.mark.slow  # makes the parser of every command, 5 s
def test_the_table_has_every_command_option_and_name(capfd):
    begin = time.process_time()
    assert main(["completion", "bash"]) == 0
    assert time.process_time() - begin < 60
    printed, errors = capfd.readouterr()
    assert errors == ""  # none of Lightning's warnings
    rows = [line.split("\t") for line in printed.splitlines() if line.count("\t") == 3]
    table = {(command, word): values for command, word, values, _ in rows}
    assert {("", name) for name in COMMANDS} <= set(table)
    assert {("bench", name) for name in find_benches()} <= set(table)
    assert {("@config", name) for name in config_names()} <= set(table)
    assert set(table["reproduce", ""].split()) >= set(CASES)
    for command in ("fit", "validate", "test", "predict"):
        assert table[command, "--config"] == "@config @file"
        assert table[command, "--model.config.n_layer"] == ""
        assert table[command, "--model.optimizer"] == "adamw muon"
        assert table[command, "--ckpt_path"] == "@file"
        assert table[command, "--model.compile"] == "true false auto"
    assert table["bench sizes", "--dtypes"] == "fp32 tf32 bf16 fp16"
    assert table["data", "--split"] == "@file"
    assert table["completion", ""] == "bash zsh fish"
    assert table["doctor", "--resume"] == "-"
    assert ("doctor", "@fit") in table
    keys = {word.lstrip("-") for _, word in table}
    assert set(completion.WORDS) <= keys  # no word of an option that is gone
    assert len(printed) < 100_000


def test_the_words_are_a_file_of_text():
    text = Path(completion.__file__).with_suffix(".yaml").read_text()
    assert all(isinstance(words, str) for words in yaml.safe_load(text).values())
    awk = Path(completion.__file__).with_suffix(".awk").read_text()
    assert not set("'\\") & set(awk)  # it stands between single quotes, in fish too


def test_a_reader_that_goes_away_ends_it_quietly(monkeypatch, tmp_path):
    read, write = os.pipe()
    os.close(read)
    code = (
        "from gpt_lightning.commands import completion\n"
        "from gpt_lightning.cli import main\n"
        "completion.rows = lambda: iter([('a',) * 4] * 20_000)\n"
        "raise SystemExit(main(['completion', 'bash']))"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_commands_of_a_run_offer_paths():
    found = [row[0] for row in completion.rows() if row[1:3] == ("", "@file")]
    assert {"resume", "validate", "test", "predict", "runs", "plot", "sample"} <= {*found}
    assert "fit" not in found
