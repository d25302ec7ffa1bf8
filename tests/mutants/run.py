"""`make mutants`: mutants of the core, each against the tests that run its line.

A mutant is one edit of one line (edits.py), at a place drawn with a seed from all places of the
core. It is killed if one of the tests that run its line (lines.py) fails, and the tests up to that
one pass without the mutant; or if they take more than three times as long as without it. All other
mutants are survivors, equivalent ones too.

A server imports torch, Lightning and pytest once and forks for each mutant; a child imports the
package from a copy of the repository in which that one line has changed.

    python tests/mutants/run.py --count 20 --only training.steps
"""

import argparse
import collections
import contextlib
import hashlib
import importlib
import itertools
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from edits import Edit, Sites
from lines import Lines, watch

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WATCHED = ROOT / "lightning_logs" / "mutants" / "watched"
SEED = 37
CORE = ("model", "training", "runs", "data", "remote", "hardware", "reproduce")
NOT_CORE = {"reproduce.command"}  # options and the console
# files that calculate; the others of bench and tables start processes, and draw
CALCULATE = {
    *("bench.memory_meter", "bench.profile", "bench.step", "bench.timing"),
    *("tables.ledger", "tables.rows"),
}
# imported by the server, none of them the package
ONCE = (
    *("pytest", "lightning.pytorch.cli", "lightning.pytorch.loggers", "torchmetrics", "tqdm"),
    *("torch.utils.tensorboard", "tensorboard.backend.event_processing.event_accumulator"),
    *("jsonargparse", "docstring_parser", "tiktoken", "fsspec", "filelock", "platformdirs"),
    *("matplotlib.pyplot", "transformers", "pyarrow.parquet"),
)
ENOUGH_BYTES = 12 * 2**30  # memory of a mutant, so that none takes the machine's
MARK = "GPT_LIGHTNING_MUTANT"
ENOUGH_S = 150.0  # time of the tests of a mutant, the fastest first


@dataclass(frozen=True)
class Mutant:
    """An edit of a module.

    Attributes:
        number: Place in the order of the draw, from 1.
        module: Dotted name without the package's.
        path: File, relative to the repository.
        line: Line number.
        before: Line without the edit.
        after: Line with the edit.
        edit: The edit.
    """

    number: int
    module: str
    path: Path
    line: int
    before: str
    after: str
    edit: Edit


@dataclass(frozen=True)
class Result:
    """End of a mutant: killed, timeout or survived, and the seconds until then."""

    mutant: Mutant
    end: str
    seconds: float


@dataclass(frozen=True)
class Job:
    """A mutant, its tests by their names in pytest, and the most seconds that they may take.

    `failed` is the test that has failed: the tests up to it then run without the mutant.
    """

    mutant: Mutant
    tests: tuple[str, ...]
    limit_s: float
    failed: str = ""

    def to_run(self) -> tuple[str, ...]:
        return self.tests[: self.tests.index(self.failed) + 1] if self.failed else self.tests


# ---- mutants -------------------------------------------------------------------------------------


def is_core(module: str) -> bool:
    """Return whether mutants are made of a module (its name without the package's)."""
    room = module.partition(".")[0]
    return module not in NOT_CORE and (room in CORE or module in CALCULATE)


def draw(root: Path, count: int, seed: int, only: str) -> list[Mutant]:
    """Return mutants at places drawn without replacement, each place as likely as any other.

    A place is drawn by a hash of the seed, its module and its line. So an edit of other lines
    leaves it in the sample, and a later run can be compared with an earlier one.
    """
    places: list[tuple[bytes, str, Path, Edit]] = []
    package = root / "gpt_lightning"
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not is_core(module) or not (not only or f"{module}.".startswith(f"{only}.")):
            continue
        source = path.read_text(encoding="utf-8")
        seen: collections.Counter[str] = collections.Counter()
        for edits in Sites(source).found:
            words = f"{seed} {module} {edits[0].operator} {line_at(source, edits[0])}"
            seen[words] += 1
            digest = hashlib.sha256(f"{words} {seen[words]}".encode()).digest()
            places.append((digest, module, path, edits[digest[-1] % len(edits)]))
    print(f"{len(places):,} places in the core{f' ({only})' if only else ''}, seed {seed}")
    mutants: list[Mutant] = []
    for _, module, path, edit in sorted(places, key=lambda place: place[0]):
        source = path.read_text(encoding="utf-8")
        mutated = edit.applied(source)
        if len(mutants) < count and _compiles(mutated):
            line = source.count("\n", 0, edit.start) + 1
            before, after = (line_at(text, edit) for text in (source, mutated))
            place = path.relative_to(root), line
            mutants.append(Mutant(len(mutants) + 1, module, *place, before, after, edit))
    return mutants


