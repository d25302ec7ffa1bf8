"""Error messages of wrong arguments: jsonargparse's text as one line with the key and the fix."""

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from gpt_lightning.errors import one_line
from gpt_lightning.files import Fields, yaml_beside

# sections of hints.yaml: words, instead, messages, expected, yaml
HINTS: Fields = yaml_beside(__file__)
NEAR = 0.75  # lowest ratio of difflib between a word and the name that was meant
DASHES = "-\u2013\u2014"  # text editors type the last two
PLAIN = {"NoneType": "null", "None": "null", "True": "true", "False": "false"}


def explain(message: str, options: Sequence[str], positionals: Sequence[str], prog: str) -> str:
    """Return jsonargparse's message as one line: the key, what was found, what was expected.

    Args:
        message: Message of jsonargparse, of several lines.
        options: Keys of the parser, candidates for the hint at an unknown key.
        positionals: Names of its positional arguments.
        prog: Words that start the program, such as "gpt-lightning sample".
    """
    text = one_line(message)
    for form, words in HINTS["messages"].items():
        text = re.sub(form, words, text)
    help_hint = f"; `{prog} --help` lists the options" if prog.startswith("gpt-lightning") else ""
    if key := re.search(r'.*Parser key "([\w.]+)":? (.*)', text):
        return wrong_value(key[1], key[2])
    if found := re.match(r"unrecognized arguments: (\S+)", text):
        return unknown_argument(found[1], options, positionals) or (
            f"unknown key {found[1].lstrip('-').partition('=')[0]!r}{help_hint}"
        )
    return f"{text}{help_hint}"


# ---- unknown keys --------------------------------------------------------------------------------


def unknown_argument(given: str, options: Sequence[str], positionals: Sequence[str]) -> str:
    """Return the error of an argument that no option takes; empty without a better hint."""
    name, equals, value = given.lstrip(DASHES).partition("=")
    if name and given[0] in DASHES:
        if name in options and given != f"--{given.lstrip(DASHES)}":
            return f"unknown argument {given!r}: did you mean '--{name}'?"
        if name in positionals:
            return f"unknown key {name!r}: give the value alone, without --{name}"
        return f"unknown key {name!r}{hint}" if (hint := hint_at(name, options)) else ""
    if equals and (key := suggestion(name, options)):
        return f"unknown argument {given!r}: did you mean '--{key}={value}'?"
    if Path(given).suffix.lower() in (".yaml", ".yml", ".py") and "config" in options:
        return f"unknown argument {given!r}: did you mean '--config {given}'?"
    return f"unknown argument {given!r}: remove it, or quote the value that it is a part of"


def hint_at(word: str, options: Sequence[str]) -> str:
    """Return the hint at the key of a word; else an empty string."""
    if fix := HINTS["instead"].get(word.rpartition(".")[2]):
        return f": {fix}"
    key = suggestion(word, options)
    return f": did you mean {key!r}?" if key else ""


def suggestion(word: str, options: Sequence[str]) -> str:
    """Return the key of a word: by hints.yaml, by the last part of the key, or by similarity."""
    word = word.replace("-", "_")
    sections = {key.partition(".")[0] for key in options if "." in key}
    keys = [key for key in options if key not in sections]  # a section takes no plain value
    for name in (word, word.rpartition(".")[2]):
        table = HINTS["words"].items()
        meant = [key for key, words in table if name in words.split() and key in keys]
        meant += [key for key in keys if name == key.rpartition(".")[2]]
        if meant:
            return meant[0]
    alike = [key for key in keys if "." in key or "." not in word]
    # all keys of a section begin alike
    ends = {key: key.rpartition(".")[2] for key in alike}
    end = closest(word.rpartition(".")[2], [*ends.values()])
    found = [key for key in alike if ends[key] == end]
    return next(iter(difflib.get_close_matches(word, found, n=1, cutoff=0)), "")


def closest(word: str, candidates: Iterable[str]) -> str:
    """Return the name that a word is a misspelling of, or an empty string."""
    names = {name.lower(): name for name in candidates}
    found = difflib.get_close_matches(word.lower(), names, n=1, cutoff=NEAR)
    return names[found[0]] if found else ""


# ---- wrong values --------------------------------------------------------------------------------


def wrong_value(key: str, text: str) -> str:
    """Return the error of a value, with the value that was expected."""
    for form in HINTS["class_problems"]:  # `explain` has made the errors of that class's parser
        if found := re.search(form, text):
            return f"{key}: {found[0]}"
    given = next((m[1] for form in HINTS["given"] if (m := re.search(form, text))), None)
    if given is None:
        return f"{key}: {text}"
    if bounds := re.findall(r"Not of type (\w+):.*? restriction (v\S+(?: and v\S+)*)", text):
        return f"{key} is {given}; it must be {' or '.join(in_words(*bound) for bound in bounds)}"
    expected = HINTS["expected"].get(key) or ", ".join(dict.fromkeys(expectations(text)))
    return f"{key} is {PLAIN.get(given, given)!r}; expected {expected or 'another type'}"


def as_typed(message: str, typed: Mapping[str, str], files: Sequence[str]) -> str:
    """Return an error message with the text that was typed in place of what YAML made of it.

    Args:
        message: Line of `explain`.
        typed: Text after each option of the command, by key.
        files: Configurations of the command.
    """
    found = re.search(r"--(\S+) needs a value", message)
    if found and not re.match(r"--[a-z][\w.]*(=|$)|$", typed.get(found[1], "")):
        return f"{typed[key := found[1]]} begins with a dash: write --{key}={typed[key]}"
    if not (found := re.match(r"([\w.]+) is '(.*)'; expected ([^;]+)$", message)):
        return message
    key, given, expected = found.groups()
    takes_text = "str" in expected.split(", ")  # and any text of the command line
    texts = [typed.get(key, "")][takes_text:] + [text_at(file, key) for file in reversed(files)]
    others = (each for each in texts if not re.fullmatch(r"[-\d.]*", each))
    text = given if given in texts else next(others, given)
    quotes = f'; put text in quotes, "{text}"' if takes_text else ""
    return f"{key} is {text!r}; expected {expected}{quotes}"


def text_at(file: str, key: str) -> str:
    """Return the text of a key's plain value in a configuration, or an empty string."""
    value = yaml.load(Path(file).read_text(encoding="utf-8-sig"), yaml.BaseLoader)
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""


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


# ---- YAML ----------------------------------------------------------------------------------------


def explain_yaml(error: yaml.YAMLError) -> str:
    """Return the place of a mistake in a YAML text, and the fix."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None)
    problem = (problem or one_line(error)).replace("tag:yaml.org,2002:", "!!")
    place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
    fix = next((fix for sign, fix in HINTS["yaml"].items() if sign in problem), "correct the line")
    known = re.search("is (set|read) ", problem)  # UniqueKeyLoader's, with the fix
    return f"{place}: {problem}" if known else f"{place}: not YAML ({problem}); {fix}"
