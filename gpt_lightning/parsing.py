"""Command-line arguments and configuration files, with errors of one line that name the fix."""

import argparse
import functools
import inspect
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import yaml
from jsonargparse import (  # type: ignore[attr-defined]
    ActionConfigFile,
    ArgumentParser,
    Namespace,
)
from jsonargparse.typing import restricted_number_type

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, yaml_beside

T = TypeVar("T")
Seed = int
TopP = float
HalfOpen = float
if not TYPE_CHECKING:
    Seed = restricted_number_type("SeedInt", int, [(">=", 0), ("<=", 2**32 - 1)])
    TopP = restricted_number_type("TopPFloat", float, [(">", 0), ("<=", 1)])
    HalfOpen = restricted_number_type("HalfOpenUnitInterval", float, [(">=", 0), ("<", 1)])
PACKAGE = Path(__file__).resolve().parent
# an installed package has a copy of the checkout's configs/ inside
CONFIGS = PACKAGE / "configs" if (PACKAGE / "configs").is_dir() else PACKAGE.parent / "configs"
NO_BREAK = "\u2011"  # hyphen at which no line ends
# a number that YAML 1.1 reads in another base: 010 is 8, 1:30 is 90
OTHER_BASE = re.compile(r"[-+]?(0[0-7_]+|[1-9][\d_]*(:[0-5]?\d)+(\.[\d_]*)?)")
NO_EFFECT: list[dict[str, str]] = yaml_beside(__file__)
# --prompt '' begins a new text; --data.text_file= takes the text of a configuration away
MAY_BE_EMPTY = ("prompt", "data.dataset", "data.corpus", "data.text_file")

script = ""  # words that start a script with GPTCLI, which has all commands; "" in gpt-lightning


def nearest(word: str, candidates: Iterable[str]) -> str:
    """Return the hint ": did you mean ...?", or an empty string if no candidate is close."""
    from gpt_lightning.hints import closest  # wrong arguments alone need it

    found = closest(word, candidates)
    return f": did you mean {found!r}?" if found else ""


def pick(name: str, known: Iterable[str], problem: str) -> str:
    """Return a name that is known.

    Raises:
        UserError: It is not; the message begins with the problem.
    """
    known = list(known)
    if name not in known:
        raise UserError(f"{problem} {name!r}{nearest(name, known)}; there are {', '.join(known)}")
    return name


def typed_values(words: Sequence[str]) -> dict[str, str]:
    """Return the text after each option by its key, as --key=TEXT or --key TEXT."""
    # no argument of a process has \0 inside; the text may be an option, too
    return dict(re.findall(r"(?:^|\0)--([^=\0]+)(?=[=\0]([^\0]*))", "\0".join([*words, ""])))


def joined(args: list[str]) -> list[str]:
    """Return arguments with each option and its value as one word, --key=value."""
    words: list[str] = []
    for arg in args:
        if words and re.fullmatch("--[^=]+", words[-1]) and not re.match("-.", arg):
            words[-1] += f"={arg}"
        else:
            words.append(re.sub("^-c(?==|$)", "--config", arg))
    return words


def files_first(args: list[str]) -> list[str]:
    """Return the arguments of a command line with its configurations before all other options.

    An option overrides a configuration wherever it was typed; jsonargparse alone lets the later of
    the two win. Positional arguments become the first, as a switch without a value may not be
    followed by one.
    """
    words = joined(args)
    names = [word for word in words if not word.startswith("-")]
    files = [word for word in words if word.startswith("--config=")]
    others = [word for word in words if word not in (*names, *files)]
    ordered = [*names, *files, *others]
    return args if ordered == words else ordered


