"""Compare the time of a step of nanoGPT and of `fit` on this CPU, and write speed.md's table.

    git clone https://github.com/karpathy/nanoGPT
    python nanoGPT/data/shakespeare_char/prepare.py
    python nanoGPT/data/shakespeare/prepare.py
    python -m benchmarks.nanogpt_speed nanoGPT

Both programs train the same models in turn, three times each, every run in a process of its
own. The time of a step is the median of the times that each program prints. nanoGPT runs without
changes in float32 (`--device=cpu --compile=False`), and our program with its configuration, which
is compiled bfloat16 on CPUs that multiply it. nanoGPT's first two steps are left out, and our
program leaves out compilation.

Further columns, of one run each: nanoGPT compiled, in bfloat16, and both. On a CPU its train.py has
no autocast, whatever --dtype says; bfloat16 needs one changed line, which is changed in a copy.
With `--llmc FOLDER`, a clone of https://github.com/karpathy/llm.c, its CPU program trains the 124M
model from random weights, for as many steps (gcc -Ofast -march=native -fopenmp).
"""

import argparse
import array
import os
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks import nanogpt
from gpt_lightning.hardware.device import machine_record
from gpt_lightning.hardware.peaks import measure_peak
from gpt_lightning.hardware.precision import cpu_bf16_units
from gpt_lightning.model.flops import flops_per_token

PAGE = Path(__file__).with_name("speed.md")
BEGIN, END = "<!-- nanogpt_speed.py -->", "<!-- end -->"
OURS = "--trainer.limit_val_batches 0 --trainer.enable_checkpointing false"


