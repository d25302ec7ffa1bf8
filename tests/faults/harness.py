"""The command as a real process in a folder of its own: started, watched, hurt, and its end judged.

Nothing here waits for a clock where it can wait for an event: a process is known to be at a step
when it has printed that step's line.
"""

import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DRIVER = Path(__file__).with_name("driver.py")
STEP_LINE = re.compile(r"step +(\d+)/")
STEPS = 30
EPOCH_STEPS = 12  # 200 windows of 16 tokens, 16 of them a step
VALIDATE, SAVE = 6, 4  # optimizer steps from one to the next
LIMIT_S = 60

CONFIG: dict[str, Any] = {
    "seed_everything": 7,
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": STEPS,
        "accumulate_grad_batches": 2,
        "val_check_interval": 2 * VALIDATE,  # micro-batches
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
    },
    "model": {
        # dropout, or lost random numbers would show nowhere
        "config": {
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            "block_size": 16,
            "vocab_size": None,
            "dropout": 0.2,
        },
        "learning_rate": 3.0e-3,
        "warmup_steps": 5,
        "decay_steps": STEPS,
    },
    "data": {"text_file": "text.txt", "tokenizer": "char", "batch_size": 8},
    "samples": {"max_new_tokens": 0},
    "speed": {"warmup_steps": 1},
    "progress": {"plain_every_n_steps": 1},
    "checkpoint": {"every_n_steps": SAVE},
}


class SilentWrong(AssertionError):
    """A process ended with 0 although its result is wrong or missing: what must never be."""


# ---- a folder ------------------------------------------------------------------------------------


def write_inputs(folder: Path) -> Path:
    """text.txt, of a small language that a tiny model can learn, and run.yaml."""
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept", "rain", "fell"]
    text = "".join(rng.choice(words) + rng.choice(" \n") for _ in range(1000))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text[:3600])  # 3,240 tokens for training
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


def run_folder(folder: Path, name: str = "run") -> Path:
    """The newest run: one that was killed before its first save is begun anew in the next."""
    runs = folder / "lightning_logs" / name
    versions = [int(path.name.removeprefix("version_")) for path in runs.glob("version_*")]
    return runs / f"version_{max(versions, default=0)}"


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file below a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def leftovers(folder: Path) -> list[str]:
    """Temporaries and locks that a run has left below a folder."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(n for n in names if re.search(r"\.tmp|\.lock|\.probe|\.spool", n))


def rewind(run: Path, step: int) -> None:
    """Removes the checkpoints past a step, as if the run had been killed right after its save."""
    for path in (run / "checkpoints").iterdir():
        match = re.match(r"step-(\d+)", path.name)
        if match and int(match[1]) > step:
            path.unlink()


def copied(source: Path, folder: Path, step: int | None = None) -> Path:
    """A copy of a folder with its run, as if killed right after the save at a step."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if step is not None:
        rewind(run_folder(folder), step)
    return folder


# ---- a process -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (-9: SIGKILL), what it printed, how long it took."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def last_line(self) -> str:
        lines = self.err.strip().splitlines()
        return lines[-1] if lines else ""

    def ok(self) -> "Ended":
        assert self.code == 0, f"exit {self.code}: {self.err[-2000:]}"
        return self

    def refused(self, *words: str, code: int = 2) -> str:
        """The one line that names each of `words`; regular expressions."""
        if self.code == 0:
            raise SilentWrong(f"exit 0, expected a refusal naming {words}: {self.out[-1000:]}")
        assert "Traceback" not in self.err, self.err[-3000:]
        assert self.code == code, f"exit {self.code}, expected {code}: {self.err[-1000:]}"
        assert self.last_line.startswith("error: "), self.err[-1000:]
        for word in words:
            assert re.search(word, self.last_line), f"no {word!r} in: {self.last_line}"
        return self.last_line


class Running:
    """A process that has started; a context that leaves none of its processes behind."""

    def __init__(self, command: Sequence[str], folder: Path, env: dict[str, str]) -> None:
        self.mark = uuid.uuid4().hex  # by which its descendants are found
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "FAULTS_MARK": self.mark} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._out: list[str] = []
        self._err: list[str] = []
        # read at once, so that no pipe is ever full; no file, which a full disk would not take
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._err.extend(self.process.stderr)

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.process.wait()

    def kill(self) -> None:
        """Ends all its processes; one that hangs is known by its exit code -9."""
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for(self, step: int) -> int:
        """Reads what it prints until it has done a step; the step that it told of."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._out.append(line)
            match = STEP_LINE.match(line)
            if match and int(match[1]) >= step:
                return int(match[1])
        self._reader.join(5)
        raise AssertionError(f"ended before step {step}: {''.join(self._err)[-2000:]}")

    def end(self, limit_s: float = LIMIT_S) -> Ended:
        """Waits for its end, and then for that of its workers and ranks."""
        assert self.process.stdout is not None
        watchdog = threading.Timer(limit_s, self.kill)
        watchdog.start()
        try:
            self._out.extend(self.process.stdout)
            self.process.wait()
            seconds = time.monotonic() - self._began
            # a worker whose parent was killed looks for it every five seconds
            patience = time.monotonic() + 10
            while (alive := self.descendants()) and time.monotonic() < patience:
                time.sleep(0.05)
            assert not alive, f"processes left behind: {alive}"
            self._reader.join(5)
        finally:
            watchdog.cancel()
            self.kill()
        return Ended(self.process.returncode, "".join(self._out), "".join(self._err), seconds)

    def descendants(self) -> list[int]:
        """Its living processes, itself included; defunct ones have no environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"FAULTS_MARK={self.mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue  # it has just ended, or is another user's
        return found

    def rank(self, number: int) -> int:
        """The process of a rank."""
        for pid in self.descendants():
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"LOCAL_RANK={number}".encode() in environ:
                return pid
        return self.process.pid


def start(
    folder: Path,
    *args: str,
    faults: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    wrap: Sequence[str] = (),
) -> Running:
    """Starts `gpt-lightning ARGS`.

    Args:
        folder: It runs in.
        args: Of the command.
        faults: Accidents of driver.py; none: the command as it is.
        env: Besides the environment of the tests.
        wrap: A command before the command.
    """
    entry = ["-m", "gpt_lightning"] if faults is None else [str(DRIVER)]
    variables = {} if faults is None else {"FAULTS": json.dumps(faults)}
    return Running([*wrap, sys.executable, *entry, *args], folder, {**variables, **(env or {})})


def gpt(folder: Path, *args: str, **kwargs: Any) -> Ended:
    """Runs `gpt-lightning ARGS` to its end."""
    with start(folder, *args, **kwargs) as process:
        return process.end()


def fit(folder: Path, *args: str, **kwargs: Any) -> Ended:
    return gpt(folder, "fit", "--config", "run.yaml", *args, **kwargs)


def start_fit(folder: Path, *args: str, **kwargs: Any) -> Running:
    return start(folder, "fit", "--config", "run.yaml", *args, **kwargs)