class OneLineParser(ArgumentParser):
    """Parser without abbreviations, whose errors are UserErrors of one line."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs, allow_abbrev=False)

    def parse_args(  # type: ignore[override]
        self, args: Any = None, *more: Any, **kwargs: Any
    ) -> Namespace:
        """Parse arguments, whose options may have dashes in place of underscores."""
        words = [
            re.sub(r"^--\w[\w-]*", lambda name: "--" + name[0][2:].replace("-", "_"), arg)
            for arg in args or []
        ]
        typed = typed_values(words)
        # argparse takes an unknown option for a positional if its value has a space
        for key in [k for k in typed if "." not in k and k not in known_keys(self)[0]]:
            self.error(f"unrecognized arguments: --{key}")
        try:
            parsed = super().parse_args(args and words, *more, **kwargs)
        except UserError as error:
            from gpt_lightning.hints import as_typed  # wrong arguments alone need it

            files = [word[9:] for word in joined(words) if word.startswith("--config=")]
            raise UserError(as_typed(str(error), typed, files)) from error
        check_typed(typed, parsed.get(parsed.get("subcommand") or "", parsed))
        return parsed

    def format_help(self) -> str:
        """Return the help; argparse would break its words at hyphens."""
        for action in actions_of(self):
            action.help = action.help and action.help.replace("-", NO_BREAK)
        return super().format_help().replace(NO_BREAK, "-")

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        from gpt_lightning.hints import explain  # wrong arguments alone need it

        options, positionals = known_keys(self)
        prog = self.prog.replace("[options] ", "")
        if "subcommand" in positionals:  # fit and its sisters
            prog += " fit"
        raise UserError(explain(message, options, positionals, prog)) from ex

    def validate(self, cfg: Namespace, *args: Any, **kwargs: Any) -> None:
        """Check all values; jsonargparse alone accepts null, nan and infinity for any number."""
        super().validate(cfg, *args, **kwargs)
        if getattr(self, "_inner_parser", False):  # a class that a key names has its own parser
            return
        actions = {action.dest: action for action in actions_of(self)}
        for group in self.groups or ():
            if cfg.get(group, {}) is None:
                raise UserError(f"{group} is null; expected keys below it, or leave it out")
        for key, value in cfg.items():
            if value is None and key in actions:
                self._check_value_key(actions[key], value, key, cfg)
            if value != "" or key not in actions or actions[key].default != "":
                check_plain(key, value)

    def _check_value_key(self, action: Any, value: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        if isinstance(action, ActionConfigFile):  # in a configuration: resolve_configs has read it
            return None
        checked = super()._check_value_key(action, value, key, *args, **kwargs)
        if isinstance(value, float) and isinstance(checked, int):  # the command line does the same
            raise TypeError(f"Parser key \"{key}\": Expected a <class 'int'>. Got value: {value}")
        return checked


def check_typed(typed: dict[str, str], settings: Namespace) -> None:
    """Check the options of a command line, when the settings of its files are known too.

    Args:
        typed: Text after each option, by key.
        settings: All settings.

    Raises:
        UserError: YAML would read something else than was typed, or an option has no effect.
    """
    for key, text in typed.items():
        value = settings.get(key)
        if isinstance(value, int | float | dict | Namespace):
            try:
                yaml.load(f"? {key}\n: {text}", UniqueKeyLoader)
            except yaml.constructor.ConstructorError as error:
                raise UserError(f"--{key}: {error.problem}") from error
            if os.path.isfile(text):  # jsonargparse reads a section from a file
                read_config(Path(text))
        for row in NO_EFFECT if str(value) not in ("None", "False", "") else ():
            both = f"{key} {settings.get(row['other'], '')}"
            if re.fullmatch(f"({row['keys']}) ({row['value']})", both):
                raise UserError(f"--{key} has no effect {row['fix']}")


def check_plain(key: str, value: Any) -> None:
    """Check a value that no type excludes.

    Raises:
        UserError: The value is an infinite number, an integer of more than 64 bits, empty or null
            where a name is expected, a path with ~ that no shell has replaced, or has names that
            are no text.
    """
    is_seed = key.endswith("seed_everything")  # also as fit.seed_everything
    if is_seed and (value is True or not 0 <= (value or 0) < 2**32):  # Lightning takes True as 0
        raise UserError(f"{key} is {value}; expected an integer from 0 to 4294967295")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise UserError(f"{key} is {value}; expected an integer below 2^63")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{key} is {value}; it must be a finite number")
    if isinstance(value, dict) and not all(isinstance(name, str) for name in value):
        raise UserError(f"{key} is {value}; its names must be text: put them in quotes")
    text = str(value).strip()
    if text in ("", "null") and not key.endswith(MAY_BE_EMPTY) and ".init_args." not in key:
        raise UserError(f"{key} is {text or 'empty'}; give a value, or leave it out")
    written = "null" if value == "None" else re.sub("^~(?=/)", os.path.expanduser("~"), text)
    if text != written and not key.endswith("prompt"):
        raise UserError(f"{key} is {text}; write {written}")


def actions_of(parser: argparse.ArgumentParser) -> list[Any]:
    """Return the arguments of a parser, for which neither argparse nor jsonargparse has a name."""
    return getattr(parser, "_actions", [])


def known_keys(parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the options of a parser and its subcommands without dashes, and its positionals."""
    options, positionals = [], []
    for action in actions_of(parser):
        options += [option.lstrip("-") for option in action.option_strings]
        positionals += [] if action.option_strings else [action.dest]
        if isinstance(action.choices, dict):
            for subparser in action.choices.values():
                options += known_keys(subparser)[0]
    return list(dict.fromkeys(options)), positionals


