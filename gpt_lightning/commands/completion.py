"""The command `gpt-lightning completion`.

A script is a table of the commands' words (rows below), a program for awk that finds the words for
a command line (completion.awk), and a few lines for the shell (completion.bash, .zsh and .fish). It
is a file that the shell reads at the first <Tab>, so that a shell starts as fast as without it.
"""

import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

# key -> words of options that take any text
WORDS: dict[str, str] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print a completion script. Write it to the file that your shell reads at the first <Tab>.

    bash: ~/.local/share/bash-completion/completions/gpt-lightning (needs the package
    bash-completion). zsh: a file _gpt-lightning in a folder of $fpath. fish:
    ~/.config/fish/completions/gpt-lightning.fish. docs/completion.md has the commands.

    Args:
        shell: Your shell.
    """
    template = Path(__file__).with_suffix(f".{shell}").read_text(encoding="utf-8")
    lines = "\n".join("\t".join(row) for row in rows())
    program = Path(__file__).with_suffix(".awk").read_text(encoding="utf-8")
    if shell == "fish":  # has no here-documents
        lines = lines.replace("\\", "\\\\").replace("'", "\\'")
    print(template.replace("@PROGRAM@", program.rstrip()).replace("@TABLE@", lines), end="")


def rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield command, word, values of the word, and help.

    The word is a subcommand, an option, or empty for the positional arguments. The values are
    words, separated by spaces: "@file" for paths, "@config" for the names of configurations, whose
    rows have it in place of a command, and "-" for an option without a value.
    """
    from gpt_lightning.cli import COMMANDS
    from gpt_lightning.parsing import config_names
    from gpt_lightning.training.fit import training_parser

    training: Any = training_parser()._subcommands_action
    for name, (address, text) in COMMANDS.items():
        yield "", name, "", text
        if address == COMMANDS["fit"][0]:
            yield from parser_rows(name, training.choices.get(name, training.choices["fit"]))
            yield from [(name, "", "@file", "Run folder.")] if name != "fit" else []
        else:
            yield from command_rows(name)
    for name in config_names():
        yield "@config", name, "", ""


def command_rows(*words: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of a command, or of the subcommands that its help lists."""
    from jsonargparse import capture_parser
    from jsonargparse._util import CaptureParserException  # of a function that parses nothing

    from gpt_lightning.cli import dispatch

    listing = io.StringIO()
    try:
        with contextlib.redirect_stdout(listing):
            parser = capture_parser(dispatch, [*words, "--help"])
    except CaptureParserException:
        for name, text in re.findall(r"^  (\S+)  +(.*)$", listing.getvalue(), re.MULTILINE):
            yield *words, name, "", text
            yield from command_rows(*words, name)
    else:
        yield from parser_rows(" ".join(words), parser)


def parser_rows(command: str, parser: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of a parser: one for each option, and for each positional argument."""
    if "Options of `fit`" in (parser.description or ""):
        yield command, "@fit", "", ""  # it passes them on
    for action in parser._actions:
        text = " ".join((action.help or "").replace("%%", "%").split())
        values = " ".join(dict.fromkeys(values_of(action, text))) if action.nargs != 0 else "-"
        about = re.split(r"(?<=\w)[.:;] ", text)[0]
        for word in action.option_strings or [""]:
            yield command, word, values, about


def values_of(action: Any, text: str) -> Iterator[str]:
    """Yield the words that an argument takes, and "@file" if it takes any text.

    Args:
        action: The argument.
        text: Help of the argument. "One of A, B and C" names the words.
    """
    listed = re.findall(r"^(?:One|Any) of ((?:(?:, | and )?(?!separated|or )[\w./-]*\w)+)", text)
    if "--config" in action.option_strings and text != "Path to a configuration file.":
        yield from ("@config", "@file")
    elif action.choices or listed:
        yield from action.choices or re.split(", | and ", listed[0])
    elif action.dest in WORDS:
        yield from WORDS[action.dest].split()
    else:
        yield from words_of(getattr(action, "_typehint", action.type or str))


def words_of(kind: Any) -> Iterator[str]:
    """Yield the words of a type: those of literals, true and false; "@file" for any text."""
    if get_origin(kind) is Literal:
        yield from map(str, get_args(kind))
    elif kind in (str, Path, Any):
        yield "@file"
    elif kind is bool:
        yield from ("true", "false")
    for part in () if get_origin(kind) in (dict, Literal) else get_args(kind):
        yield from words_of(part)
