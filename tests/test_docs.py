"""The pages: links lead somewhere, and what they name can be typed."""

import re
import shlex
from pathlib import Path

import pytest

from gpt_lightning.bench.command import find_benches
from gpt_lightning.cli import COMMANDS
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.reproduce.cases import CASES, REPORTS
from gpt_lightning.training.fit import training_parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/*.md", "benchmarks/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
)
PROSE = [path for path in PAGES if path.name != "CHANGELOG.md"]
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# --config FILE, --config my.yaml, and what ends before it would run
PLACEHOLDER = re.compile(r"\.\.\.|\b[A-Z]{2,}\b|my\.yaml|--help|--print_config")
NANOGPTS = {"train.py", "config/train_shakespeare_char.py"}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The words after each `gpt-lightning`, in fences and between backticks."""
    blocks = FENCE.findall(text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    found = re.compile(r"^(?:time )?(?:\.venv/bin/)?gpt-lightning (.*)")
    return [shlex.split(m[1], comments=True) for line in lines if (m := found.match(line))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```\ngpt-lightning fit \\\n    --a 1  # why\nls\n```", [["fit", "--a", "1"]]),
        ("see `gpt-lightning bench\nsizes` and `ls`", [["bench", "sizes"]]),
        ("gpt-lightning is a program", []),
    ],
)
def test_commands_are_found(text, expected):
    assert commands(text) == expected


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(path))):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        assert page.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)", text_of(page), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
            assert anchor in anchors, target


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_lines_wrap_at_100_characters(path):
    lines = enumerate(text_of(path).splitlines(), 1)
    assert [n for n, line in lines if len(line) > 100 and line[:1] not in "|!"] == []


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_that_a_page_names_exist(path):
    modules = {file.relative_to(ROOT).as_posix() for file in ROOT.glob("[!.]*/**/*.py")}
    for name in re.findall(r"\w[\w/]*\.py\b", text_of(path)):
        if not PLACEHOLDER.search(name) and name not in NANOGPTS:
            assert any(f"/{module}".endswith(f"/{name}") for module in modules), name


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").splitlines()) < 200


def test_make_has_the_targets_that_pages_name():
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for path in PROSE:
        named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text_of(path), re.MULTILINE)
        assert {a or b for a, b in named} <= targets, path.name


def test_commands_on_the_pages_can_be_typed():
    parser, names = training_parser(), {"bench": find_benches(), "reproduce": {**CASES, **REPORTS}}
    checked = 0
    for path in PROSE:
        for command, *args in commands(text_of(path)):
            if command.startswith("-") or PLACEHOLDER.search(command):
                continue
            assert command in COMMANDS, f"{path.name}: {command}"
            if command in names and args and args[0][0].islower():
                assert args[0] in names[command], f"{path.name}: {command} {args[0]}"
            if command == "fit" and args and not PLACEHOLDER.search(" ".join(args)):
                parser.parse_args(["fit", *resolve_configs(args)])  # raises for an unknown key
                checked += 1
    assert checked >= 10


def test_the_hooks_before_a_commit_have_the_pinned_versions():
    pins = set((ROOT / "constraints.txt").read_text().split())
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    shared = re.findall(r"\[((?:ruff|codespell)==[\w.]+)\]", hooks)
    assert len(shared) == 3
    assert set(shared) <= pins
