"""The command as a real process in a folder of its own: started, watched, hurt, and its end judged.

Nothing here waits for a clock where it can wait for an event: a process is known to be at a step
when it has printed that step's line.
"""

import contextlib
import json
import os
import re
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

DRIVER = Path(__file__).with_name("driver.py")
STEP_LINE = re.compile(r"step +(\d+)/")
RESUME = ("--resume", "auto")
TRACE = {"trace": "trace.jsonl"}  # accident of driver.py, in the folder of the run
LIMIT_S = 300  # a process that hangs; many times what a run takes, also on a busy machine


class SilentWrong(AssertionError):
    """A process ended with 0 although its result is wrong or missing: what must never be."""


# ---- a process -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ended:
    """End of a process: its exit code (-9: SIGKILL), its output, and its seconds."""

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
        """Return the one line that names each of `words`; regular expressions."""
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
        """Kill all processes of the command."""
        for pid in self.descendants():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def wait_for(self, step: int) -> int:
        """Read the output until a step is done; return the step that the line names."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._out.append(line)
            match = STEP_LINE.match(line)
            if match and int(match[1]) >= step:
                return int(match[1])
        self._reader.join(5)
        raise AssertionError(f"ended before step {step}: {''.join(self._err)[-2000:]}")

    def end(self, limit_s: float = LIMIT_S) -> Ended:
        """Wait for the end of the process, and then of its workers and ranks."""
        assert self.process.stdout is not None
        hung = threading.Event()

        def end_it() -> None:
            hung.set()
            self.kill()

        watchdog = threading.Timer(limit_s, end_it)
        watchdog.start()
        try:
            self._out.extend(self.process.stdout)
            self.process.wait()
            seconds = time.monotonic() - self._began
            # a worker whose parent was killed looks for it every five seconds
            patience = time.monotonic() + 20
            while (alive := self.descendants()) and time.monotonic() < patience:
                time.sleep(0.05)
            assert not alive, f"processes left behind: {alive}"
            self._reader.join(5)
            said = f"{''.join(self._out[-5:])}{''.join(self._err)[-2000:]}"
            assert not hung.is_set(), f"still there after {limit_s} s; it printed {said}"
        finally:
            watchdog.cancel()
            self.kill()
        return Ended(self.process.returncode, "".join(self._out), "".join(self._err), seconds)

    def descendants(self) -> list[int]:
        """Return the living processes of the command; defunct ones have no environment."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if f"FAULTS_MARK={self.mark}".encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue  # it has just ended, or is another user's
        return found

    def rank(self, number: int) -> int:
        """Return the process of a rank."""
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
    """Start `gpt-lightning ARGS`.

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
    """Run `gpt-lightning ARGS` to its end."""
    with start(folder, *args, **kwargs) as process:
        return process.end()


def fit(folder: Path, *args: str, **kwargs: Any) -> Ended:
    return gpt(folder, "fit", "--config", "run.yaml", *args, **kwargs)


def start_fit(folder: Path, *args: str, **kwargs: Any) -> Running:
    return start(folder, "fit", "--config", "run.yaml", *args, **kwargs)


def refusals(folder: Path, commands: list[list[str]], names: list[str], **kwargs: Any) -> list[int]:
    """Run many commands in one process; return their exit codes. Each line must name its file."""
    ended = gpt(folder, faults={"many": commands}, **kwargs).ok()
    assert "Traceback" not in ended.err, ended.err[-2000:]
    said = re.split(r"^exit (-?\d+)\n", ended.err, flags=re.MULTILINE)
    texts = said[0:-1:2]
    codes = [int(code) for code in said[1::2]]
    assert len(codes) == len(commands), ended.err[-2000:]
    for text, code, name in zip(texts, codes, names, strict=True):
        assert code == 0 or name in text.strip().splitlines()[-1], f"{name} is not in: {text}"
    return codes
