"""Record the numbers that a change of the code must keep, and compare two checkouts.

    git worktree add ../before cdaedf43
    python benchmarks/before_after.py record ../before before.json
    python benchmarks/before_after.py record . after.json
    python benchmarks/before_after.py compare before.json after.json
    python benchmarks/before_after.py times ../before .
    python benchmarks/before_after.py breaks .

`record` runs the command line of a checkout and writes, for each case of RUNS, all columns of
metrics.jsonl except times, and the SHA-256 of the weights and of the optimizer's state; for each
case of TEXTS the SHA-256 of the tokens of each split. `compare` prints the differences and ends
with exit code 1 if there are any. `times` measures steps in turn: both programs stay alive, and
one is stopped while the other computes a block of steps. `breaks` changes one line of the package
at a time (breaks.yaml), in a copy, and counts the changes that the tests see: first the tests that
saw them at cdaedf43, then all tests of their folders.

Measure times on an idle machine, with --pairs 40 for a bound of 3%: with two other jobs for each
core the median ratio of two equal checkouts was 1.05 over 12 pairs and 1.00 over 19, single pairs
0.5 to 1.4.

Only the command line and the contents of files are used, so that nothing here depends on names in
the package. Tiny Shakespeare is read from the folder in GPT_LIGHTNING_DATA. One machine records
both checkouts: the bytes depend on its CPU and on the version of PyTorch.
"""

import argparse
import gzip
import hashlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import yaml

Facts = dict[str, str | float]  # columns of metrics.jsonl and digests, by name

FIT = "fit --config=quickstart --run_name=run --seed_everything=1337 --data.corpus=tinyshakespeare"
CPU = "--trainer.accelerator=cpu --trainer.log_every_n_steps=1 --speed.peak_flops=1e12"
EVALUATE = "--trainer.limit_val_batches=2 --trainer.val_check_interval=30"
EAGER = f"{FIT} {CPU} {EVALUATE} --trainer.precision=32-true --model.compile=false"
ADAMW = "--model.optimizer=adamw --model.learning_rate=1e-3 --model.warmup_steps=10"
COMPILED = "--trainer.precision=bf16-mixed --model.compile=true"
# Commands of a case, one after the other in one folder
RUNS: dict[str, list[str]] = {
    "adamw": [f"{EAGER} {ADAMW} --trainer.max_steps=200"],
    "muon": [f"{EAGER} --trainer.max_steps=200"],
    "accumulation": [f"{EAGER} {ADAMW} --trainer.max_steps=40 --trainer.accumulate_grad_batches=3"],
    "dropout": [f"{EAGER} {ADAMW} --trainer.max_steps=40 --model.config.dropout=0.2"],
    "lora": [f"{EAGER} {ADAMW} --trainer.max_steps=40 --model.lora_rank=4"],
    "nanogpt": [
        f"{EAGER} {ADAMW} --trainer.max_steps=40 --model.config.init=nanogpt "
        "--data.order=nanogpt --data.eval_batches=2 --data.eval_batch_size=null"
    ],
    "two-ranks": [f"{EAGER} {ADAMW} --trainer.max_steps=30 --trainer.devices=2"],
    "resumed": [
        f"{EAGER} {ADAMW} --model.decay_steps=60 --trainer.max_steps=35",
        f"{EAGER} {ADAMW} --model.decay_steps=60 --trainer.max_steps=60 --resume=auto",
    ],
    "compiled": [f"{FIT} {CPU} {EVALUATE} {COMPILED} {ADAMW} --trainer.max_steps=60"],
    "compiled-baby-gpt": [
        f"{FIT} --config=shakespeare_char {CPU} {EVALUATE} {COMPILED} --trainer.max_steps=60 "
        "--data.batch_size=8 --model.warmup_steps=10"
    ],
}
# Largest difference of a loss, for the cases whose bytes may differ
BOUNDS = {"compiled": 2e-2, "compiled-baby-gpt": 2e-2}
# Sources and options of `prepare`
TEXTS = {
    "jsonl": "a.jsonl b.jsonl --tokenizer=gpt2 --test_fraction=0.1 --workers=2",
    "jsonl-trained": "a.jsonl --tokenizer=bpe:300",
    "gz": "c.jsonl.gz --tokenizer=gpt2",
    "parquet": "d.parquet --tokenizer=gpt2 --text_field=story",
    "folder": "texts --tokenizer=gpt2",
    "text-byte": "e.txt --tokenizer=byte",
    "text-char": "e.txt --tokenizer=char --test_fraction=0.1",
}
# Options of `fit`, and the number of log steps in a block
TIMED = {
    "quickstart": (f"{FIT} --trainer.log_every_n_steps=10", 5),
    "baby-gpt": (f"{FIT} --config=shakespeare_char --trainer.log_every_n_steps=1", 4),
}
PLAIN = (
    "--trainer.accelerator=cpu --trainer.limit_val_batches=0 --trainer.max_steps=100000 "
    "--speed.peak_flops=1e12"
)