def check_arguments(kind: type, prefix: str, values: Fields) -> Fields:
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
    given = {
        name: str(v) if isinstance(v, Path) else v.tolist() if hasattr(v, "tolist") else v
        for name, v in values.items()
    }
    parsed = _parser_of(kind, prefix).parse_object({prefix: given} if prefix else given)
    checked = (parsed[prefix] if prefix else parsed).as_dict()
    return {name: plain_number(checked[name]) for name in values}


@functools.cache
def _parser_of(kind: type, prefix: str) -> OneLineParser:
    parser = OneLineParser()
    parser.add_class_arguments(kind, prefix or None)
    return parser


def checked(prefix: str) -> Callable[[type[T]], type[T]]:
    """Return a class decorator that checks the arguments of `__init__` by their annotations.

    The class gets the values that the command line would give it (see `check_arguments`). In a
    dataclass, `__post_init__` sees them.

    Args:
        prefix: Key before the names of the arguments, such as "model"; "" for none.
    """

    def decorate(kind: type[T]) -> type[T]:
        init, signature = kind.__init__, inspect.signature(kind)

        @functools.wraps(init)
        def checked_init(self: T, *args: Any, **kwargs: Any) -> None:
            for name in kwargs.keys() - signature.parameters.keys():
                raise unknown_name(name, prefix, [*signature.parameters])
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            init(self, **check_arguments(kind, prefix, given.arguments))

        kind.__init__ = checked_init  # type: ignore[method-assign,assignment]
        return kind

    return decorate


def unknown_name(name: str, prefix: str, names: list[str]) -> UserError:
    """Return the error of a keyword argument that is none of some names below a key."""
    from gpt_lightning.hints import HINTS, hint_at  # wrong arguments alone need it

    keys = [*(f"{prefix}.{each}" for each in names), *HINTS["words"]]
    hint = nearest(name, names) or hint_at(name, keys) or f"; expected one of {', '.join(names)}"
    return UserError(f"unknown key '{prefix}.{name}'{hint}")


def plain_number(value: Any) -> Any:
    """Return plain numbers for jsonargparse's types, which no checkpoint may hold."""
    if isinstance(value, tuple | list):
        return type(value)(map(plain_number, value))
    if isinstance(value, dict):
        return {key: plain_number(item) for key, item in value.items()}
    if isinstance(value, int | float) and not isinstance(value, bool):
        return int(value) if isinstance(value, int) else float(value)
    return value


def program(name: str = "gpt-lightning") -> str:
    """Return the word that starts a program of this installation when typed into this shell.

    The name alone if PATH leads to it; else its path, relative where it is below the working
    directory (`.venv/bin/gpt-lightning`), or `python -m gpt_lightning` where it is not installed.
    In a script with GPTCLI it is that script.
    """
    if script and name == "gpt-lightning":
        return script
    ours, found = Path(sys.executable).parent / name, shutil.which(name)
    if name == "gpt-lightning" and not (found or ours.exists()):
        return f"{shlex.quote(sys.executable)} -m gpt_lightning"
    if not ours.exists() or (found and ours.samefile(found)):
        return name
    relative = os.path.relpath(ours)
    return shlex.quote(str(ours) if relative.startswith("..") else relative)


def shell_command(argv: Sequence[str]) -> str:
    """Return the arguments of a command as they are typed into a shell, after the program."""
    return f"{program()} {shlex.join(argv)}"


