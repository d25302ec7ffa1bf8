"""Record what a change of the code must keep, and compare two checkouts: losses, bytes, times.

    git worktree add ../before 2632cfa
    python benchmarks/before_after.py record ../before before.json
    python benchmarks/before_after.py record . after.json
    python benchmarks/before_after.py compare before.json after.json
    python benchmarks/before_after.py times ../before .

`record` runs each case of RUNS in a process of its own, with the package of that checkout, and
writes the losses and the SHA-256 of all weights and of the optimizer's state. `compare` ends with
exit code 1 if a case of eager float32 with AdamW differs in one byte, if a loss with Muon differs
by more than 1e-3, or if one in compiled bfloat16 differs by more than 2e-2. `times` measures
start-up, the first step with an empty compile cache, the peak of memory, and steps in turn: both
processes stay alive, and each waits while the other computes its block of steps.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

EAGER = "--trainer.precision=32-true --model.compile=false "
COMPILED = "--trainer.precision=bf16-mixed --model.compile=true "
ADAMW = "--model.optimizer=adamw --model.learning_rate=1e-3 "
QUICKSTART = "--config=quickstart --trainer.accelerator=cpu --trainer.limit_val_batches=2 "
SMALL = "--config=shakespeare_char_cpu --trainer.accelerator=cpu "
LADDER = " ".join(
    f"--config=ladder/{rung}"
    for rung in ("overfit-one-batch", "sequential-loader", "weight-tying", "gpt2-init")
)
NANOGPT = (
    "--model.config.init=nanogpt --data.order=nanogpt --trainer.num_sanity_val_steps=-1 "
    "--model.learning_rate=1e-3 --data.eval_batches=20 --data.eval_batch_size=null "
    "--trainer.val_check_interval=250 "
)
MIXTURE = """--data.corpus=null --data.mixture={"one":3,"two":1} """
# Arguments of `fit`. The bound is the largest difference of a loss; with 0 the bytes are compared.
RUNS: dict[str, tuple[float, str]] = {
    "quickstart-muon": (1e-3, QUICKSTART + EAGER + "--trainer.max_steps=200"),
    "quickstart": (0.0, QUICKSTART + EAGER + ADAMW + "--trainer.max_steps=200"),
    "gpt2-init": (0.0, LADDER + " --trainer.accelerator=cpu " + EAGER),
    "nanogpt": (0.0, SMALL + EAGER + NANOGPT),
    "accumulation": (
        0.0,
        QUICKSTART + EAGER + ADAMW + "--trainer.max_steps=40 --trainer.val_check_interval=60 "
        "--trainer.accumulate_grad_batches=3",
    ),
    "dropout": (
        0.0,
        QUICKSTART + EAGER + ADAMW + "--trainer.max_steps=40 --model.config.dropout=0.2",
    ),
    "lora": (
        0.0,
        QUICKSTART + EAGER + ADAMW + "--trainer.max_steps=60 --model.lora_rank=4",
    ),
    "mixture": (0.0, QUICKSTART + EAGER + ADAMW + MIXTURE + "--trainer.max_steps=60"),
    "compiled": (2e-2, QUICKSTART + COMPILED + ADAMW + "--trainer.max_steps=60"),
    "compiled-baby-gpt": (
        2e-2,
        "--config=shakespeare_char --trainer.limit_val_batches=2 --trainer.max_steps=60 "
        "--trainer.accelerator=cpu --data.batch_size=8 --model.config.dropout=0.0 " + COMPILED,
    ),
    "quickstart-whole": (1e-2, "--config=quickstart --trainer.accelerator=cpu"),
}
ALL_STEPS = " --trainer.log_every_n_steps=1 --seed_everything=1337 --run_name=run"
# Options of `fit`, and the steps of a block
TIMED: dict[str, tuple[str, int]] = {
    "quickstart": ("--config=quickstart", 50),
    "baby-gpt": ("--config=shakespeare_char", 3),
    "124m": (
        "--config=gpt2_124m --data.dataset=null --data.corpus=tinyshakespeare "
        "--data.tokenizer=gpt2 --model.config.block_size=256 --data.batch_size=4 "
        "--trainer.accumulate_grad_batches=1",
        3,
    ),
}
NO_EXTRAS = (
    " --trainer.accelerator=cpu --trainer.precision=bf16-mixed --model.compile=true "
    "--trainer.limit_val_batches=0 --trainer.enable_checkpointing=false --trainer.max_steps=100000 "
    "--data.tokens_per_step=null --speed.peak_flops=1e12"
)
# A process of `times`: it computes a block of steps for each line on its standard input.
BLOCKS = """
import resource, sys, time
import lightning as L
from gpt_lightning import fit

