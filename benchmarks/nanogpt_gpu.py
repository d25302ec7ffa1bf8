"""Train GPT-2 124M with nanoGPT's train.py and with `fit` in turn, and write gpu_nanogpt.md.

    python nanoGPT/data/shakespeare/prepare.py
    python -m benchmarks.nanogpt_gpu nanoGPT --batches 12 --rounds 3

Both programs train in bfloat16, compiled, with 480 sequences of 1,024 tokens in a step; each run is
a process of its own. Of several batches, the first that fits into memory in both programs is
measured. A finished round is kept in rows/gpu_nanogpt.jsonl, and a later call trains those left.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks import nanogpt
from gpt_lightning.bench.fits import random_token_options, size_options
from gpt_lightning.bench.gpu import TOKENS
from gpt_lightning.hardware.device import machine_record

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows" / "gpu_nanogpt.jsonl"
SEQUENCES = 480  # of a step, as nanoGPT's 40 accumulated micro-batches of 12
STEPS = 10
WARMUP = 5  # nanoGPT compiles in the first two steps
NO_MEMORY = "out of memory"
THEIRS = ("--dataset=shakespeare", "--bias=True", "--compile=True")


def main() -> None:
    """Train the rounds that are left and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("nanogpt", type=Path, help="folder of nanoGPT with its prepared data")
    parser.add_argument("--batches", default="12", help="batches to try, the largest first (12)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each program (3)")
    parser.add_argument("--device", default="cuda", help="cpu tries the script out (cuda)")
    parser.add_argument("--theirs", default="", help="further options of nanoGPT's train.py")
    parser.add_argument("--ours", default="", help="further options of fit")
    args = parser.parse_args()
    if not (args.nanogpt / "data/shakespeare/train.bin").exists():
        parser.error(f"run `python {args.nanogpt}/data/shakespeare/prepare.py` before")
    for batch in map(int, args.batches.split(",")):
        fits = True
        while fits and len(rounds_of(batch)) < args.rounds:
            fits = train_round(args, batch)
        if fits:
            break
        print(f"{batch} x 1,024 tokens: {NO_MEMORY}", flush=True)
    write_page(machine_record(sys.argv, torch.device(args.device)))


def read_rows() -> list[dict[str, float]]:
    """Return the finished rounds of all calls."""
    if not ROWS.exists():
        return []
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


def rounds_of(batch: int) -> list[dict[str, float]]:
    """Return the finished rounds of a batch."""
    return [row for row in read_rows() if row["batch"] == batch]


def train_round(args: argparse.Namespace, batch: int) -> bool:
    """Train once with each program and keep both rates; return False if memory runs out."""
    theirs = their_rate(args, batch)
    ours = our_rate(args, batch) if theirs else None
    if theirs is None or ours is None:
        return False
    row = {"batch": batch, "theirs": theirs, "ours": ours}
    with ROWS.open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(f"{batch} x 1,024: nanoGPT {theirs:,.0f}, ours {ours:,.0f} tokens/s", flush=True)
    return True


def their_rate(args: argparse.Namespace, batch: int) -> float | None:
    """Return the tokens per second of nanoGPT's median step; None if memory runs out."""
    options = [*THEIRS, f"--device={args.device}", f"--max_iters={WARMUP + STEPS - 1}"]
    options += [f"--batch_size={batch}", f"--gradient_accumulation_steps={SEQUENCES // batch}"]
    try:
        text = nanogpt.train(args.nanogpt, [*options, *args.theirs.split()])
    except subprocess.CalledProcessError as error:
        return check_memory(error)
    tokens = re.search(r"^tokens per iteration will be: ([\d,]+)", text, re.MULTILINE)
    assert tokens, text
    step_ms = statistics.median(nanogpt.step_ms(text)[WARMUP:])
    return int(tokens[1].replace(",", "")) / step_ms * 1e3


def our_rate(args: argparse.Namespace, batch: int) -> float | None:
    """Return the tokens per second of our median step; None if memory runs out."""
    words = [sys.executable, "-m", "gpt_lightning", "fit", *size_options("124m")]
    words += [f"--data.batch_size={batch}"]
    words += [f"--trainer.accumulate_grad_batches={SEQUENCES // batch}"]
    words += [f"--trainer.accelerator={args.device}", "--trainer.logger=false"]
    words += random_token_options(50304, STEPS, WARMUP, TOKENS)
    with tempfile.TemporaryDirectory() as out:
        words += [f"--trainer.default_root_dir={out}", *args.ours.split()]
        try:
            done = subprocess.run(
                words, cwd=HERE.parent, capture_output=True, text=True, check=True
            )
        except subprocess.CalledProcessError as error:
            return check_memory(error)
    rate = re.search(r"^speed +([\d,]+) tokens/s, median step", done.stdout, re.MULTILINE)
    assert rate, done.stdout
    return float(rate[1].replace(",", ""))


def check_memory(error: subprocess.CalledProcessError) -> None:
    """Raise SystemExit unless a program failed for lack of memory."""
    if NO_MEMORY not in error.stderr.lower():
        raise SystemExit(f"{error}\n{error.stdout}{error.stderr}")


def write_page(machine: dict[str, str]) -> None:
    """Write gpu_nanogpt.md from the rounds of all calls."""
    table = []
    for batch in sorted({row["batch"] for row in read_rows()}):
        rows = rounds_of(int(batch))
        theirs = ", ".join(f"{row['theirs']:,.0f}" for row in rows)
        ours = ", ".join(f"{row['ours']:,.0f}" for row in rows)
        ratio = statistics.median(row["ours"] / row["theirs"] for row in rows)
        table.append(f"| {batch} x 1,024 | {theirs} | {ours} | **{ratio:.2f}** |")
    facts = "; ".join(machine[name] for name in ("date", "device", "memory", "software"))
    lines = [
        "# GPT-2 124M beside nanoGPT's program on one GPU",
        "",
        "Tokens per second of the median step, by round; the terms: `benchmarks/nanogpt_gpu.py`.",
        "",
        "| micro-batch | nanoGPT 3adf61e1 | ours | median ratio |",
        "| --- | --- | --- | ---: |",
        *table,
        "",
        facts,
    ]
    (HERE / "gpu_nanogpt.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
