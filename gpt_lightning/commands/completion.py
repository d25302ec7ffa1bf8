"""The command `gpt-lightning completion`: a script of shtab with the words of all commands."""

import argparse
import re
from typing import Any, Literal

from gpt_lightning.parsing import actions_of

# words of options whose type is any text
WORDS = {
    "accelerator": "auto cpu gpu mps",
    "data.corpus": "tinyshakespeare shakespeare-plays shakespeare-plays-all",
    "data.tokenizer": "char byte gpt2",
    "device": "auto cpu cuda mps",
    "evaluation.tasks": "hellaswag lambada wikitext",
    "model.compile": "auto true false",
    "model.optimizer": "adamw muon",
    "speed.peak_flops": "auto measure a100",
    "state": "running finished stopped failed killed unknown damaged",
    "tasks": "hellaswag lambada wikitext",
    "tokenizer": "char byte gpt2",
    "trainer.accelerator": "auto cpu gpu mps",
    "trainer.gradient_clip_algorithm": "norm value",
    "trainer.profiler": "simple advanced pytorch",
    "trainer.strategy": "auto ddp fsdp2",
}


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a completion script. Write it to the file that your shell reads at the first <Tab>.

    bash: ~/.local/share/bash-completion/completions/gpt-lightning (needs the package
    bash-completion). zsh: a file _gpt-lightning in a folder of $fpath. fish:
    ~/.config/fish/completions/gpt-lightning.fish. docs/completion.md has the commands.

    Args:
        shell: Your shell.
    """
    import shtab

    print(shtab.complete(program_parser(), shell))


def program_parser() -> argparse.ArgumentParser:
    """Return a plain parser with the commands, options, values and benches of the program."""
    from jsonargparse import capture_parser

    from gpt_lightning.bench.command import find_benches, help_line
    from gpt_lightning.cli import COMMANDS, TRAINING, dispatch
    from gpt_lightning.training.fit import training_parser

    root = argparse.ArgumentParser(prog="gpt-lightning")
    commands = root.add_subparsers()
    actions = actions_of(training_parser())
    training = next(a.choices for a in actions if isinstance(a.choices, dict))
    for name, (text, address, _) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        if address == TRAINING:
            copy_arguments(training.get(name) or training["fit"], command)
            if name != "fit":
                add_argument(command, ["run"], "Run folder.")
        elif name == "bench":
            benches = command.add_subparsers()
            for bench, module in find_benches().items():
                line = help_line(module).replace("%", "%%")
                known = capture_parser(dispatch, [name, bench, "--help"])
                copy_arguments(known, benches.add_parser(bench, help=line, description=line))
        else:
            copy_arguments(capture_parser(dispatch, [name, "--help"]), command)
    return root


def copy_arguments(source: argparse.ArgumentParser, target: argparse.ArgumentParser) -> None:
    """Give a plain parser the arguments of a parser of jsonargparse."""
    for action in actions_of(source):
        names = [name for name in action.option_strings if not name.endswith((".help", "+"))]
        shown = names or not action.option_strings
        if shown and action.dest not in ("help", "print_config"):
            text = " ".join((action.help or "").replace("%%", "%").split())
            add_argument(target, names or [action.dest], text, action)


def values_of(action: argparse.Action, text: str) -> list[str]:
    """Return the words that an argument takes; empty if it takes any text.

    jsonargparse writes the words of a type as {A,B}; the help says "One of A, B and C".
    """
    if action.dest in WORDS:
        return WORDS[action.dest].split()
    if found := re.fullmatch(r"\{(.*)\}", str(action.metavar)):
        return found[1].split(",")
    listed = re.match(r"(?:One|Any) of ((?:(?:, | and )?(?!separated|or )[\w./-]*\w)+)", text)
    return re.split(", | and ", listed[1]) if listed else [*map(str, action.choices or ())]


def add_argument(
    parser: argparse.ArgumentParser, names: list[str], text: str, like: Any = None
) -> None:
    """Add an argument that completes to words; without words to paths.

    Args:
        parser: Parser to add it to.
        names: Option strings, or the name of a positional argument.
        text: Help.
        like: Argument of jsonargparse with the same values; None: one path.
    """
    import shtab

    from gpt_lightning.parsing import config_names

    about = re.split(r"(?<=\w)[.:;] ", text)[0].replace("%", "%%")
    if like is not None and like.nargs == 0:
        parser.add_argument(*names, action="store_true", help=about)
        return
    values = values_of(like, text) if like is not None else []
    nargs = like.nargs if like is not None else None
    action = parser.add_argument(*names, help=about, nargs=nargs, choices=values or None)
    if "--config" in names and text != "Path to a configuration file.":
        words = " ".join(config_names())
        both = f'compgen -W "{words}" -- "$1"; compgen -f -- "$1"'
        action.complete = {  # type: ignore[attr-defined]  # shtab reads it
            "bash": "gpt_lightning_config_files",
            "zsh": f"{{_alternative 'names:configuration:({words})' 'files:file:_files'}}",
            "fish": f"{words} (__fish_complete_path (commandline -ct))",
            "preamble": {"bash": f"gpt_lightning_config_files() {{ {both}; }}"},
        }
    elif not values:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
