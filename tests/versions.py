"""Try the versions that are installed here, for `make versions`, which makes the environments.

Tried are the compiled quickstart for 60 steps, 20 steps in eager float32, and the tests of model/,
training/ and runs/. lightning_logs/versions/ keeps a row for each environment, and the table of
benchmarks/versions.md has all of them. The exit code is 1 if a row is not good.

    python tests/versions.py newest      after `pip install '.[dev]'` in an environment of its own
"""

import json
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "versions.md"
ROWS = ROOT / "lightning_logs" / "versions"
FIT = (
    "-m gpt_lightning fit --config=quickstart --trainer.accelerator=cpu --trainer.precision={} "
    "--model.compile={} --trainer.max_steps={} --run_name={} --trainer.log_every_n_steps=1 "
    "--trainer.limit_val_batches=0 --samples.max_new_tokens=0"
)
TESTS = "-m pytest -q --numprocesses=2 tests/model tests/training tests/runs"
COMPILED_BOUND = 2e-2  # bfloat16 has 8 bits: largest difference of a loss from that of `pinned`
NAMES = ("torch", "lightning", "jsonargparse", "numpy")


def losses(folder: str, name: str, *settings: str) -> list[float]:
    """Train in a folder with the precision, compilation and steps given; return the losses."""
    command = [sys.executable, *FIT.format(*settings, name).split()]
    subprocess.run(command, cwd=folder, check=True)
    rows = Path(folder, "lightning_logs", name, "version_0", "metrics.jsonl").read_text()
    found = [json.loads(row).get("train/loss") for row in rows.splitlines()]
    return [loss for loss in found if loss is not None]


def main(name: str) -> int:
    """Try this environment, and write the page."""
    row = {"versions": ", ".join(f"{name} {version(name)}" for name in NAMES)}
    row["name"] = f"{name}, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory() as folder:
        row["compiled"] = losses(folder, "compiled", "bf16-mixed", "true", "60")
        row["eager"] = losses(folder, "eager", "32-true", "false", "20")
    tests = [sys.executable, *TESTS.split()]
    done = subprocess.run(tests, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout)
    row["tests"] = done.stdout.splitlines()[-1].strip("= ")
    ROWS.mkdir(parents=True, exist_ok=True)
    (ROWS / f"{row['name']}.json").write_text(json.dumps(row))
    rows = [json.loads(path.read_text()) for path in ROWS.glob("*.json")]
    rows.sort(key=lambda row: (not row["name"].startswith("pinned"), row["versions"], row["name"]))
    head, rule, _ = PAGE.read_text().partition("| --- | --- | ---: | --- | --- |\n")
    page, all_good = head + rule, True
    for row in rows:
        far = max(abs(a - b) for a, b in zip(row["compiled"], rows[0]["compiled"], strict=True))
        equal = [f"{x:.4f}" for x in row["eager"]] == [f"{x:.4f}" for x in rows[0]["eager"]]
        all_good &= far <= COMPILED_BOUND and equal and not re.search("failed|error", row["tests"])
        same = "equal" if equal else "other"
        page += f"| {row['name']} | {row['versions']} | {far:.1e} | {same} | {row['tests']} |\n"
    PAGE.write_text(page)
    return int(not all_good)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
