"""The same injections against stock Lightning: a column of the table, not a judgement of ours."""

import os
import random
import re
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
from folders import STEPS, write_inputs
from harness import LIMIT_S, Ended, Running
from test_checkpoint_files import without_privilege
from test_damaged_data import Eval

pytestmark = pytest.mark.faults
STOCK = Path(__file__).with_name("stock.py")
TERM = pytest.param("term", marks=pytest.mark.case("R03"))
STOP = pytest.param("stop", marks=pytest.mark.case("R34"))
MOMENT = pytest.param("moment", "30", marks=pytest.mark.case("R39"))
NAN = pytest.param("nan", "5", marks=pytest.mark.case("R15"))


def start_stock(folder: Path, *args: str, wrap: list[str] | None = None) -> Running:
    command = [*(wrap or []), sys.executable, str(STOCK), str(folder), str(STEPS), *args]
    return Running(command, folder, {})


def stock(folder: Path, *args: str, wrap: list[str] | None = None) -> Ended:
    with start_stock(folder, *args, wrap=wrap) as process:
        return process.end(LIMIT_S)


def weights(ended: Ended) -> str:
    found = re.search(r"weights (\w+)", ended.out)
    return found[1] if found else ""


def verdict(ended: Ended, expected: str) -> str:
    if ended.code:
        return f"exit {ended.code}, {'a traceback' if 'Traceback' in ended.err else 'a line'}"
    return "exact" if weights(ended) == expected else "exit 0, other weights"


@pytest.fixture(scope="module")
def unhurt(tmp_path_factory: pytest.TempPathFactory) -> str:
    return weights(stock(write_inputs(tmp_path_factory.mktemp("stock"))))


@pytest.fixture
def at_ten(folder: Path) -> Path:
    """A stock run that was killed after step 10; its last.ckpt is of step 8."""
    with start_stock(folder) as process:
        process.wait_for(10)
        os.kill(process.process.pid, 9)
        process.end()
    return folder


@pytest.mark.case("R01")
def test_killed(at_ten, unhurt, case):
    case.stock.append(verdict(stock(at_ten, "resume"), unhurt))


@pytest.mark.parametrize("fault", [TERM, STOP])
def test_stopped_within_a_step(folder, unhurt, case, fault):
    ended = stock(folder, fault, "11")
    again = verdict(stock(folder, "resume"), unhurt)
    case.stock.append(f"exit {ended.code}; resumed: {again}")


@pytest.mark.case("R37")
def test_lost_output_and_a_hangup(folder, case):
    with start_stock(folder) as process:
        process.wait_for(5)
        process.process.stdout.close()
        process.process.wait(LIMIT_S)
        code = process.process.returncode
    hangup = stock(folder, "hup", "11", wrap=["env", "--default-signal=HUP"])
    saved = max(int(step) for step in re.findall(r"step (\d+)/", hangup.out))
    case.stock.append(f"reader gone: exit {code}; SIGHUP: exit {hangup.code} in step {saved + 1}")


@pytest.mark.parametrize(("fault", "step"), [MOMENT, NAN])
def test_a_number_that_is_none(folder, case, fault, step):
    ended = stock(folder, fault, step)
    finite = re.search(r"finite (\w+)", ended.out)
    case.stock.append(f"exit {ended.code}, weights finite: {finite[1] if finite else '-'}")


@pytest.mark.case("R06")
def test_full_disk(folder, case):
    with start_stock(folder) as process:
        process.wait_for(9)
        hard = resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE)[1]
        resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (100_000, hard))
        ended = process.end()
    again = stock(folder, "resume")
    lost = "the checkpoint before it is lost" if again.code else "the one before it loads"
    case.stock.append(f"exit {ended.code}; {lost}")


@pytest.mark.case("R07")
def test_read_only(folder, case):
    place = folder / "runs"
    place.mkdir()
    (place / "text.txt").write_bytes((folder / "text.txt").read_bytes())
    place.chmod(0o555)
    ended = stock(place, wrap=without_privilege())
    place.chmod(0o755)
    when = "after step 1" if "step 1/" in ended.out else "before step 1"
    n_files = len(list(place.glob("*.ckpt")))
    case.stock.append(f"exit {ended.code} {when}, {n_files} checkpoints")


@pytest.mark.case("R08")
def test_truncated(at_ten, unhurt, case):
    path = at_ten / "last.ckpt"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    case.stock.append(verdict(stock(at_ten, "resume"), unhurt) + ", no older one taken")


@pytest.mark.case("R09")
def test_flipped_bits(at_ten, case):
    rng, content, accepted = random.Random(9), (at_ten / "last.ckpt").read_bytes(), 0
    for _ in range(60):
        flipped = bytearray(content)
        bit = rng.randrange(8 * len(content))
        flipped[bit // 8] ^= 1 << bit % 8
        (at_ten / "flipped.ckpt").write_bytes(flipped)
        try:
            torch.load(at_ten / "flipped.ckpt", weights_only=True)
            accepted += 1
        except Exception:
            continue
    case.stock.append(f"{accepted} of 60 accepted")


@pytest.mark.case("R16")
def test_malice(at_ten, tmp_path, case):
    marker = tmp_path / "marker"
    state = torch.load(at_ten / "last.ckpt", weights_only=False)
    torch.save(state | {"more": Eval(f"touch {marker}")}, at_ten / "last.ckpt")
    began = time.monotonic()
    ended = stock(at_ten, "resume")
    assert time.monotonic() - began < LIMIT_S
    case.stock.append(f"exit {ended.code}, {'code ran' if marker.exists() else 'nothing ran'}")
