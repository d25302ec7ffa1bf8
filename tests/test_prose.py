"""Rules 1 and 2 of CONTRIBUTING.md over every docstring of the package, rule 9 over comments."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "gpt_lightning"
NO_BEGINNING = {"What", "Whether", "Of", "By", "As", "How", "Where"}
NO_ARGUMENT = NO_BEGINNING | {"That"}
SECTIONS = ("Args:", "Attributes:")
# "name: Text", 4 spaces into a section; continuation lines are indented by 8
ARGUMENT = re.compile(r"    (\*{0,2}\w+): (\w+)")
PREPOSITIONS = "above|after|as|at|before|between|by|for|from|in|inside|into|of|on|since|to|until|"
COMMENT = re.compile(rf"(?im)(?:^|\s)((?:#|//) (?:{PREPOSITIONS}up|with|within|without)\b.*)$")
CONTINUED = re.compile(r"(?m)^( *(?:#|//) .*)(?:\n *(?:#|//) .*)+")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "lineno", 1), text


def broken_rules(text: str) -> Iterator[str]:
    """Yield what a docstring has against rule 1 (summary) and rule 2 (arguments)."""
    first = re.match(r"\w+", text)
    if first and first[0] in NO_BEGINNING:
        yield f"the summary begins with {first[0]!r}"
    section = ""
    for line in text.splitlines():
        if line and not line.startswith(" "):
            section = line
        match = ARGUMENT.match(line)
        if section in SECTIONS and match and match[2] in NO_ARGUMENT:
            yield f"{match[1]} begins with {match[2]!r}"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("What is read.", ["the summary begins with 'What'"]),
        ("Return what is read.", []),
        ("Asynchronous copy.", []),  # As is a word, not a prefix
        ("Add.\n\nArgs:\n    x: Of any shape.\n    y: Any shape.", ["x begins with 'Of'"]),
        ("Add.\n\nArgs:\n    x: Tensor of a shape\n        y: Of a list.", []),  # continued
        ("Add.\n\nAttributes:\n    x: That is added.", ["x begins with 'That'"]),
        ("Add.\n\nReturns:\n    x: Of any shape.", []),
    ],
)
def test_the_rules_find_what_they_are_about(text, found):
    assert list(broken_rules(text)) == found


def test_docstrings_keep_the_rules():
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{line}: {problem}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        for problem in broken_rules(text)
    ]
    assert not found, "\n".join(found)


def prepositions(source: str) -> list[str]:
    """Return the comments that begin with a preposition; a block of lines is one comment."""
    return COMMENT.findall(CONTINUED.sub(r"\1", source))


def test_no_comment_begins_with_a_preposition():
    assert prepositions("n = 1  # of x\n# A sum\n# of x\n") == ["# of x"]
    sources = (path for path in PACKAGE.rglob("*.*") if path.suffix in (".py", ".yaml", ".cpp"))
    found = {str(path): prepositions(path.read_text(encoding="utf-8")) for path in sources}
    assert {name: comments for name, comments in found.items() if comments} == {}
