"""Build the documentation site: `make docs`.

The pages are the Markdown files of this repository, as a code host shows them: those of the
navigation in zensical.toml, and what they link to. They are copied to build/site-source in the same
folders, so that their links hold. Zensical makes build/site of them, with strict links. The page
docs/commands.md gets the help of every command, and docs/python.md the docstrings (mkdocstrings).
No built page loads anything from the network.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, SITE = ROOT / "build" / "site-source", ROOT / "build" / "site"
PROJECT = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
CELL, TEXT = re.compile(r"<t[dh]\b[^>]*>.*?</t[dh]>", re.DOTALL), re.compile(r"(?<=>)[^<]+")
# between two words of a name: model.n_layer, GPTConfig, loader.py:12
WORD_END = re.compile(r"(?<=[_./=])(?=[A-Za-z])|(?<=:)(?=\w)|(?<=[a-z])(?=[A-Z])")
LINK = re.compile(r"\]\(([^)\s#]+)[^)\s]*\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
# what a browser loads by itself, unlike the target of a link
LOADED = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//"
    r"|<link[^>]*\shref=[\"']?(?:https?:)?//"
    r"|@import|url\([\"']?(?:https?:)?//"
)


def linked_files(page: Path) -> set[Path]:
    """Return the files of the repository that a page links to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = {match[1] for match in LINK.finditer(text) if "://" not in match[1]}
    return {(page.parent / target).resolve() for target in targets}


def navigation() -> list[Path]:
    """Return the pages of the navigation."""
    return [ROOT / name for name in re.findall(r"[\w/]+\.md", str(PROJECT["nav"]))]


def pages_and_files() -> set[Path]:
    """Return the pages of the navigation, every file that they lead to, and the style sheets."""
    found: set[Path] = set()
    left = {*navigation(), *(ROOT / name for name in PROJECT["extra_css"])}
    while left:
        path = left.pop()
        if not path.is_file():  # Zensical skips a missing page of the navigation
            sys.exit(f"error: {path.relative_to(ROOT)} is linked, and is no file")
        found.add(path)
        if path.suffix == ".md":
            left |= linked_files(path) - found
    return found


def command_help() -> str:
    """Return the help of every command as Markdown."""
    from gpt_lightning.bench.command import find_benches
    from gpt_lightning.cli import COMMANDS, main
    from gpt_lightning.parsing import actions_of
    from gpt_lightning.training.fit import training_parser

    os.environ["COLUMNS"] = "82"  # fits the width of a page
    names: dict[str, list[str]] = {}
    for name, command in COMMANDS.items():
        # validate, test and predict have the options of fit
        names.setdefault(command.address or name, [name])
    names |= {f"bench {bench}": ["bench", bench] for bench in sorted(find_benches())}
    fit = next(a.choices["fit"] for a in actions_of(training_parser()) if a.choices)
    sections = [name for name in fit.groups if name != "fit" and "." not in name]
    text = ""
    for argv in names.values():
        printed = io.StringIO()
        for option in ("--help", *(f"--help={s}" for s in sections if argv == ["fit"])):
            with contextlib.redirect_stdout(printed):
                code = main([*argv, option])
            assert code == 0, argv
        text += f"\n## {' '.join(argv)}\n\n```text\n{printed.getvalue().strip()}\n```\n"
    return text


def copy_pages() -> None:
    """Copy pages and files to build/site-source."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for path in pages_and_files():
        copy = SOURCE / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    with (SOURCE / "docs" / "commands.md").open("a", encoding="utf-8") as page:
        page.write(command_help())


def break_names(html: str) -> str:
    """Return a page on which a line of a table may end between two words of a name."""
    return CELL.sub(lambda c: TEXT.sub(lambda text: WORD_END.sub("<wbr>", text[0]), c[0]), html)


def main() -> None:
    """Build the site, and end with an error if a link is broken or a page needs the network."""
    copy_pages()
    zensical = Path(sys.executable).parent / "zensical"
    if subprocess.run([zensical, "build", "--strict", "--clean"], cwd=ROOT, check=False).returncode:
        sys.exit("error: the pages are in build/site-source, as copies: correct the originals")
    for path in SITE.rglob("*.html"):
        path.write_text(break_names(path.read_text(encoding="utf-8")), encoding="utf-8")
    pages = [*SITE.rglob("*.html"), *SITE.rglob("*.css")]
    online = [path for path in pages if LOADED.search(path.read_text(encoding="utf-8"))]
    if online:
        sys.exit(f"error: loads from the network: {', '.join(map(str, online))}")
    folder = SITE.relative_to(ROOT)
    print(f"{len(list(SITE.rglob('*.html')))} pages in {folder}. To read them:")
    print(f"  {sys.executable} -m http.server --bind 127.0.0.1 --directory {folder}")


if __name__ == "__main__":
    main()
