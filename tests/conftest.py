"""Fixtures of all tests, and the folder of the texts: no test fetches one."""

import functools
import gc
import os
import random
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docstring_parser
import pytest

SHARED_DATA = Path(__file__).resolve().parents[2] / "shared" / "data"

# Set here and not in a fixture, so that the processes that tests start inherit it. One thread: the
# models are tiny, and two threads on a busy machine wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Every `fit` reads the help texts from the source of some forty classes, three quarters of the time
# until its arguments are parsed. They are the same for all tests.
docstring_parser.parse_from_object = functools.cache(docstring_parser.parse_from_object)
# Collections look at the half a million objects of torch and Lightning again and again.
gc.set_threshold(100_000, 20, 100)
# A shell that starts the tests in the background lets them ignore Ctrl-C, which some of them send.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Files of tests are written durably, and a disk takes a tenth of the suite's time for that.
MEMORY = Path("/dev/shm")
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 4 * 2**30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
if SHARED_DATA.is_dir():
    os.environ.setdefault("GPT_LIGHTNING_DATA", str(SHARED_DATA))


@pytest.fixture(scope="session")
def parser() -> Any:
    from gpt_lightning.training.fit import training_parser

    return training_parser()


@pytest.fixture(scope="session", autouse=True)
def parsers() -> Iterator[None]:
    """The parser of each training command is built once: it is a quarter of a tiny run."""
    from lightning.pytorch.cli import LightningCLI  # xdist's own process has no need of it

    prepare = LightningCLI._prepare_subcommand_parser
    built: dict[Any, Any] = {}

    def prepare_once(self, klass, subcommand, **kwargs):
        if len(self.subcommands()) > 1:  # help of all commands changes their parsers
            return prepare(self, klass, subcommand, **kwargs)
        key = type(self), subcommand, *self.classes
        if key not in built:
            parser = prepare(self, klass, subcommand, **kwargs)
            built[key] = parser, self._subcommand_method_arguments[subcommand]
        parser, self._subcommand_method_arguments[subcommand] = built[key]
        return parser

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LightningCLI, "_prepare_subcommand_parser", prepare_once)
        yield


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Put back the variables that a test changes: Lightning's LOCAL_RANK would start no rank."""
    before = dict(os.environ)
    yield
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def tinyshakespeare() -> Path:
    """The file of tiny Shakespeare; the test is skipped if it is missing."""
    repository = Path(__file__).resolve().parents[1]
    for folder in (repository / "data", Path(os.environ.get("GPT_LIGHTNING_DATA", SHARED_DATA))):
        path = folder / "tinyshakespeare" / "input.txt"
        if path.is_file():
            return path
    pytest.skip("no tinyshakespeare/input.txt in data/ or in the folder of GPT_LIGHTNING_DATA")


@pytest.fixture(scope="session")
def words() -> str:
    """4,000 words of a small language that a tiny model can learn."""
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept"]
    return "".join(rng.choice(words) + rng.choice(" \n") for _ in range(4000))


@pytest.fixture
def text_file(tmp_path: Path, words: str) -> Path:
    """File with the words."""
    path = tmp_path / "text.txt"
    path.write_text(words)
    return path


@pytest.fixture
def own_folder(tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test in a folder of its own, with the text in it."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def limited_memory() -> Iterator[None]:
    """2 GiB of address space more than now, for this process and those that it starts."""
    if sys.platform != "linux":
        pytest.skip("the address space is limited on Linux only")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + 2 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)