def line_at(source: str, edit: Edit) -> str:
    """Return the line of an edit without the space around it."""
    return source.splitlines()[source.count("\n", 0, edit.start)].strip()


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


# ---- children ------------------------------------------------------------------------------------


class Slot:
    """A copy of the repository, in which one child at a time runs tests.

    Args:
        folder: Empty folder of the slot.
        root: Folder of the repository.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self.repository = folder / "repository"
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=root, capture_output=True, text=True, check=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            if (root / name).is_file():
                (self.repository / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.repository / name)
        if (shared := root.parent / "shared").is_dir():
            (folder / "shared").symlink_to(shared)
        import compileall

        # valid by the source's hash: a mutant of the same length and second is not mistaken for it
        for code in ("gpt_lightning", "tests"):
            compileall.compile_dir(
                self.repository / code, quiet=1,
                invalidation_mode=PycInvalidationMode.CHECKED_HASH,
            )  # fmt: skip
        self.log, self.failed = folder / "log.txt", folder / "failed.txt"
        self.pid, self.mark, self.began, self.source = 0, "", 0.0, ""

    def fork(self, job: Job) -> None:
        """Start a child that runs the tests of a job."""
        self.failed.write_text("")
        path = self.repository / job.mutant.path
        self.source = path.read_text(encoding="utf-8")
        if not job.failed:
            path.write_text(job.mutant.edit.applied(self.source), encoding="utf-8")
        self.mark, self.began = uuid.uuid4().hex, time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            code = self._child(job)
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _child(self, job: Job) -> int:
        import pytest

        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background both are
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored, and tests send them
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        os.chdir(self.repository)
        resource.setrlimit(resource.RLIMIT_DATA, (ENOUGH_BYTES, resource.RLIM_INFINITY))
        sys.path[:] = [str(self.repository), *(p for p in sys.path if Path(p) != HERE)]
        sys.modules["__main__"] = types.ModuleType("__main__")  # processes of tests import it
        sys.argv = ["pytest"]
        sys.dont_write_bytecode = True
        os.environ |= {
            MARK: self.mark,
            "PYTHONPATH": str(self.repository),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        options = ["-xq", "-pno:cacheprovider", "-pno:xdist", "--assert=plain", "-m="]
        options.append(f"--basetemp={self.repository.parent / 'tests'}")
        return int(pytest.main([*options, *job.to_run()], plugins=[self]))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the name of the test that has failed; pytest calls this in the child."""
        if report.failed:
            self.failed.write_text(report.nodeid)

    def end(self, job: Job) -> str:
        """Return how the child ended: survived, killed, timeout; "" while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() - self.began > job.limit_s
        if not pid and not late:
            return ""
        self._kill()
        if not pid:
            os.waitpid(self.pid, 0)
        (self.repository / job.mutant.path).write_text(self.source, encoding="utf-8")
        self.pid = 0
        if not pid:
            return "timeout"
        return "killed" if os.waitstatus_to_exitcode(status) else "survived"

    def _kill(self) -> None:
        """Kill the child and the processes that its tests have left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)


