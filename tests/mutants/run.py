"""`make mutants`: mutants of the core, each against the test files that name its module.

A mutant is one edit of one line (edits.py), at a place drawn with a seed from all places of the
core. It is killed if one of the test files of its module (naming.py) fails, first their tests of
the default suite, then the slow ones, or if they take more than three times as long as without a
mutant. All other mutants are survivors, equivalent ones too.

A server imports torch, Lightning and pytest once and forks for each mutant; a child imports the
package from a copy of the repository in which that one line has changed.

    python tests/mutants/run.py --count 20 --only training.steps
"""

import argparse
import collections
import contextlib
import hashlib
import importlib
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
from dataclasses import dataclass
from pathlib import Path
from py_compile import PycInvalidationMode

from edits import Edit, Sites
from naming import Names

ROOT = Path(__file__).resolve().parents[2]
SEED = 13
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
ENOUGH_BYTES = 12 * 2**30  # of memory for a mutant, so that none takes the machine's
MARK = "GPT_LIGHTNING_MUTANT"
NO_TESTS = 5  # pytest's exit status when nothing was selected


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


# ---- mutants -------------------------------------------------------------------------------------


def is_core(module: str) -> bool:
    """Return whether mutants are made of a module (its name without the package's)."""
    room = module.partition(".")[0]
    if module in NOT_CORE:
        return False
    return room in CORE or module in CALCULATE