@dataclass(frozen=True)
class Model:
    """Model in both programs.

    Attributes:
        name: First column of the table.
        theirs: Arguments of nanoGPT's train.py.
        ours: Arguments of `gpt-lightning fit`.
        shape: Parameters without the tables that are only looked up, layers, width, batch, context.
        others: Measure the further columns, too; nanoGPT's step of 12 x 1,024 takes over a minute.
    """

    name: str
    theirs: str
    ours: str
    shape: tuple[int, int, int, int, int]
    others: bool = True

    def floor_ms(self, peak_flops: float, bandwidth: float) -> float:
        """Return the time that no program of this arithmetic can beat, in ms.

        Args:
            peak_flops: Rate of products in our dtype, in FLOP/s. The masked half of attention does
                not count: a kernel may skip it.
            bandwidth: Bytes per second. AdamW reads weight, gradient and two averages, and writes
                three of them, in float32.
        """
        n_params, n_layer, n_embd, batch, context = self.shape
        flops = batch * context * flops_per_token(n_params, n_layer, n_embd, context // 2)
        return 1e3 * (flops / peak_flops + 28 * n_params / bandwidth)


SMALL = (
    "config/train_shakespeare_char.py --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 "
    "--n_embd=128 --dropout=0.0 --max_iters=300"
)
GPT2 = (  # no accumulation; the rest is what train.py has
    "--dataset=shakespeare --bias=True --dropout=0.0 --gradient_accumulation_steps=1"
)
OUR_GPT2 = (
    "--config gpt2_124m --data.dataset null --data.corpus tinyshakespeare "
    "--trainer.accumulate_grad_batches 1 --trainer.precision auto"
)
MODELS = (
    Model(
        "small preset: 4 layers, 128 wide, 12 x 64, no dropout",
        SMALL,
        "--config shakespeare_char_cpu --trainer.max_steps 500",
        (795_904, 4, 128, 12, 64),
    ),
    Model(
        "the same, ours in float32, not compiled",
        SMALL,
        "--config shakespeare_char_cpu --trainer.precision 32-true --trainer.max_steps 300",
        (795_904, 4, 128, 12, 64),
    ),
    Model(
        "baby GPT: 6 layers, 384 wide, 64 x 256, dropout 0.2",
        "config/train_shakespeare_char.py --max_iters=4",
        "--config shakespeare_char --trainer.max_steps 10",
        (10_646_784, 6, 384, 64, 256),
    ),
    Model(
        "GPT-2 124M, short: 12 layers, 768 wide, 4 x 256, no dropout",
        f"{GPT2} --batch_size=4 --block_size=256 --max_iters=6",
        f"{OUR_GPT2} --data.batch_size 4 --model.config.block_size 256 --trainer.max_steps 14",
        (123_689_472, 12, 768, 4, 256),
    ),
    Model(
        "GPT-2 124M: the same, 12 x 1,024, the batch and context of nanoGPT's train.py",
        f"{GPT2} --max_iters=3",
        f"{OUR_GPT2} --data.batch_size 12 --trainer.max_steps 9",
        (123_689_472, 12, 768, 12, 1024),
        others=False,
    ),
)


def main() -> None:
    """Run both programs in turn and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("nanogpt", type=Path, help="folder of nanoGPT with its prepared data")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (3)")
    parser.add_argument("--llmc", type=Path, help="folder of llm.c (none)")
    args = parser.parse_args()
    for name in ("shakespeare_char", "shakespeare"):
        if not (args.nanogpt / "data" / name / "train.bin").exists():
            parser.error(f"run `python {args.nanogpt}/data/{name}/prepare.py` before")
    load = os.getloadavg()[0]  # load of other programs: the loop makes its own
    machine = machine_record(sys.argv)
    commit = run(["git", "rev-parse", "--short", "HEAD"], args.nanogpt).strip()
    dtype = "bf16" if cpu_bf16_units() else "fp32"  # as trainer.precision: auto
    peak, bandwidth = measure_peak(torch.device("cpu"), dtype, 3.0), measure_bandwidth()
    rows, more = [], []
    for model in MODELS:
        pairs = []
        for _ in range(args.rounds):
            pairs.append((their_ms(args.nanogpt, model), our_ms(model)))
            print(f"{model.name}: theirs {pairs[-1][0]:,.1f} ms, ours {pairs[-1][1]:,.1f} ms")
        rows.append(row(model.name, pairs))
        if "32-true" in model.ours:
            continue
        ours = statistics.median(ms for _, ms in pairs)
        floor = model.floor_ms(peak, bandwidth)
        ways = ((True, False), (False, True), (True, True)) if model.others else ()
        others = [their_ms(args.nanogpt, model, compiled, bf16) for compiled, bf16 in ways]
        others += [llmc_ms(args.llmc, args.nanogpt)] if args.llmc and "short" in model.name else []
        cells = [f"{ms:,.1f} ({ms / ours:.2f})" for ms in others] + ["-"] * (4 - len(others))
        cells = [f"{floor:,.1f}", f"{floor / ours:.0%}", f"{ours - floor:,.1f}", *cells]
        more.append(f"| {model.name.partition(':')[0]} | {ours:,.1f} | {' | '.join(cells)} |")
        print(more[-1], flush=True)
    facts = f"{machine['date']}. {machine['CPU']}; {machine['memory']}; {machine['software']}. "
    facts += f"nanoGPT {commit}. Load average before: {load:.1f}. Floor: {dtype} products at "
    facts += f"{peak / 1e12:.2f} TFLOP/s, AdamW's bytes at {bandwidth / 1e9:.0f} GB/s."
    write(facts, rows, more)


def measure_bandwidth() -> float:
    """Return the bytes per second that a sum of two large tensors into a third moves."""
    a, b = torch.ones(2, 2**26)
    out, best = torch.empty_like(a), 0.0
    for _ in range(5):
        begin = time.perf_counter()
        torch.add(a, b, out=out)
        best = max(best, 12 * a.numel() / (time.perf_counter() - begin))
    return best


def their_ms(folder: Path, model: Model, compiled: bool = False, bf16: bool = False) -> float:
    """Return the median time of nanoGPT's steps in ms."""
    options = [*model.theirs.split(), "--device=cpu", f"--compile={compiled}"]
    options += ["--dtype=bfloat16"] * bf16
    printed = nanogpt.train(folder, options, autocast=bf16)
    return statistics.median(nanogpt.step_ms(printed)[2:])


def llmc_ms(folder: Path, nanogpt: Path) -> float:
    """Return the median time of the steps of llm.c's CPU program, of 4 x 256 tokens, in ms."""
    source = (folder / "train_gpt2.c").read_text()
    for old, new in (("int T = 64;", "int T = 256;"), ("step <= 40", "step <= 4")):
        assert old in source, f"another llm.c: {folder}"
        source = source.replace(old, new)
    with tempfile.TemporaryDirectory() as out:
        Path(out, "train_gpt2.c").write_text(source)
        flags = ["-Ofast", "-march=native", "-fopenmp", "-DOMP", f"-I{folder.resolve()}"]
        run(["gcc", *flags, "train_gpt2.c", "-o", "train_gpt2", "-lm"], Path(out))
        V, Vp, L, C, T = 50257, 50304, 12, 768, 1024
        header = array.array("i", [20240326, 3, T, V, L, 12, C, Vp] + [0] * 248)
        n_params = (Vp + T) * C + L * (12 * C * C + 13 * C) + 2 * C
        weights = torch.randn(n_params).mul_(0.02).numpy().tobytes()
        Path(out, "gpt2_124M.bin").write_bytes(header.tobytes() + weights)
        data = Path(out, "dev/data/tinyshakespeare")
        data.mkdir(parents=True)
        for split in ("train", "val"):
            tokens = (nanogpt / f"data/shakespeare/{split}.bin").read_bytes()
            header = array.array("i", [20240520, 1, len(tokens) // 2] + [0] * 253)
            (data / f"tiny_shakespeare_{split}.bin").write_bytes(header.tobytes() + tokens)
        text = run([str(Path(out, "train_gpt2"))], Path(out))
    return statistics.median(float(ms) for ms in re.findall(r"took ([\d.]+) ms", text)[1:])


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


def row(name: str, pairs: list[tuple[float, float]]) -> str:
    """Return a row of the table from pairs of times, nanoGPT's first."""
    theirs, ours = (", ".join(f"{ms:,.1f}" for ms in side) for side in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"| {name} | {theirs} | {ours} | {each} | **{statistics.median(ratios):.2f}** |"


def write(facts: str, rows: list[str], more: list[str]) -> None:
    """Replace the tables of speed.md."""
    text = PAGE.read_text()
    head, _, rest = text.partition(BEGIN)
    tail = rest.partition(END)[2]
    table = [
        "| model | nanoGPT, ms a step | ours, ms a step | ratios | median |",
        "| --- | --- | --- | --- | ---: |",
        *rows,
        "",
        "Our median, its floor and share, the rest, other programs: ms a step (ratio to ours).",
        "",
        "| model | ours | floor | share | rest | nanoGPT compiled | nanoGPT bf16 | both | llm.c |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        *more,
    ]
    facts = textwrap.fill(facts, 100, break_on_hyphens=False)
    body = "\n".join([BEGIN, "", facts, "", *table, "", END])
    PAGE.write_text(head + body + tail)


if __name__ == "__main__":
    main()
