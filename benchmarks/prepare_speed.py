"""Measure `gpt-lightning prepare` on generated JSONL, and write prepare.md.

    python benchmarks/prepare_speed.py

The floor is a plain loop of tiktoken over the same documents in one thread. Each run is a process
of its own; its peak is the highest resident memory of one of its processes.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from gpt_lightning.hardware.device import machine_record

PAGE = Path(__file__).with_name("prepare.md")
PLAIN = """
import json, sys, tiktoken
encode = tiktoken.get_encoding("gpt2").encode_ordinary
print(sum(len(encode(json.loads(line)["text"])) for line in open(sys.argv[1])))
"""
MEASURED = """
import resource, subprocess, sys, time
begin = time.perf_counter()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, text=True)
seconds = time.perf_counter() - begin
print(done.returncode, seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
print(done.stdout)
"""
SYLLABLES = "ba be bi co cu da de di en er es fi ga in is ka la le li lo ma me na ne no on or ra re"


def main() -> None:
    """Measure and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=300, help="size of the JSONL (300)")
    parser.add_argument("--workers", default="1,2", help="numbers of workers (1,2)")
    args = parser.parse_args()
    load = os.getloadavg()[0]  # load of other programs
    machine = machine_record([])
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "documents.jsonl")
        generate(source, args.megabytes * 10**6)
        seconds, peak, printed = measured([sys.executable, "-c", PLAIN, str(source)])
        tokens = int(printed.split()[0])
        rows = [row("plain loop of tiktoken, one thread", source, tokens, seconds, peak)]
        for workers in args.workers.split(","):
            out = Path(folder, f"out{workers}")
            command = [sys.executable, "-m", "gpt_lightning", "prepare", str(source)]
            command += ["--out", str(out), "--workers", workers]
            seconds, peak, _ = measured(command)
            rows.append(row(f"`prepare --workers {workers}`", source, tokens, seconds, peak))
    facts = f"{machine['date']}. {machine['CPU']}; {machine['memory']}; {machine['software']}. "
    facts += f"Load average before: {load:.1f}."
    about = f"Generated JSONL, {tokens:,} tokens of the tokenizer gpt2. MB/s are of the file, "
    about += "tokens/s of all workers together."
    parts = [
        "# prepare",
        f"`python benchmarks/prepare_speed.py --megabytes {args.megabytes}`",
        *(textwrap.fill(text, 100, break_on_hyphens=False) for text in (facts, about)),
        "\n".join(
            [
                "| run | wall s | MB/s | tokens/s | peak MB of a process |",
                "| --- | ---: | ---: | ---: | ---: |",
                *rows,
            ]
        ),
    ]
    PAGE.write_text("\n\n".join(parts) + "\n")
    print(PAGE.read_text())


def generate(path: Path, size: int) -> None:
    """Write documents of words of two to four syllables, the first ones most frequent."""
    draw = random.Random(13)
    parts = SYLLABLES.split()
    words = ["".join(draw.choices(parts, k=draw.randint(2, 4))) for _ in range(20_000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    with path.open("w") as file:
        while file.tell() < size:
            text = " ".join(draw.choices(words, weights, k=draw.randint(50, 1_000)))
            file.write(json.dumps({"text": text}) + "\n")


def measured(command: list[str]) -> tuple[float, float, str]:
    """Return the wall time in s, the peak in MB, and what was printed."""
    measure = [sys.executable, "-c", MEASURED, *command]
    text = subprocess.run(measure, stdout=subprocess.PIPE, text=True, check=True).stdout
    head, _, printed = text.partition("\n")
    status, seconds, peak_kib = head.split()
    assert status == "0", printed
    return float(seconds), float(peak_kib) * 1024 / 1e6, printed


def row(name: str, source: Path, tokens: int, seconds: float, peak: float) -> str:
    """Return a row of the table."""
    rate = source.stat().st_size / 1e6 / seconds
    return f"| {name} | {seconds:.1f} | {rate:.1f} | {tokens / seconds / 1e6:.1f} M | {peak:.0f} |"


if __name__ == "__main__":
    main()