def draw(names: Names, count: int, seed: int, only: str) -> list[Mutant]:
    """Return mutants at places drawn without replacement, each place as likely as any other.

    A place is drawn by a hash of the seed, its module and its line. So an edit of other lines
    leaves it in the sample, and a later run can be compared with an earlier one.
    """
    places: list[tuple[bytes, str, Path, Edit]] = []
    for dotted, path in names.modules.items():
        module = dotted.partition(".")[2]
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
            place = path.relative_to(names.root), line
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
        compileall.compile_dir(
            self.repository / "gpt_lightning", quiet=1,
            invalidation_mode=PycInvalidationMode.CHECKED_HASH,
        )  # fmt: skip
        self.log = folder / "log.txt"
        self.pid, self.mark, self.began, self.source = 0, "", 0.0, ""

    def fork(self, tests: Sequence[Path], mutant: Mutant | None) -> None:
        """Start a child that runs test files, relative to the repository."""
        if mutant is not None:
            path = self.repository / mutant.path
            self.source = path.read_text(encoding="utf-8")
            path.write_text(mutant.edit.applied(self.source), encoding="utf-8")
        self.mark, self.began = uuid.uuid4().hex, time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            code = self._child(tests, mutant is not None)
        finally:
            sys.stdout.flush()
            os._exit(code)

    def _child(self, tests: Sequence[Path], mutated: bool) -> int:
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
        sys.dont_write_bytecode = mutated  # without a mutant, the rewritten tests are cached
        os.environ |= {
            MARK: self.mark,
            "PYTHONPATH": str(self.repository),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        temporary = self.repository.parent / "tests"
        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header"]
        options.append(f"--basetemp={temporary}")
        codes = []
        for marker in ([], ["-m", "slow"]):
            codes.append(int(pytest.main([*options, *marker, *map(str, tests)])))
            if codes[-1] not in (0, NO_TESTS):
                return codes[-1]
        return min(codes)  # 0 unless both found no test

    def end(self, limit_s: float, mutant: Mutant | None) -> str:
        """Return how the child ended: passed, failed, timeout, no tests; "" while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        late = time.monotonic() - self.began > limit_s
        if not pid and not late:
            return ""
        self._kill()
        if not pid:
            os.waitpid(self.pid, 0)
        if mutant is not None:
            (self.repository / mutant.path).write_text(self.source, encoding="utf-8")
        self.pid = 0
        code = os.waitstatus_to_exitcode(status)
        ends = {0: "passed", NO_TESTS: "no tests"}
        return "timeout" if not pid else ends.get(code, "failed")

    def _kill(self) -> None:
        """Kill the child and the processes that its tests have left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{MARK}={self.mark}".encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)


HERE = Path(__file__).resolve().parent
Job = tuple[Sequence[Path], Mutant | None, float]  # test files, mutant, limit in seconds


def ended(slots: Sequence[Slot], jobs: Sequence[Job]) -> Iterator[tuple[int, str, float, str]]:
    """Run jobs, one in each slot at a time; yield number, end, seconds and output of each."""
    waiting = list(enumerate(jobs))[::-1]
    running: dict[int, tuple[int, Job]] = {}
    while waiting or running:
        for place, slot in enumerate(slots):
            while waiting and not waiting[-1][1][0]:  # no test: nothing can fail
                number, _ = waiting.pop()
                yield number, "passed", 0.0, ""
            if place not in running and waiting:
                number, job = waiting.pop()
                running[place] = (number, job)
                slot.fork(job[0], job[1])
            if place in running:
                number, (_, mutant, limit_s) = running[place]
                seconds = time.monotonic() - slot.began
                if end := slot.end(limit_s, mutant):
                    del running[place]
                    yield number, end, seconds, slot.log.read_text(errors="replace")
        time.sleep(0.02)


# ---- the run -------------------------------------------------------------------------------------


def baseline(slots: Sequence[Slot], tests: Sequence[Path]) -> dict[Path, float]:
    """Return the seconds of each test file without a mutant; files that fail are left out.

    A file that fails is run once more: a busy machine may have been the reason.
    """
    seconds: dict[Path, float] = {}
    for attempt in (1, 2):
        failed = []
        for number, end, took, output in ended(slots, [([path], None, 900.0) for path in tests]):
            if end == "passed":
                seconds[tests[number]] = took
            elif end != "no tests":  # its marker is not selected, or it is skipped
                failed.append(tests[number])
                if attempt == 2:
                    print(f"{tests[number]}: {end} without a mutant, not used\n{output[-2000:]}")
        tests = failed
    return seconds


def ordered(mutant: Mutant, tests: Sequence[Path], seconds: dict[Path, float]) -> list[Path]:
    """Return test files, the namesake first, then the fastest first."""
    namesake = f"test_{mutant.path.name}"
    used = [path for path in tests if path in seconds]
    return sorted(used, key=lambda path: (path.name != namesake, seconds[path]))


def results(mutants: Sequence[Mutant], names: Names, folder: Path, jobs: int) -> Iterator[Result]:
    """Run the mutants and yield the result of each.

    Args:
        mutants: Mutants.
        names: Test files of each module.
        folder: Empty folder for the copies of the repository.
        jobs: Mutants at a time.
    """
    slots = [Slot(folder / f"slot{number}", names.root) for number in range(jobs)]
    of = {
        m.module: [p.relative_to(names.root) for p in names.of(f"gpt_lightning.{m.module}")]
        for m in mutants
    }
    files = sorted({path for paths in of.values() for path in paths})
    began = time.monotonic()
    seconds = baseline(slots, files)
    print(f"{len(seconds)} test files pass without a mutant, {time.monotonic() - began:.0f} s")
    work: list[Job] = []
    for mutant in mutants:
        tests = ordered(mutant, of[mutant.module], seconds)
        work.append((tests, mutant, 3 * sum(seconds[path] for path in tests) + 15))
    kinds = {"passed": "survived", "failed": "killed", "timeout": "timeout"}
    for number, end, took, output in ended(slots, work):
        if end == "no tests":
            raise RuntimeError(f"{work[number][0]} have no tests:\n{output}")
        yield Result(mutants[number], kinds[end], took)


def page(found: Sequence[Result], seed: int, minutes: float) -> str:
    """Return the results as Markdown."""
    import torch

    survivors = [result for result in found if result.end == "survived"]
    timeouts = sum(result.end == "timeout" for result in found)
    killed = len(found) - len(survivors)
    modules: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for result in found:
        modules[result.mutant.module]["survived" if result in survivors else "killed"] += 1
    lines = [
        f"**{killed} of {len(found)} mutants killed ({killed / len(found):.1%})**, {timeouts} of "
        f"them by the time limit; seed {seed}.",
        "",
        f"{minutes:.0f} minutes, {os.cpu_count()} cores, {platform.system()} "
        f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"commit {_commit()}",
        "",
        "| module | mutants | killed |",
        "| --- | ---: | ---: |",
        *(
            f"| {module} | {ends.total()} | {ends['killed']} |"
            for module, ends in sorted(modules.items())
        ),
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
    parser.add_argument("--page", type=Path, help="file for the results, in Markdown")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["MPLBACKEND"] = "agg"
    began = time.monotonic()
    names = Names(ROOT)
    mutants = draw(names, args.count, args.seed, args.only)
    if args.numbers:
        mutants = [mutants[int(number) - 1] for number in args.numbers.split(",")]
    for name in ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    found: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for result in results(mutants, names, Path(folder), args.jobs):
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