# ---- record ------------------------------------------------------------------------------------


def environment(checkout: Path, home: Path) -> dict[str, str]:
    """Return the environment of a process with that checkout's package, one thread, own caches."""
    changed = {
        "PYTHONPATH": str(checkout.resolve()),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(home),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
    }
    return os.environ | changed


def start(checkout: Path, command: str, folder: Path) -> subprocess.Popen[bytes]:
    """Start gpt-lightning in a folder, in a process group of its own; it prints to a file there."""
    with open(folder / "printed", "wb") as printed:
        return subprocess.Popen(
            [sys.executable, "-m", "gpt_lightning", *command.split()],
            cwd=folder,
            env=environment(checkout, folder),
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def execute(checkout: Path, command: str, folder: Path) -> None:
    """Run gpt-lightning in a folder; end with the text that it printed if it fails."""
    if start(checkout, command, folder).wait():
        raise SystemExit(f"{command}\n{(folder / 'printed').read_text()}")


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Return the SHA-256 of the types, shapes and bytes of tensors in their order."""
    total = hashlib.sha256()
    for tensor in tensors:
        total.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def optimizer_facts(optimizer: dict[str, Any]) -> Facts:
    """Return the digest of each kind of state, and the settings of the groups.

    The rate is not among them: it is in metrics.jsonl, and a checkpoint may have the next step's.
    """
    kinds: dict[str, list[torch.Tensor]] = {}
    for index in sorted(optimizer["state"]):
        for kind, value in optimizer["state"][index].items():
            kinds.setdefault(kind, []).append(torch.as_tensor(value))
    facts: Facts = {f"optimizer {kind}": digest(tensors) for kind, tensors in kinds.items()}
    for number, group in enumerate(optimizer["param_groups"]):
        for name in ("params", "betas", "eps", "momentum", "weight_decay"):
            facts[f"group {number} {name}"] = str(group.get(name))
    return facts


def record_run(checkout: Path, commands: Sequence[str], folder: Path) -> Facts:
    """Train, and return the metrics by name and step, and the digests of the last checkpoint."""
    for command in commands:
        execute(checkout, command, folder)
    run = folder / "lightning_logs" / "run" / "version_0"
    last = max((run / "checkpoints").glob("*.ckpt"), key=os.path.getmtime)
    checkpoint = torch.load(last, weights_only=True)
    facts: Facts = {"weights": digest([*checkpoint["state_dict"].values()])}
    for optimizer in checkpoint["optimizer_states"]:
        facts |= optimizer_facts(optimizer)
    for row in rows(run / "metrics.jsonl"):
        for name, value in row.items():
            if name not in ("step", "time") and not name.startswith("perf/"):
                facts[f"{name} {row['step']:.0f}"] = value
    return facts


def rows(path: Path) -> list[dict[str, float]]:
    """Return the complete rows of a run's metrics."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def documents(seed: int, number: int) -> list[str]:
    """Return made-up documents: words, accents, emoji, white space, an empty and three equal."""
    draw = random.Random(seed)
    words = ["to", "be", "King", "été", "\U0001f600", "<|endoftext|>", "\n\n", "\t", "3.14", "日本"]
    texts = [" ".join(draw.choices(words, k=draw.randrange(1, 400))) for _ in range(number)]
    return [*texts, "", *texts[:3]]


def write_texts(folder: Path) -> None:
    """Write the sources of TEXTS."""
    for seed, name in enumerate("abc"):
        lines = [json.dumps({"number": seed, "text": text}) for text in documents(seed, 400)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "c.jsonl.gz").write_bytes(gzip.compress((folder / "c.jsonl").read_bytes(), mtime=0))
    table = pyarrow.table({"story": documents(3, 400)})
    pyarrow.parquet.write_table(table, folder / "d.parquet", row_group_size=100)
    (folder / "e.txt").write_text("\n".join(documents(4, 400)))
    (folder / "texts").mkdir()
    for number, text in enumerate(documents(5, 30)):
        (folder / "texts" / f"{number:02}.txt").write_text(text)


def record_tokens(checkout: Path, options: str, folder: Path) -> Facts:
    """Run `prepare`, and return for each split the number and the digest of its tokens."""
    write_texts(folder)
    execute(checkout, f"prepare {options} --out=made", folder)
    facts: Facts = {}
    for split in ("train", "val", "test"):
        shards = [np.load(path) for path in sorted((folder / "made").glob(f"{split}*.npy"))]
        if shards:
            tokens = np.concatenate(shards).astype(np.int64)
            facts[f"{split} tokens"] = len(tokens)
            facts[split] = digest([torch.from_numpy(tokens)])
    return facts


def record(checkout: Path, out: Path, only: Sequence[str]) -> None:
    """Write the facts of all cases to `out`; cases that it already has are not run again."""
    results: dict[str, Facts] = json.loads(out.read_text()) if out.exists() else {}
    for name in only or [*TEXTS, *RUNS]:
        if name in results:
            continue
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            if name in RUNS:
                results[name] = record_run(checkout, RUNS[name], Path(folder))
            else:
                results[name] = record_tokens(checkout, TEXTS[name], Path(folder))
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s", flush=True)


# ---- compare -----------------------------------------------------------------------------------


def differences(old: Facts, new: Facts, bound: float | None) -> list[str]:
    """Return a line for each fact that differs; with a bound, for each loss that exceeds it."""
    found: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before = old.get(key)
        after = new.get(key)
        if bound is None:
            differs = before != after
        elif "/loss" in key:
            differs = not abs(float(before or 0) - float(after or 0)) <= bound
        else:
            differs = False
        if differs:
            found.append(f"    {key}: {before} -> {after}")
    return found


def compare(before: Path, after: Path) -> int:
    """Print the differences of all cases, and return the exit code."""
    old: dict[str, Facts] = json.loads(before.read_text())
    new: dict[str, Facts] = json.loads(after.read_text())
    failed = 0
    for name in [*TEXTS, *RUNS]:
        if name not in old or name not in new:
            print(f"{name}: not in both files")
            continue
        found = differences(old[name], new[name], BOUNDS.get(name))
        failed += bool(found)
        print(f"{name}: {len(found)} differences in {len(old[name])} facts")
        print("\n".join(found[:10]), end="\n" if found else "")
    return 1 if failed else 0


# ---- times -------------------------------------------------------------------------------------


class Stepper:
    """Run of `fit` that is stopped by a signal except during its blocks."""

    def __init__(self, checkout: Path, name: str, folder: Path):
        options, self.log_steps = TIMED[name]
        folder.mkdir()
        self.folder = folder
        self.process = start(checkout, f"{options} {COMPILED} {PLAIN}", folder)

    def send(self, number: int) -> None:
        """Send a signal to the process and its children."""
        os.killpg(self.process.pid, number)

    def block(self) -> float:
        """Compute a block, and return the seconds of one of its steps."""
        log = self.folder / "lightning_logs" / "run" / "version_0" / "metrics.jsonl"
        done = len(rows(log))
        self.send(signal.SIGCONT)
        found: list[dict[str, float]] = []
        while len(found) <= self.log_steps:
            if self.process.poll() is not None:
                raise SystemExit((self.folder / "printed").read_text())
            time.sleep(0.02)
            found = rows(log)[done:]
        self.send(signal.SIGSTOP)
        return (found[-1]["time"] - found[0]["time"]) / (found[-1]["step"] - found[0]["step"])


def measure(before: Path, after: Path, name: str, pairs: int) -> list[tuple[float, float]]:
    """Return the seconds of a step in alternating blocks of two checkouts."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else two stopped programs are left
    with tempfile.TemporaryDirectory() as folder:
        old = Stepper(before, name, Path(folder, "before"))
        new = Stepper(after, name, Path(folder, "after"))
        try:
            turns = [(old.block(), new.block()) for _ in range(pairs + 2)]
        finally:
            for stepper in (old, new):
                stepper.send(signal.SIGKILL)
                stepper.process.wait()
    return turns[2:]  # without the first steps and the memory's warm-up


def times(before: Path, after: Path, pairs: int, only: Sequence[str]) -> None:
    """Print the median of the ratios of alternating blocks of steps."""
    for name in only or TIMED:
        turns = measure(before, after, name, pairs)
        ratios = sorted(new / old for old, new in turns)
        old_ms = 1e3 * statistics.median(old for old, _ in turns)
        new_ms = 1e3 * statistics.median(new for _, new in turns)
        spread = f"{ratios[0]:.3f} to {ratios[-1]:.3f} in {pairs} pairs"
        ratio = statistics.median(ratios)
        print(f"{name}: {old_ms:.2f} -> {new_ms:.2f} ms, ratio {ratio:.3f} ({spread})", flush=True)


# ---- breaks ------------------------------------------------------------------------------------


def place(copy: Path, entry: dict[str, Any]) -> Path | None:
    """Return the only file with a line: the named one, or another of the package; None: none."""
    paths = [copy / entry["file"], *sorted((copy / "gpt_lightning").rglob("*.py"))]
    found = [path for path in paths if path.exists() and path.read_text().count(entry["old"]) == 1]
    return found[0] if found else None


def fails(copy: Path, tests: Sequence[str]) -> bool:
    """Return whether one of the tests of a copy fails; False without tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    env = environment(copy, copy)
    return (
        bool(tests)
        and subprocess.run(command, cwd=copy, env=env, capture_output=True).returncode == 1
    )


def seen(copy: Path, tests: Sequence[str]) -> str:
    """Return which tests see a break: the listed ones, their folders, or none."""
    listed = []
    for test in tests:
        path, _, name = test.rpartition("::")
        if (copy / path).exists() and f"def {name}(" in (copy / path).read_text():
            listed.append(test)
    if fails(copy, listed):
        return "red"
    folders = sorted({test.rpartition("/")[0] for test in tests})
    return f"red in {' '.join(folders)}" if fails(copy, folders) else "NOT SEEN"


def breaks(checkout: Path, only: Sequence[str]) -> int:
    """Print which breaks the tests see, and return the exit code."""
    table = yaml.safe_load(Path(__file__).with_name("breaks.yaml").read_text())
    table = [entry for entry in table if not only or entry["file"] in only]
    red = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "copy")
        unused = shutil.ignore_patterns(
            ".git", ".venv", "__pycache__", "lightning_logs", ".*_cache"
        )
        shutil.copytree(checkout, copy, symlinks=True, ignore=unused)
        for number, entry in enumerate(table, 1):
            path = place(copy, entry)
            if path is None:
                verdict = "NO SUCH LINE"
            else:
                text = path.read_text()
                path.write_text(text.replace(entry["old"], entry["new"]))
                verdict = seen(copy, entry["tests"])
                path.write_text(text)
            red += verdict.startswith("red")
            print(f"{number:2} {verdict}: {entry['file']}: {entry['new'].strip()}", flush=True)
    print(f"{red} of {len(table)} turn red")
    return 0 if red == len(table) else 1


def main() -> int:
    """Parse the arguments and run one of the commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "compare", "times", "breaks"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    first = args.paths[0]
    last = args.paths[-1]
    if args.command == "record":
        record(first, last, args.only)
    elif args.command == "compare":
        return compare(first, last)
    elif args.command == "times":
        times(first, last, args.pairs, args.only)
    else:
        return breaks(first, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
