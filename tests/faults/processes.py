"""`fit` as a real process in a folder, and the comparison of what two runs have left."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from gpt_lightning.commands.check_resume import compare

STEPS = 30
# 16 windows of 16 tokens a step; 12 steps are an epoch
CONFIG = f"""
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  max_steps: {STEPS}
  accumulate_grad_batches: 2
  val_check_interval: 12  # micro-batches
  check_val_every_n_epoch: null
  log_every_n_steps: 1
  gradient_clip_val: 1.0
model:
  # dropout: lost random numbers would show nowhere else
  config: {{n_layer: 2, n_head: 2, n_embd: 32, block_size: 16, vocab_size: null, dropout: 0.2}}
  compile: false
  learning_rate: 3.0e-3
  warmup_steps: 5
  decay_steps: {STEPS}
data: {{text_file: text.txt, tokenizer: char, batch_size: 8}}
samples: {{max_new_tokens: 0}}
progress: {{plain_every_n_steps: 1}}
checkpoint: {{every_n_steps: 4}}
"""
RESUME = ("--resume", "auto")
MODULE = ("-m", "gpt_lightning")
LIMIT_S = 200  # many times what a run takes, also on a busy machine


def write_inputs(folder: Path) -> Path:
    """Write text.txt, of a small language, and run.yaml."""
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept", "rain", "fell"]
    text = "".join(rng.choice(words) + rng.choice(" \n") for _ in range(1000))
    folder.mkdir(parents=True)
    (folder / "text.txt").write_text(text[:3600])  # 3,240 tokens for training
    (folder / "run.yaml").write_text(CONFIG)
    return folder


class Process:
    """A command that has started; a context that leaves none of its processes behind."""

    def __init__(
        self,
        folder: Path,
        *args: str,
        entry: Sequence[str] = MODULE,
        wrap: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> None:
        self.mark = f"FAULTS_MARK={uuid.uuid4().hex}"  # by which its descendants are found
        name, _, value = self.mark.partition("=")
        self.output = ""
        self.process = subprocess.Popen(
            [*wrap, sys.executable, *entry, *args],
            cwd=folder,
            env=os.environ | {name: value} | (env or {}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.communicate()

    def kill(self) -> None:
        """Kill all processes of the command."""
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for(self, step: int) -> None:
        """Read the output until a step is done."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            match = re.match(r"step +(\d+)/", line)
            if match and int(match[1]) >= step:
                return
        raise AssertionError(f"ended before step {step}: {self.output[-2000:]}")

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end of the process; return its exit code (-9: SIGKILL)."""
        self.output += self.process.communicate(timeout=limit_s)[0]
        assert "Traceback" not in self.output, self.output[-3000:]
        return self.process.returncode

    def errors(self) -> list[str]:
        """Return the lines of errors; one may follow half a line of the other stream."""
        return re.findall(r"\berror: .*", self.output)

    def descendants(self) -> list[int]:
        """Return the living processes of the command; defunct ones have no environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                if self.mark.encode() in path.read_bytes():
                    found.append(int(path.parent.name))
        return found

    def rank(self, number: int) -> int:
        """Return the process of a rank."""
        for pid in self.descendants():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"LOCAL_RANK={number}".encode() in variables:
                return pid
        return self.process.pid

    def wait_for_descendants(self, limit_s: float) -> None:
        """Wait until no process of the command is left."""
        until = time.monotonic() + limit_s
        while self.descendants():
            assert time.monotonic() < until, f"processes left behind: {self.descendants()}"
            time.sleep(0.1)


def start_fit(folder: Path, *args: str, **kwargs) -> Process:
    return Process(folder, "fit", "--config", "run.yaml", *args, **kwargs)


def fit(folder: Path, *args: str, code: int = 0, **kwargs) -> str:
    """Train to the end; return the output."""
    with start_fit(folder, *args, **kwargs) as process:
        assert process.end() == code, process.output[-3000:]
    return process.output


def run_of(folder: Path) -> Path:
    """Return the newest run: one that was killed before its first save begins anew in the next."""
    runs = (folder / "lightning_logs" / "run").glob("version_*")
    return max(runs, key=lambda path: int(path.name.removeprefix("version_")))


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of the newest run, the newest first."""
    return sorted((run_of(folder) / "checkpoints").glob("step-*.ckpt"), reverse=True)


def step_of(path: Path) -> int:
    match = re.match(r"step-(\d+)", path.name)
    assert match is not None, path
    return int(match[1])


def leftovers(folder: Path) -> list[str]:
    """Return temporary files and locks that a run has left below a folder."""
    return [p.name for p in folder.rglob("*") if re.search(r"\.tmp|\.lock|\.probe|\.spool", p.name)]


def must_equal(one: Path, other: Path) -> None:
    """Compare weights, optimizer, position and rows of two finished runs, byte for byte."""
    found = compare(run_of(one), run_of(other))
    assert all(found.values()), found
    assert leftovers(other) == []
