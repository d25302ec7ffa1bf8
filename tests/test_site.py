"""The documentation site: it builds with strict links, and loads nothing from the network."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpt_lightning.bench.command import find_benches
from gpt_lightning.cli import COMMANDS

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
build_site = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(build_site)
# searched words, and the page that explains them
SEARCHED = {"resume": "resume", "mfu": "metrics", "export": "models", "tokenizer": "data"}
SEARCHED |= dict.fromkeys(("early stopping", "gradient clipping"), "lightning")
SEARCHED |= {"gradient accumulation": "lightning", "own network": "tutorials/own_network"}
SEARCHED |= dict.fromkeys(("learning rate schedule", "mixed precision"), "configuration")


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the repository's pages, in which a test can break something."""
    for path in build_site.pages_and_files():
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    for name in ("zensical.toml", "docs/build_site.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "gpt_lightning").symlink_to(ROOT / "gpt_lightning")
    return tmp_path


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings_handlers.python")
    command = [sys.executable, "docs/build_site.py"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_site_has_every_page_command_and_docstring(copied):
    done = build(copied)
    assert done.returncode == 0, done.stdout + done.stderr
    site = copied / "build" / "site"
    pages = build_site.navigation()
    built = [page.relative_to(ROOT).with_suffix(".html") for page in pages]
    missing = [path for path in built if not (site / path).is_file() and path.stem != "README"]
    assert missing == []
    assert (site / "index.html").is_file()
    headings = re.findall(r'<h2 id="([\w-]+)"', (site / "docs/commands.html").read_text())
    own = {name for name in COMMANDS if name not in ("validate", "test", "predict", "resume")}
    assert own | {f"bench-{name}" for name in find_benches()} <= set(headings)
    python = (site / "docs/python.html").read_text()
    for name in ("training.fit.fit", "model.gpt.GPTConfig", "runs.settings.Settings"):
        assert f'id="gpt_lightning.{name}"' in python
    assert "Number of positions whose logits are in memory" in python
    found = json.loads((site / "search.json").read_text())
    assert any("loss_chunk" in item.get("text", "") for item in found["items"])
    for words, page in SEARCHED.items():
        items = [item for item in found["items"] if item["location"].startswith(f"docs/{page}.")]
        assert any(words in f"{i['title']} {i['text']}".lower() for i in items), (words, page)
    assert '<span class="n">result</span>' in python  # the example of a docstring


@pytest.mark.slow
def test_a_broken_link_ends_the_build(copied):
    readme = copied / "README.md"
    readme.write_text(f"{readme.read_text()}\n[broken](docs/data.md#no-heading)\n")
    assert build(copied).returncode == 1
