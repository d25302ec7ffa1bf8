"""Command-line arguments and configuration files, with errors of one line that name the fix."""

import argparse
import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml
from jsonargparse import ArgumentParser

from gpt_lightning.errors import UserError

PACKAGE = Path(__file__).resolve().parent
# an installed package has a copy of the checkout's configs/ inside
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
REPLACED_KEYS = {
    "precision": "write trainer.precision: auto (or --trainer.precision auto) instead of "
    "precision: auto, and remove precision: null"
}
# forms of jsonargparse's messages with the value that was given
GIVEN = (
    r"(?:Got|Given) value: (.*)",
    r"Not of type \w+: (\S+) (?:does not conform|not an? )",
    r"(?:string to float|int\(\) with base 10): '(.*?)'",
    r"a real number, not '(NoneType)'",
)


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return the hint ": did you mean ...?", or an empty string if no candidate is close."""
    found = difflib.get_close_matches(word, list(candidates), n=1)
    return f": did you mean {found[0]!r}?" if found else ""


def most_similar(word: str, candidates: Iterable[str]) -> list[str]:
    """Return all candidates, the most similar to a word first."""
    return sorted(candidates, key=lambda known: -difflib.SequenceMatcher(None, word, known).ratio())


class OneLineParser(ArgumentParser):
    """Parser without abbreviations, whose errors are UserErrors of one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, allow_abbrev=False)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        raise UserError(explain(message, known_keys(self))) from ex


def known_keys(parser: argparse.ArgumentParser) -> list[str]:
    """Return all keys of a parser and its subcommands, spelled as options without dashes."""
    keys = []
    for action in parser._actions:
        keys += [option.lstrip("-") for option in action.option_strings] or [action.dest]
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                keys += known_keys(subparser)
    return keys


def explain(message: str, keys: Iterable[str]) -> str:
    """Return jsonargparse's message as one line: the key, what was found, what was expected.

    Args:
        message: Message of jsonargparse, of several lines.
        keys: Candidates for the hint at an unknown key.
    """
    text = " ".join(message.split())
    unknown = re.search(r"(?:unrecognized arguments: |does not accept option )'?-*([\w.]+)", text)
    if unknown:
        replaced = REPLACED_KEYS.get(unknown[1])
        hint = f": {replaced}" if replaced else nearest(unknown[1], keys)
        return f"unknown key {unknown[1]!r}{hint}"
    key = re.search(r'Parser key "([\w.]+)": (.*)', text)
    given = key and next(filter(None, (re.search(form, key[2]) for form in GIVEN)), None)
    if key is None or given is None:
        return text
    bounds = re.findall(r"Not of type (\w+):.*? restriction (v\S+(?: and v\S+)*)", key[2])
    if bounds:
        return f"{key[1]} is {given[1]}; it must be {' or '.join(in_words(*b) for b in bounds)}"
    expected = ", ".join(dict.fromkeys(expectations(key[2])))
    value = given[1].replace("NoneType", "null")
    return f"{key[1]} is {value!r}; expected {expected or 'another type'}"


def in_words(kind: str, restriction: str) -> str:
    """Return the bound of a jsonargparse number type, such as "at least 0" for "v>=0"."""
    if kind.endswith("Int") and restriction == "v>0":
        return "at least 1"
    signs = {">=": "at least ", "<=": "at most ", ">": "above ", "<": "below "}
    return re.sub(r"v([<>]=?)", lambda sign: signs[sign[1]], restriction)


def expectations(text: str) -> Iterator[str]:
    """Yield the types and words that jsonargparse's message would have accepted, in order."""
    forms = r"Expected an? (?:<class '(\w+)'>|typing\.Literal\[([^\]]*)\])|Not of type (\w+):"
    for found in re.finditer(forms, text):
        if found[1]:
            yield "null" if found[1] == "NoneType" else found[1]
        elif found[2]:
            yield found[2].replace("'", "")
        else:
            yield "int" if found[3].endswith("Int") else "float"