class Blocks(L.Callback):
    def __init__(self, steps):
        self.steps, self.done, self.began = steps, 0, time.perf_counter()
    def on_train_batch_end(self, trainer, *args):
        self.done += 1
        if self.done == 1:
            self.answer(time.perf_counter() - STARTED)
        elif (self.done - 1) % self.steps == 0:
            self.answer((time.perf_counter() - self.began) / self.steps)
    def answer(self, seconds):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print("BLOCK", seconds, peak, file=sys.stderr, flush=True)
        if not sys.stdin.readline():
            sys.exit(0)
        self.began = time.perf_counter()

def options(words):
    keys = [word.removeprefix("--").split("=", 1) for word in words]
    return [v for k, v in keys if k == "config"], {k: v for k, v in keys if k != "config"}

STARTED = time.perf_counter()
configs, overrides = options(sys.argv[2:])
fit(*configs, overrides, callbacks=[Blocks(int(sys.argv[1]))])
"""


def environment(checkout: Path, home: Path) -> dict[str, str]:
    """Return the environment of a process with that checkout's package and empty caches.

    PyTorch keeps its precompiled headers, 150 MB each, in the temporary folder.
    """
    home.mkdir(exist_ok=True)
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"), "XDG_CACHE_HOME": str(home)}
    return os.environ | caches | {"TMPDIR": str(home), "PYTHONPATH": str(checkout.resolve())}


def digest(values: Any, into: Any = None) -> str:
    """Return the SHA-256 of all numbers and tensors of a nested structure, in order."""
    total = hashlib.sha256() if into is None else into
    if isinstance(values, torch.Tensor):
        total.update(values.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(values, dict):
        for key in sorted(values, key=str):
            total.update(str(key).encode())
            digest(values[key], total)
    elif isinstance(values, list | tuple):
        for value in values:
            digest(value, total)
    else:
        total.update(repr(values).encode())
    return total.hexdigest()


def optimizer_state(checkpoint: dict[str, Any]) -> list[Any]:
    """Return the states of all parameters, without the options of their groups."""
    return [optimizer["state"] for optimizer in checkpoint["optimizer_states"]]


def record_run(checkout: Path, options: str) -> dict[str, Any]:
    """Run `fit`, and return its losses by step and the digests of its last checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "gpt_lightning", "fit", *options.split()]
        command += ALL_STEPS.split()
        env = environment(checkout, Path(folder) / "cache")
        if "--data.mixture" in options:
            for name, split in (("one", "0.1"), ("two", "0.2")):
                Path(folder, f"{name}.txt").write_text(f"To be, or not to be: {name}!\n" * 2000)
                words = f"prepare {name}.txt --out {name} --tokenizer gpt2 --val_fraction {split}"
                prepare = [*command[:3], *words.split()]
                subprocess.run(prepare, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        subprocess.run(command, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        run = Path(folder, "lightning_logs", "run", "version_0")
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses = {
            f"{key} {row['step']:.0f}": row[key]
            for row in rows
            for key in ("train/loss", "val/loss")
            if key in row
        }
        written = (run / "checkpoints").glob("*.ckpt")
        newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            return {"losses": losses, "weights": None, "optimizer": None}
        checkpoint = torch.load(newest, weights_only=True, map_location="cpu")
        weights, state = digest(checkpoint["state_dict"]), digest(optimizer_state(checkpoint))
        return {"losses": losses, "weights": weights, "optimizer": state}


def record(checkout: Path, out: Path, only: list[str]) -> None:
    """Write the results of all runs to `out`, one after the other; those that it has stay."""
    results = json.loads(out.read_text()) if out.exists() else {}
    for name, (_, options) in RUNS.items():
        if name not in results and (not only or name in only):
            results[name] = record_run(checkout, options)
            out.write_text(json.dumps(results, indent=1) + "\n")
            print(name, len(results[name]["losses"]), "losses", results[name]["weights"])


def compare(before: Path, after: Path) -> int:
    """Print a line for each run that both files have, and return the exit code."""
    old, new = json.loads(before.read_text()), json.loads(after.read_text())
    failed = 0
    for name in old.keys() & new.keys():
        bound, a, b = RUNS[name][0], old[name], new[name]
        keys = ["val/loss 2400"] if name == "quickstart-whole" else a["losses"]  # where it ends
        distance = max(abs(a["losses"][key] - b["losses"][key]) for key in keys)
        equal = {part: a[part] == b[part] for part in ("weights", "optimizer")}
        good = distance <= bound and (bound > 0 or all(equal.values()))
        failed += not good
        verdict = "ok" if good else "DIFFERS"
        print(f"{name:18} {verdict}  loss {distance:.2e} (bound {bound})", equal)
    return 1 if failed else 0


class Stepper:
    """Process that computes a block of steps when it is asked to."""

    def __init__(self, checkout: Path, name: str, home: Path) -> None:
        options, block = TIMED[name]
        command = [sys.executable, "-c", BLOCKS, str(block), *(options + NO_EXTRAS).split()]
        self.process = subprocess.Popen(
            command,
            cwd=home,
            env=environment(checkout, home / "cache"),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.peak_mib = 0.0
        self.first_s = self.answer()

    def answer(self) -> float:
        """Wait for the end of a block, and return the seconds of one of its steps."""
        assert self.process.stderr is not None
        printed = []
        for line in self.process.stderr:
            printed.append(line)
            if line.startswith("BLOCK "):
                _, seconds, peak = line.split()
                self.peak_mib = int(peak) / 1024
                return float(seconds)
        raise SystemExit("".join(printed[-20:]))

    def block(self) -> float:
        """Compute a block, and return the seconds of one of its steps."""
        assert self.process.stdin is not None
        print(file=self.process.stdin, flush=True)
        return self.answer()


def import_s(checkout: Path) -> float:
    """Return the seconds in which `fit --print_config` starts and ends: the start-up."""
    options = ["fit", "--config=quickstart", "--print_config"]
    command = [sys.executable, "-m", "gpt_lightning", *options]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as home:
        env = environment(checkout, Path(home))
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL, cwd=home)
    return time.perf_counter() - began


def times(before: Path, after: Path, pairs: int, only: list[str]) -> None:
    """Print start-up, first step, memory, and the ratio of the steps over alternating pairs."""
    starts = [(import_s(before), import_s(after)) for _ in range(5)]
    ratio = statistics.median(new / old for old, new in starts)
    print(f"start-up: {[f'{a:.2f} {b:.2f}' for a, b in starts]} s, ratio {ratio:.3f}")
    for name in only or TIMED:
        with tempfile.TemporaryDirectory() as folder:
            homes = [Path(folder, side) for side in ("before", "after")]
            for home in homes:
                home.mkdir()
            steppers = [Stepper(c, name, h) for c, h in zip((before, after), homes, strict=True)]
            for stepper in steppers:  # warm-up
                stepper.block()
            turns = [(steppers[0].block(), steppers[1].block()) for _ in range(pairs)]
            for stepper in steppers:
                stepper.process.kill()
        ratios = sorted(new / old for old, new in turns)
        old_ms, new_ms = (1e3 * statistics.median(turn[side] for turn in turns) for side in (0, 1))
        print(
            f"{name}: step {old_ms:.2f} -> {new_ms:.2f} ms, ratio {statistics.median(ratios):.3f} "
            f"({ratios[0]:.3f} to {ratios[-1]:.3f} in {pairs} pairs); to the end of the first step "
            f"{steppers[0].first_s:.1f} -> {steppers[1].first_s:.1f} s; "
            f"peak {steppers[0].peak_mib:.0f} -> {steppers[1].peak_mib:.0f} MiB",
            flush=True,
        )


def main() -> int:
    """Parse the arguments and run one of the three commands."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command, names in (
        ("record", ("checkout", "out")),
        ("compare", ("before", "after")),
        ("times", ("before", "after")),
    ):
        sub = commands.add_parser(command)
        for name in names:
            sub.add_argument(name, type=Path)
        sub.add_argument("--only", nargs="+", default=[])
        sub.add_argument("--pairs", type=int, default=12)
    args = parser.parse_args()
    if args.command == "record":
        record(args.checkout, args.out, args.only)
    elif args.command == "compare":
        return compare(args.before, args.after)
    else:
        times(args.before, args.after, args.pairs, args.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
