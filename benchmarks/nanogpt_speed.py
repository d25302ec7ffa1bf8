"""Compare the time of a step of nanoGPT and of `fit` on this CPU, and write speed.md's table.

    git clone https://github.com/karpathy/nanoGPT
    python nanoGPT/data/shakespeare_char/prepare.py
    python nanoGPT/data/shakespeare/prepare.py
    python benchmarks/nanogpt_speed.py nanoGPT

Both programs train the same three models in turn, three times each, every run in a process of its
own. The time of a step is the median of the times that each program prints. nanoGPT runs without
changes in float32 (`--device=cpu --compile=False`), and our program with its configuration, which
is compiled bfloat16 on CPUs that multiply it. nanoGPT's first two steps are left out, and our
program leaves out compilation.
"""

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

from gpt_lightning.hardware.machine import machine_record

PAGE = Path(__file__).with_name("speed.md")
BEGIN, END = "<!-- nanogpt_speed.py -->", "<!-- end -->"
COMMON = "--device=cpu --compile=False --eval_iters=1 --log_interval=1 --eval_interval=1000000"
OURS = "--trainer.limit_val_batches 0 --trainer.enable_checkpointing false"


@dataclass(frozen=True)
class Model:
    """Model in both programs.

    Attributes:
        name: First column of the table.
        theirs: Arguments of nanoGPT's train.py.
        ours: Arguments of `gpt-lightning fit`.
    """

    name: str
    theirs: str
    ours: str


SMALL = (
    "config/train_shakespeare_char.py --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 "
    "--n_embd=128 --dropout=0.0 --max_iters=300"
)
MODELS = (
    Model(
        "small preset: 4 layers, 128 wide, 12 x 64, no dropout",
        SMALL,
        "--config shakespeare_char_cpu --trainer.max_steps 500",
    ),
    Model(
        "the same, ours in float32, not compiled",
        SMALL,
        "--config shakespeare_char_cpu --trainer.precision 32-true --trainer.max_steps 300",
    ),
    Model(
        "baby GPT: 6 layers, 384 wide, 64 x 256, dropout 0.2",
        "config/train_shakespeare_char.py --max_iters=6",
        "--config shakespeare_char --trainer.max_steps 16",
    ),
    Model(
        "GPT-2 124M: 12 layers, 768 wide, 4 x 256, no dropout",
        "--dataset=shakespeare --bias=True --batch_size=4 --block_size=256 --n_layer=12 "
        "--n_head=12 --n_embd=768 --dropout=0.0 --gradient_accumulation_steps=1 --max_iters=7",
        "--config gpt2_124m --data.dataset null --data.corpus tinyshakespeare "
        "--data.batch_size 4 --model.config.block_size 256 --trainer.accumulate_grad_batches 1 "
        "--trainer.max_steps 14",
    ),
)


def main() -> None:
    """Run both programs in turn and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("nanogpt", type=Path, help="folder of nanoGPT with its prepared data")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (3)")
    args = parser.parse_args()
    load = os.getloadavg()[0]  # of other programs: the loop makes its own
    machine = machine_record(sys.argv)
    rows = []
    for model in MODELS:
        pairs = []
        for _ in range(args.rounds):
            pairs.append((their_ms(args.nanogpt, model), our_ms(model)))
            print(f"{model.name}: theirs {pairs[-1][0]:,.1f} ms, ours {pairs[-1][1]:,.1f} ms")
        rows.append(row(model.name, pairs))
    commit = git(args.nanogpt, "rev-parse", "--short", "HEAD")
    facts = f"{machine['date']}. {machine['CPU']}; {machine['memory']}; {machine['software']}. "
    facts += f"nanoGPT {commit}. Load average before: {load:.1f}."
    write(facts, rows)


def their_ms(folder: Path, model: Model) -> float:
    """Return the median time of nanoGPT's steps in ms."""
    with tempfile.TemporaryDirectory() as out:
        words = ["train.py", *model.theirs.split(), *COMMON.split(), f"--out_dir={out}"]
        text = run([sys.executable, *words], folder)
    times = [float(ms) for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", text, re.M)]
    return statistics.median(times[2:])


def our_ms(model: Model) -> float:
    """Return the median time of our steps in ms."""
    with tempfile.TemporaryDirectory() as out:
        words = ["-m", "gpt_lightning", "fit", *model.ours.split(), *OURS.split()]
        text = run([sys.executable, *words, "--trainer.default_root_dir", out], PAGE.parents[1])
    found = re.search(r"^speed .* median step ([\d.,]+) ms", text, re.M)
    assert found, text
    return float(found[1].replace(",", ""))


def run(command: list[str], folder: Path) -> str:
    """Return what a command prints; end the script if it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def git(folder: Path, *words: str) -> str:
    """Return what git prints."""
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() or "of an unknown commit"


def row(name: str, pairs: list[tuple[float, float]]) -> str:
    """Return a row of the table from pairs of times, nanoGPT's first."""
    theirs, ours = (", ".join(f"{ms:,.1f}" for ms in side) for side in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"| {name} | {theirs} | {ours} | {each} | **{statistics.median(ratios):.2f}** |"


def write(facts: str, rows: list[str]) -> None:
    """Replace the table of speed.md."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    table = [
        "| model | nanoGPT, ms a step | ours, ms a step | ratios | median |",
        "| --- | --- | --- | --- | ---: |",
        *rows,
    ]
    facts = textwrap.fill(facts, 100, break_on_hyphens=False)
    body = "\n".join([BEGIN, "", facts, "", *table, "", END])
    PAGE.write_text(head + body + tail)


if __name__ == "__main__":
    main()
