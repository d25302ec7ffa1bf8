"""The command `gpt-lightning completion`: a script of shtab with the words of all commands."""

import argparse
import re
from pkgutil import resolve_name
from typing import Any, Literal

from gpt_lightning.errors import one_line
from gpt_lightning.files import yaml_beside
from gpt_lightning.parsing import actions_of

WORDS: dict[str, str] = yaml_beside(__file__)
FILES = "gpt_lightning_config_files"  # function of the script for bash


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a completion script. Write it to the file that your shell reads at the first <Tab>.

    bash: ~/.local/share/bash-completion/completions/gpt-lightning (needs the package
    bash-completion). zsh: a file _gpt-lightning in a folder of $fpath. fish:
    ~/.config/fish/completions/gpt-lightning.fish. docs/commands.md has the commands.

    Args:
        shell: Your shell.
    """
    import shtab

    print(shtab.complete(program_parser(), shell))


def program_parser() -> argparse.ArgumentParser:
    """Return the parsers of all commands, with what completes the value of each argument."""
    from jsonargparse import ArgumentParser, capture_parser

    from gpt_lightning.bench.command import find_benches
    from gpt_lightning.cli import COMMANDS, TRAINING, dispatch
    from gpt_lightning.training.fit import training_parser

    # two parsers of `fit`, the second for `resume RUN`
    training, again = (
        next(a.choices for a in actions_of(training_parser()) if a.choices) for _ in range(2)
    )
    training["resume"] = again["fit"]
    root = ArgumentParser(prog="gpt-lightning")
    commands = root.add_subcommands()
    for name, (text, address, _) in COMMANDS.items():
        if address == TRAINING:
            command = training[name]
            if name != "fit":
                command.add_argument("run", help="Run folder.")
        elif name != "bench":
            command = capture_parser(dispatch, [name, "--help"])
        else:
            command = ArgumentParser()
        commands.add_subcommand(name, complete_values(command), help=text)
        if name == "bench":
            benches = command.add_subcommands()
            for bench, line in find_benches().items():
                known = capture_parser(dispatch, [name, bench, "--help"])
                help_line = line.replace("%", "%%")
                benches.add_subcommand(bench, complete_values(known), help=help_line)
    return root


def complete_values(parser: Any) -> Any:
    """Let the arguments of a parser complete to the words of their type; without words to paths."""
    import shtab

    from gpt_lightning.parsing import config_names

    for action in actions_of(parser):
        text = one_line((action.help or "").replace("%%", "%"))
        action.help = re.split(r"(?<=\w)[.:;] ", text)[0].replace("%", "%%")
        if action.dest.endswith(("help", "print_config")):
            action.help = argparse.SUPPRESS
        elif "--config" in action.option_strings and text != "Path to a configuration file.":
            words = " ".join(config_names())
            bash = f'{FILES}() {{ compgen -W "{words}" -- "$1"; compgen -f -- "$1"; }}'
            action.complete = {
                "bash": FILES,
                "zsh": f"{{_alternative 'names:configuration:({words})' 'files:file:_files'}}",
                "fish": f"{words} (__fish_complete_path (commandline -ct))",
                "preamble": {"bash": bash},
            }
        elif action.nargs != 0:
            action.choices = values_of(action) or None
            if action.choices is None:
                action.complete = shtab.FILE
    return parser


def values_of(action: argparse.Action) -> list[str]:
    """Return the words that an argument takes; empty if it takes any text.

    jsonargparse writes the words of a type as {A,B}.
    """
    if words := WORDS.get(action.dest):
        return [*resolve_name(f"gpt_lightning.{words}")()] if ":" in words else words.split()
    if found := re.fullmatch(r"\{(.*)\}", str(action.metavar)):
        return found[1].split(",")
    return [*map(str, action.choices or ())]
