"""Runs and commands on the null GPU (README.md): counters of a step, and paths that end well."""

import json
import os
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

HERE = Path(__file__).resolve().parent
CASES = yaml.safe_load((HERE / "launches.yaml").read_text())
COMMANDS = yaml.safe_load((HERE / "commands.yaml").read_text())
# beginnings of the counters of what the device is given to do
LAUNCH = ("k:", "triton:", "gemm", "sgemm", "bgemm", "sbgemm", "memset", "memcpy d2d", "graph:la")
PARTS = {1: 2, 2: 6, 3: 1, 4: 2, 5: 4}  # of the hour's commands
BASE = f"--config {HERE / 'base.yaml'}"
SHAPES = (2, 12, 768, 256, 8), (4, 16, 1024, 256, 8), (12, 12, 768, 1024, 64)  # the last is 124M

pytestmark = [
    pytest.mark.null_gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif("NULL_GPU" not in os.environ, reason="make test-null-gpu builds the device"),
]


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory):
    """A folder with a text, in which all runs are made."""
    folder, draw = tmp_path_factory.mktemp("null"), random.Random(0)
    (folder / "text.txt").write_text("".join(draw.choices("abcdefghij \n", k=2_000_000)))
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def run(command: list[str], **env: str) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=os.environ | env
    )
    if done.returncode not in (0, 1):
        raise AssertionError(done.stderr[-3000:])
    return done


def counted(options: str, **env: str) -> dict:
    """Return the counters of a run by part, and its peak."""
    words = [str(HERE / "counted.py"), "counts.json", "fit", *shlex.split(f"{BASE} {options}")]
    # the allocator of every command: emptying its cache waits for the device
    done = run(words, PYTORCH_ALLOC_CONF="expandable_segments:True", **env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(Path("counts.json").read_text())


def total(parts: list[dict[str, int]], *beginnings: str, within: str = "") -> int:
    found = [item for part in parts for item in part.items()]
    return sum(n for name, n in found if name.startswith(beginnings) and within in name)


@pytest.mark.parametrize("name", CASES)
def test_a_step_launches_no_more_than_the_table_and_waits_for_nothing(name):
    case = CASES[name]
    found = counted(case["options"], **case.get("env", {}))
    parts = [found[part] for part in ("between", "micro", "update")]
    assert found["graph_breaks"] == 0
    launches = {part: total([found[part]], *LAUNCH) / 2 for part in ("micro", "update")}
    assert launches["micro"] > 5  # they are counted
    assert launches["micro"] <= case["micro"], launches
    assert launches["update"] <= case["update"], launches
    assert total(parts, "sync:") <= case.get("waits", 0)
    assert total(parts, "memcpy", within="PAGEABLE") <= case.get("pageable", 0)
    assert total(parts, "rt:") == 0  # requests of the caching allocator to the driver


def test_waits_are_counted():
    found = counted("--trainer.callbacks+=EMAWeightAveraging")  # Lightning's: two a step
    assert total([found["update"]], "sync:") == 4


@pytest.mark.parametrize("shape", SHAPES)
def test_the_peak_is_that_of_the_formula(shape):
    L, heads, C, T, B = shape
    page = (HERE.parents[2] / "docs/memory.md").read_text()
    formula = re.search(r"peak = (.*?)\n```", page, re.DOTALL)[1].replace("\n", " ")
    config = f"n_layer {L} n_head {heads} n_embd {C} block_size {T}".split()
    options = " ".join(f"--model.config.{k} {v}" for k, v in zip(*[iter(config)] * 2, strict=True))
    V = 50304
    N = V * C + T * C + L * (12 * C * C + 13 * C) + 2 * C
    expected = eval(formula, {"N": N, "V": V, "C": C, "L": L, "B": B, "T": T})
    assert counted(f"{options} --data.batch_size {B}")["peak"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_to_its_end(command):
    env = {"NULL_GPU_TRUE": "1"} if command.startswith(("sample", "eval")) else {}
    words = shlex.split(command.replace("BASE", BASE))
    done = run(["-m", "gpt_lightning", *words], **env)
    # doctor compares numbers, of which the device has none
    assert done.returncode == (command == "doctor"), done.stderr[-3000:]
    assert COMMANDS[command] in done.stdout


@pytest.mark.timeout(900)
@pytest.mark.parametrize("number", range(1, 6))
def test_the_hour_starts_all_of_its_parts(number, folder):
    """A dry run of benchmarks/gpu_hour.sh: parts are cut short, and numbers are wrong."""
    root, out = HERE.parents[2], folder / f"hour-{number}"
    minor = {"PYTHON_VERSION": f"3.{sys.version_info.minor}", "PYTHON": sys.executable}
    script = ["bash", str(root / "benchmarks/gpu_hour.sh")]
    if not (root / ".hour/wheels").exists():
        subprocess.run([*script, "carry"], env=os.environ | minor, check=True)
    small = "--model.config.n_layer 1 --model.config.attention flash --data.batch_size 2"
    limits = {"LIMIT": "45", "EXTRA": small, "OUT": str(out)}
    done = subprocess.run(
        [*script, str(number)], env=os.environ | minor | limits, capture_output=True, text=True
    )
    log = (out / f"{number}.log").read_text()
    wanted = PARTS[number]
    assert len(re.findall(r"^== .*, at most", log, re.MULTILINE)) == wanted, log[-3000:]
    assert done.returncode in (0, 1), done.stderr[-3000:]
    assert not re.findall(r"^error: (?:unknown|--|trainer|data|model).*", log, re.MULTILINE)
    assert (out / "rows.tgz").exists()


def test_the_gpu_is_the_null_one():
    assert torch.cuda.get_device_name() == "NVIDIA H200"