def check_arguments(kind: type, prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check values from Python against a class's annotations, as the command line would.

    Args:
        kind: Class whose `__init__` (or dataclass fields) declares the types.
        prefix: Key before the names, such as "model"; "" for none.
        values: Arguments by name.

    Returns:
        The values by name, converted to the declared types (a list to a tuple; a number with
        bounds to a plain int or float; a pathlib.Path to a string).

    Raises:
        UserError: a value is out of bounds or of another type.
    """
    parser = OneLineParser()
    parser.add_class_arguments(kind, prefix or None)
    given = {name: str(v) if isinstance(v, Path) else v for name, v in values.items()}
    parsed = parser.parse_object({prefix: given} if prefix else given)
    checked: dict[str, Any] = (parsed[prefix] if prefix else parsed).as_dict()
    return {name: plain_number(checked[name]) for name in values}


def plain_number(value: Any) -> Any:
    """Return plain numbers for jsonargparse's types, which no checkpoint may hold."""
    if isinstance(value, tuple | list):
        return type(value)(map(plain_number, value))
    for plain in (int, float):
        if isinstance(value, plain) and not isinstance(value, bool):
            return plain(value)
    return value


def program(name: str = "gpt-lightning") -> str:
    """Return the word that starts a program of this installation when typed into this shell.

    The name alone if PATH leads to it; else its path, relative where it is below the working
    directory (`.venv/bin/gpt-lightning`).
    """
    ours, found = Path(sys.executable).parent / name, shutil.which(name)
    if not ours.exists() or (found is not None and ours.samefile(found)):
        return name
    relative = os.path.relpath(ours)
    return shlex.quote(str(ours) if relative.startswith("..") else relative)


def underscored(args: list[str]) -> list[str]:
    """Return arguments with underscores in option names: --shard-index becomes --shard_index."""
    return [
        re.sub(r"^--[\w-]+", lambda name: "--" + name[0][2:].replace("-", "_"), a) for a in args
    ]


def split_fit_options(args: list[str]) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into its own and the options of `fit` that it passes on.

    Options of `fit` have a dot in their name (--model.learning_rate) or are --seed_everything. The
    value after an option goes with it.
    """
    own: list[str] = []
    fit: list[str] = []
    rest = list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, _ = arg.partition("=")
        if name.startswith("--") and ("." in name or name == "--seed_everything"):
            fit += [arg] if equals or not rest else [arg, rest.pop(0)]
        else:
            own.append(arg)
    return own, fit


# ---- configuration files -------------------------------------------------------------------------


def config_names() -> list[str]:
    """Return the names of all configurations, such as quickstart and ladder/bf16."""
    paths = [path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.rglob("*.yaml")]
    return [path.as_posix() for path in sorted(paths, key=lambda path: (len(path.parts), path))]


def config_file(name: str) -> Path:
    """Return the file of a configuration that is named by its path, or as config_names() has it.

    Raises:
        UserError: There is neither such a file nor such a name; the message has the nearest.
    """
    path, named = Path(name), CONFIGS / f"{name}.yaml"
    if named.is_file() and (path.is_dir() or not path.exists()):
        return named
    if path.exists():
        return path
    candidates = [*config_names(), *map(str, path.parent.glob("*.yaml"))]
    raise UserError(
        f"--config {name}: no such file or configuration{nearest(name, candidates)}; "
        "gpt-lightning configs lists the names"
    )


def resolve_configs(args: list[str]) -> list[str]:
    """Return arguments with the path of each configuration in place of its name.

    Raises:
        UserError: A configuration is missing, is no mapping in YAML, or sets a key twice.
    """
    resolved = list(args)
    for i in config_positions(args):
        path = config_file(args[i].removeprefix("--config="))
        check_config_file(path)
        resolved[i] = f"--config={path}" if args[i].startswith("--config=") else str(path)
    return resolved


def config_paths(args: list[str]) -> list[Path]:
    """Return the values of --config and -c."""
    return [Path(args[i].removeprefix("--config=")) for i in config_positions(args)]


def config_positions(args: list[str]) -> list[int]:
    """Return the indices of arguments with a value of --config or -c."""
    return [
        i
        for i, arg in enumerate(args)
        if arg.startswith("--config=") or (i > 0 and args[i - 1] in ("--config", "-c"))
    ]


def check_config_file(path: Path) -> None:
    """Raise a UserError if a file is unreadable, is no mapping in YAML, or sets a key twice.

    A YAML parser silently takes the last of two equal keys.
    """
    try:
        root = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"--config {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(root, yaml.MappingNode):
        raise UserError(f"--config {path} holds no keys: it should look like configs/*.yaml")
    for key, line in duplicate_keys(root):
        raise UserError(f"--config {path}, line {line}: {key!r} is set twice; remove one")


def duplicate_keys(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
    """Yield keys that occur twice in one mapping of a YAML node graph, with the second's line."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from duplicate_keys(item, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        name = f"{prefix}{key.value}"
        if name in seen:
            yield name, key.start_mark.line + 1
        seen.add(name)
        yield from duplicate_keys(value, f"{name}.")
