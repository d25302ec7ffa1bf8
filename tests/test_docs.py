"""The pages: links lead somewhere, and what they name can be typed."""

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest
import shown

from gpt_lightning.bench.command import find_benches
from gpt_lightning.cli import COMMANDS
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.reproduce.cases import CASES, REPORTS
from gpt_lightning.training.fit import training_parser
from gpt_lightning.training.step_shape import check_accumulation

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "benchmarks/*.md", "*/README.md")
    for path in ROOT.glob(pattern)
)
PROSE = [path for path in PAGES if path.name != "CHANGELOG.md"]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# --config FILE, --config my.yaml, and what ends before it would run
PLACEHOLDER = re.compile(
    r"\.\.\.|\b[A-Z]{2,}\b|(my\w*|wandb|mlflow|both)\.yaml|\bmy_\w+\.py|--help|--print_config"
)
NANOGPTS = {
    *("train.py", "sample.py", "bench.py"),
    *("config/train_shakespeare_char.py", "data/shakespeare_char/prepare.py"),
    "nanoGPT/data/shakespeare/prepare.py",
}


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def commands(text: str) -> list[list[str]]:
    """The words after each `gpt-lightning`, in fences and between backticks."""
    blocks = FENCE.findall(text)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", FENCE.sub("", text))]
    launcher = r"(?:python|torchrun .*?) -m gpt_lightning|(?:srun .*?)?gpt-lightning"
    found = re.compile(rf"^(?:time )?(?:\.venv/bin/)?(?:{launcher}) (.*)")
    return [shlex.split(m[1], comments=True) for line in lines if (m := found.match(line))]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```\ngpt-lightning fit \\\n    --a 1  # why\nls\n```", [["fit", "--a", "1"]]),
        ("see `gpt-lightning bench\nsizes` and `ls`", [["bench", "sizes"]]),
        ("gpt-lightning is a program", []),
        ("`torchrun --nnodes 2 -m gpt_lightning fit --a 1`", [["fit", "--a", "1"]]),
    ],
)
def test_commands_are_found(text, expected):
    assert commands(text) == expected


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\((?!\w+://)([^)\s]+)\)", FENCE.sub("", text_of(path))):
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


def test_process_wide_changes_are_on_the_page():
    page = text_of(ROOT / "docs/architecture.md")
    section = page.split("## Changes of the process that stay", 1)[1].split("\n## ", 1)[0]
    listed = set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
    sources = [text_of(path) for path in (ROOT / "gpt_lightning").rglob("*.py")]
    for name in listed:
        assert len([code for code in sources if name in code]) == 1, name
    for name in ("mallopt", "_SPINCOUNT", "set_start_method", "ALLOC_CONF"):
        used = any(name in code for code in sources)
        assert used == any(name in row for row in listed), name


def test_the_readme_is_short_and_its_results_are_of_one_day_and_commit():
    readme = text_of(ROOT / "README.md")
    assert len(readme.splitlines()) < 200
    ((day, commit),) = re.findall(r"(\S+), commit (\w+)", readme)
    for page in ("speed", "peers"):
        text = text_of(ROOT / f"benchmarks/{page}.md")
        assert f"({commit})" in text[text.index(day) :][:300], page


@pytest.mark.parametrize("page", shown.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_block_of_commands_runs_in_a_test_or_names_what_it_needs(page):
    for info, text in shown.blocks(page):
        title = shown.TITLE.fullmatch(info)
        needs = title[1].split(", ") if title else []
        assert all(shown.NEED.fullmatch(need) for need in needs), (info, shown.NEED.pattern)
        assert needs or info in ("", "sh"), info
        # tests/test_shown_commands.py runs only lines that begin with the command
        others = [line for line in text.splitlines() if re.match(r"(torchrun|srun|python) ", line)]
        assert needs or not others, others


@pytest.mark.parametrize("page", shown.PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_command_has_a_comment_behind_it_which_zsh_takes_as_arguments(page):
    shell = [text for info, text in shown.BLOCK.findall(text_of(page)) if info == "sh"]
    assert [line for text in shell for line in text.splitlines() if " #" in line] == []


def test_every_page_is_in_the_navigation_of_the_site():
    site = tomllib.loads(text_of(ROOT / "zensical.toml"))
    listed = set(re.findall(r"[\w/]+\.md", str(site["project"]["nav"])))
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")} <= listed
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def test_the_texts_of_errors_on_the_page_are_those_of_the_program():
    page = text_of(ROOT / "docs/troubleshooting.md").partition("## Start of a run")[2]
    constants = [
        node.value
        for path in ROOT.glob("gpt_lightning/**/*.py")
        for node in ast.walk(ast.parse(text_of(path)))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    source = " ".join(text for text in constants if "\n" not in text)  # no docstrings
    rows = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 10
    assert [text for text in quoted if text not in source and "--resume" not in text] == []


def test_the_keys_of_nanogpt_lead_to_keys_of_ours():
    page = text_of(ROOT / "docs/tutorials/from_nanogpt.md")
    keys = re.findall(r"`((?:model|data|trainer|checkpoint)\.[\w.]+)`", page)
    known = {
        action.dest for action in training_parser()._subcommands_action.choices["fit"]._actions
    }
    assert len(keys) > 20
    assert [key for key in keys if key not in known] == []


def test_make_has_the_targets_that_pages_name():
    targets = set(re.findall(r"^([a-z-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for path in PROSE:
        named = re.findall(r"^make ([a-z-]+)|`make ([a-z-]+)`", text_of(path), re.MULTILINE)
        assert {a or b for a, b in named} <= targets, path.name


@pytest.mark.slow
def test_commands_on_the_pages_can_be_typed():
    parser = training_parser()
    names = {"bench": find_benches(), "reproduce": {**CASES, **REPORTS}}
    checked = 0
    for path in PROSE:
        for command, *args in commands(text_of(path)):
            if command.startswith("-") or PLACEHOLDER.search(command):
                continue
            assert command in COMMANDS, f"{path.name}: {command}"
            if command in names and args and args[0][0].islower():
                assert args[0] in names[command], f"{path.name}: {command} {args[0]}"
            if command == "fit" and args and not PLACEHOLDER.search(" ".join(args)):
                trainer = parser.parse_args(["fit", *resolve_configs(args)]).fit.trainer
                check_accumulation(trainer.accumulate_grad_batches, trainer.val_check_interval)
                checked += 1
    assert checked >= 10


def test_the_hooks_before_a_commit_have_the_pinned_versions():
    pins = set((ROOT / "constraints.txt").read_text().split())
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    shared = re.findall(r"\[((?:ruff|codespell)==[\w.]+)\]", hooks)
    assert len(shared) == 3
    assert set(shared) <= pins