def ended(slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[Result]:
    """Run mutants, one in each slot at a time, and yield how each ended."""
    waiting = list(jobs)[::-1]
    running: dict[Slot, Job] = {}
    while waiting or running:
        for slot in slots:
            if slot not in running and waiting:
                running[slot] = waiting.pop()
                slot.fork(running[slot])
            if slot not in running or not (end := slot.end(running[slot])):
                continue
            job = running.pop(slot)
            failed = slot.failed.read_text() if end == "killed" else ""
            if failed and not job.failed:
                waiting.append(replace(job, failed=failed))
            elif failed:
                print(f"{failed} fails without a mutant: not used")
                tests = tuple(test for test in job.tests if test != failed)
                waiting.append(replace(job, tests=tests, failed=""))
            else:
                end = "killed" if job.failed else end
                yield Result(job.mutant, end, time.monotonic() - slot.began)
        time.sleep(0.02)


# ---- the run -------------------------------------------------------------------------------------


def ordered(mutant: Mutant, tests: set[str], seconds: dict[str, float]) -> tuple[str, ...]:
    """Return tests, those of the namesake first, then the fastest, each file's together."""
    namesake = f"/test_{mutant.path.name}::"
    chosen: dict[str, list[str]] = collections.defaultdict(list)
    left_s = ENOUGH_S
    for test in sorted(tests, key=lambda test: (namesake not in test, seconds[test], test)):
        left_s -= seconds[test]
        if left_s > 0:
            chosen[test.partition("::")[0]].append(test)
    return tuple(itertools.chain.from_iterable(chosen.values()))


def results(mutants: Sequence[Mutant], folder: Path, watched: Path, jobs: int) -> Iterator[Result]:
    """Run the mutants and yield the result of each.

    Args:
        mutants: Mutants.
        folder: Empty folder for the copies of the repository.
        watched: Folder of what `watch` has written, or will write.
        jobs: Mutants at a time.
    """
    slots = [Slot(folder / f"slot{number}", ROOT) for number in range(jobs)]
    if not (watched / "seconds.json").is_file():
        watch(ROOT, watched, jobs)
    lines = Lines(ROOT, watched)
    print(f"{len(lines.seconds):,} tests pass without a mutant", flush=True)
    work: list[Job] = []
    for mutant in mutants:
        tests = ordered(mutant, lines.of(mutant.path, mutant.line), lines.seconds)
        if tests:
            work.append(Job(mutant, tests, 3 * sum(lines.seconds[test] for test in tests) + 15))
        else:
            yield Result(mutant, "survived", 0.0)
    yield from ended(slots, work)


def page(found: Sequence[Result], seed: int, minutes: float) -> str:
    """Return the results as Markdown."""
    import torch

    survivors = [result for result in found if result.end == "survived"]
    timeouts = sum(result.end == "timeout" for result in found)
    killed = len(found) - len(survivors)
    lines = [
        f"**{killed} of {len(found)} mutants killed ({killed / len(found):.1%})**, {timeouts} of "
        f"them by the time limit; seed {seed}.",
        "",
        f"{minutes:.0f} minutes, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"commit {_commit()}",
        "",
        "| survivor | operator | before | after |",
        "| --- | --- | --- | --- |",
    ]
    for result in sorted(survivors, key=lambda r: (str(r.mutant.path), r.mutant.line)):
        mutant = result.mutant
        before, after = (f"`{text.replace('|', chr(92) + '|')}`"
                         for text in (mutant.before, mutant.after))  # fmt: skip
        place = f"{mutant.path.relative_to('gpt_lightning')}:{mutant.line}"
        lines.append(f"| {place} | {mutant.edit.operator} | {before} | {after} |")
    return "\n".join(lines) + "\n"


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True)
    return done.stdout.decode().strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=300, help="mutants (300)")
    parser.add_argument("--seed", type=int, default=SEED, help=f"seed of the draw ({SEED})")
    parser.add_argument("--only", default="", help="a module or room: training.steps")
    parser.add_argument("--numbers", default="", help="only these of the draw: 3,17")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time (2)")
    parser.add_argument("--watched", type=Path, default=WATCHED, help="which test runs which line")
    parser.add_argument("--page", type=Path, help="file for the results, in Markdown")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MPLBACKEND"] = "agg"
    began = time.monotonic()
    mutants = draw(ROOT, args.count, args.seed, args.only)
    if args.numbers:
        mutants = [mutants[int(number) - 1] for number in args.numbers.split(",")]
    for name in ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for result in results(mutants, Path(folder), args.watched, args.jobs):
            found.append(result)
            m = result.mutant
            print(
                f"{len(found):3d}/{len(mutants)} {result.end:8s} {result.seconds:6.1f} s  "
                f"#{m.number} {m.path}:{m.line}  {m.edit.operator}:  {m.before}  ->  {m.after}",
                flush=True,
            )
    text = page(found, args.seed, (time.monotonic() - began) / 60)
    print(text)
    if args.page:
        args.page.parent.mkdir(parents=True, exist_ok=True)
        args.page.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