def typed_arguments(function: Callable[..., Any], args: Sequence[str]) -> list[str]:
    """Return the arguments of a function as jsonargparse reads them.

    Option names get underscores. A switch needs no value. All values of a list become one list of
    JSON, in which each is the text that was typed; alone it would be read as YAML. Options of `fit`
    become the list `fit_options` of a function that passes them on.
    """
    parameters = inspect.signature(function).parameters
    switches = {name for name, each in parameters.items() if each.annotation is bool}
    lists: dict[str, list[str]] = {n: [] for n, p in parameters.items() if "list[" in str(p)}
    first, words, rest = next(iter(parameters), ""), list(args), list[str]()
    if "fit_options" in lists:
        options_of_fit = ("--config", "--seed_everything")
        words, lists["fit_options"] = split_fit_options(words, options_of_fit)
    while words:
        option, equals, value = words.pop(0).partition("=")
        if not option.startswith("--"):
            positional = option == "-" or not option.startswith("-")
            (lists.get(first, rest) if positional else rest).append(f"{option}{equals}{value}")
            continue
        name = option[2:].replace("-", "_")
        if not equals and name in switches and words[:1] not in (["true"], ["false"]):
            value = "true"
        elif not equals and words and not words[0].startswith("--"):
            value = words.pop(0)
        elif not equals:
            rest.append(f"--{name}")
            continue
        lists.get(name, rest).append(value if name in lists else f"--{name}={value}")
    sources = [json.dumps(lists.pop(first))] if first in lists else []
    return [*sources, *rest, *(f"--{name}={json.dumps(v)}" for name, v in lists.items() if v)]


def split_fit_options(
    args: list[str], others: Sequence[str] = ("--seed_everything",)
) -> tuple[list[str], list[str]]:
    """Split the arguments of a command into its own and the options of `fit` that it passes on.

    Options of `fit` have a dot in their name (--model.learning_rate) or are among `others`. The
    value after an option goes with it.
    """
    own, fit = list[str](), list[str]()
    rest = ["--config" if arg == "-c" else arg for arg in args]
    while rest:
        arg = rest.pop(0)
        name, equals, _ = arg.partition("=")
        if name.startswith("--") and ("." in name or name in others):
            fit += [arg] if equals or not rest else [arg, rest.pop(0)]
        else:
            own.append(arg)
    return own, fit


# ---- configuration files -------------------------------------------------------------------------


def config_names() -> list[str]:
    """Return the names of all configurations, such as quickstart and ladder/bf16."""
    paths = [path.relative_to(CONFIGS).with_suffix("") for path in CONFIGS.rglob("*.yaml")]
    return [path.as_posix() for path in sorted(paths, key=lambda path: (len(path.parts), path))]


def config_file(name: str, where: str = "--config", folder: Path = Path()) -> Path:
    """Return the file of a configuration that is named by its path, or as config_names() has it.

    Args:
        name: Path or name.
        where: Option or key that has the name.
        folder: Folder of a relative path.

    Raises:
        UserError: There is neither such a file nor such a name; the message has the nearest.
    """
    path = folder / name
    if name in config_names() and (path.is_dir() or not path.exists()):
        return CONFIGS / f"{name}.yaml"
    if name and path.exists():
        return path
    from gpt_lightning.hints import closest  # wrong arguments alone need it

    files = {file.stem: str(file) for file in path.parent.glob("*.yaml") if file.exists()}
    found = closest(path.stem, [*config_names(), *files]) or closest(name, config_names())
    hint = f": did you mean {files.get(found, found)!r}?" if found else ""
    raise UserError(
        f"{where} {name or repr(name)}: no such file or configuration{hint}; "
        "gpt-lightning configs lists the names"
    )


def resolve_configs(args: list[str], keys: Sequence[str] = ()) -> list[str]:
    """Return the `joined` arguments with the path of each configuration in place of its name.

    The configurations that a configuration names are before it: it overrides them.
    `--model.network.class_path X` becomes `--model.network X`.

    Args:
        args: Arguments of a command.
        keys: Keys that the command knows, such as model.learning_rate.

    Raises:
        UserError: A configuration is missing, is no mapping in YAML, sets a key twice, names
            itself, or is the first and an overlay of a run that is not given.
    """
    words, first = list[str](), True
    for word in joined(args):
        if not word.startswith("--config="):
            words.append(re.sub(r"^--model\.network\.class_path\b", "--model.network", word))
            continue
        for path in with_named(config_file(word.removeprefix("--config=")), keys):
            overlay = re.match(r"# Overlay of ([^.]+)\.", path.read_text(encoding="utf-8"))
            if overlay and first:
                raise UserError(
                    f"--config {path} is an overlay of {overlay[1]}: give the run before it, "
                    f"--config RUN --config {path}"
                )
            words.append(f"--config={path}")
            first = False
    return words


