"""The package as it is built and installed: its content, its dependencies, other systems."""

import email
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BUILD = """
import os, sys
from hatchling import build
os.chdir(sys.argv[1])
print(getattr(build, f"build_{sys.argv[2]}")(sys.argv[3]))
"""
WITHOUT_POSIX = """
import os, sys
sys.modules["fcntl"] = sys.modules["resource"] = None  # an import of them raises an ImportError
{code}
"""


def build(source: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-c", BUILD, str(source), kind, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    return out / done.stdout.strip().splitlines()[-1]


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_pip_is_a_dependency_because_it_fetches_a_corpus():
    source = (ROOT / "gpt_lightning/data/texts.py").read_text()
    assert '"-m", "pip"' in source
    assert "pip" in PROJECT["dependencies"]  # uv makes environments without it


def test_every_extra_that_a_page_or_an_error_names_exists():
    sources = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("gpt_lightning/**/*.py")]
    named = {
        extra
        for path in sources
        for extras in re.findall(
            r"install [^\n]*?'?(?:gpt-lightning|\.)\[([\w,]+)\]", path.read_text()
        )
        for extra in extras.split(",")
    }
    assert {"hf", "data"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_wheel_of_the_source_distribution_is_that_of_the_checkout(tmp_path):
    pytest.importorskip("hatchling")
    pytest.importorskip("hatch_fancy_pypi_readme")
    sdist = build(ROOT, "sdist", tmp_path)
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    (tmp_path / "again").mkdir()
    wheel = content(build(ROOT, "wheel", tmp_path))
    assert wheel == content(build(unpacked, "wheel", tmp_path / "again"))
    assert "gpt_lightning/configs/quickstart.yaml" in wheel
    assert "gpt_lightning/reference/lecture-ladder.yaml" in wheel
    assert {"gpt_lightning/py.typed", "gpt_lightning/training/keywords.pyi"} <= wheel.keys()
    assert not any(name.startswith(("experiments", "tests")) for name in wheel)
    (metadata,) = (text for name, text in wheel.items() if name.endswith("/METADATA"))
    readme = email.message_from_bytes(metadata).get_payload()
    links = re.findall(r"\]\(([^)]+)\)", readme)
    assert [link for link in links if not link.startswith("https://")] == []  # none on an index
    assert "![" not in readme
    assert "gpt-lightning fit --config quickstart" in readme


@pytest.mark.slow
def test_the_public_api_imports_no_module_that_only_posix_has():
    code = """
import gpt_lightning
for name in gpt_lightning.__all__:
    getattr(gpt_lightning, name)
"""
    command = [sys.executable, "-c", WITHOUT_POSIX.format(code=code)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_windows_is_told_to_use_wsl_before_anything_else_is_imported():
    code = """
from gpt_lightning.cli import main
os.name = "nt"
code = main(["fit"])
assert not any(name in sys.modules for name in ("torch", "lightning", "filelock"))
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_POSIX.format(code=code)], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr == "error: Windows itself is not supported: use WSL\n"


def test_versions_are_pinned_and_have_digests():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    versions = dict(pin.split("==")[:2] for pin in pins)
    assert versions["lightning"] == versions["pytorch-lightning"]
    assert versions["lightning"] not in {"2.6.2", "2.6.3"}  # malicious
    assert "--hash=sha256:" in (ROOT / "requirements.lock").read_text()


def test_nothing_listens_at_every_address():
    for folder in ("gpt_lightning", "configs", "examples", "docs", "experiments", "benchmarks"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".md", ".yaml", ".sh"}:
                assert not re.search(r"\b0\.0\.0\.0\b|--bind_all", path.read_text()), path