def with_named(path: Path, keys: Sequence[str], above: Sequence[Path] = ()) -> list[Path]:
    """Return a configuration, and before it those that its key `config` names.

    Args:
        path: The configuration.
        keys: Keys that the command knows.
        above: Configurations that lead to this one.

    Raises:
        UserError: A configuration is missing, is no mapping in YAML, or names itself.
    """
    where = f"--config {path}: config"
    chain = [*above, path.resolve()]
    settings = read_config(path, keys)
    named = settings.get("config", [])
    names = [named] if isinstance(named, str) else named
    others = [name for name in settings if f"{name}".startswith(("config+", "config."))]
    if others or not isinstance(names, list):
        raise UserError(f"{where} is not a name: give a configuration, or a list of them")
    found = list[Path]()
    for name in names:
        if not isinstance(name, str):
            raise UserError(f"{where} has {name!r}; give names or paths of configurations")
        file = config_file(name, where, path.parent)
        if file.resolve() in chain:
            raise UserError(f"{where} {name} leads back to {file}: remove it there or here")
        found += with_named(file, keys, chain)
    return [*found, path]


class UniqueKeyLoader(yaml.SafeLoader):
    """Loader of YAML that raises an error for equal keys and for numbers in another base.

    PyYAML silently takes the last of equal keys, and reads 010 as 8.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [str(key.value) for key, _ in node.value]
        for i, (key, value) in enumerate(node.value):
            twice = f"{names[i]!r} is set twice: remove one of the two"
            problem = twice if names[i] in names[:i] else ""
            if value.tag.endswith((":int", ":float")) and OTHER_BASE.fullmatch(value.value):
                number = self.construct_object(value)
                problem = f"{value.value} is read as {number}: write {number}, or quote the text"
            if problem:
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
        return super().construct_mapping(node, deep)


def read_config(path: Path, keys: Sequence[str] = ()) -> Fields:
    """Return the settings in a configuration.

    Args:
        path: The file.
        keys: Known keys. What stands before a dot is a section, which must hold keys.

    Raises:
        OSError: The file cannot be read.
        UserError: The file is no mapping of keys in YAML.
    """
    where = f"--config {path}"
    if path.exists() and not path.is_file():  # a pipe can be read only once
        raise UserError(f"{where} is no file; give a YAML file")
    try:
        settings = yaml.load(text := path.read_text(encoding="utf-8-sig"), UniqueKeyLoader)
        if sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)) > 30:
            raise RecursionError("it has more than 30 aliases")  # 72 can make 10^9 values
    except (UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{where} cannot be read ({error}): give simple YAML in UTF-8") from error
    except yaml.YAMLError as error:
        from gpt_lightning.hints import explain_yaml  # wrong files alone need it

        raise UserError(f"{where}{explain_yaml(error)}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{where} holds no keys: expected YAML such as `trainer: {{max_steps: 9}}`")
    sections = [("", settings)]
    for prefix, section in sections:  # which grows by the sections below
        for name, value in section.items():
            key = f"{prefix}{name}".removesuffix(".init_args")
            below = [each for each in keys if each.startswith(f"{key}.") and each[-5:] != ".help"]
            if below and not isinstance(value, dict):
                raise UserError(
                    f"{where}: {key} is {value!r}; expected keys below it, such as {below[0]}; "
                    "remove the line if there are none"
                )
            if any(f"{name}".startswith(f"{other}.") for other in section):  # one would be lost
                raise UserError(f"{where}: {key} is beside its section: move it into the section")
            if keys and not below and key not in keys and is_hollow(value):
                raise UserError(f"{where}: unknown key {key!r}{nearest(key, keys)}")
            sections += [(f"{key}.", value)] if below else []
    return settings


def is_hollow(value: Any) -> bool:
    """Return whether a value is a section without any value, which jsonargparse leaves out."""
    return isinstance(value, dict) and all(map(is_hollow, value.values()))


def configs() -> None:
    """List the configurations that --config takes by name, with a line about each.

    A run trains as it is: `fit --config quickstart`. An overlay changes a run: `fit --config
    gpt2_124m --config model/gpt2-xl`.
    """
    files = {name: config_file(name).read_text(encoding="utf-8") for name in config_names()}
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in files.items()}
    width = max(map(len, titles))
    for heading in ("runs: --config NAME", "overlays: --config RUN --config NAME"):
        print(f"{heading}\n")
        for name, title in titles.items():
            if title.startswith("Overlay of ") == heading.startswith("overlays"):
                print(f"  {name:<{width}}  {title}")
        print()
