"""The machine around a run: R28, R32, R33."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from exact import checkpoints, must_equal, step_of
from folders import run_folder
from harness import fit, start_fit
from test_two_ranks import TWO

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[2]
RESUME = ("--resume", "auto")


@pytest.mark.case("R28")
def test_a_files_time_means_nothing(every, stopped, case):
    for path in checkpoints(run_folder(stopped)):
        soon = 4102444800 if step_of(path) % 2 else 0  # 2100 for odd steps, 1970 for even
        os.utime(path, (soon, soon))
    ended = fit(stopped, *RESUME).ok()
    assert re.search(r"step 10\b", ended.out)
    case.saw("mtime 1970 and 2100: went on from step 10")
    must_equal(run_folder(every), run_folder(stopped))


@pytest.mark.case("R28")
@pytest.mark.parametrize("calls", [0, 300])
def test_a_clock_that_is_set_back(every, stopped, case, calls):
    fit(stopped, *RESUME, faults={"clock": [-3600.0, calls]}).ok()
    must_equal(run_folder(every), run_folder(stopped))
    import json

    lines = (run_folder(stopped) / "metrics.jsonl").read_text().splitlines()
    rates = {k: v for line in lines for k, v in json.loads(line).items() if k.startswith("perf/")}
    assert all(v >= 0 for v in rates.values()), rates
    case.saw(f"clock back an hour after {calls} looks: no negative rate")


@pytest.mark.case("R28")
def test_a_process_that_slept(whole, folder, case):
    with start_fit(folder) as process:
        process.wait_for(15)
        os.kill(process.process.pid, signal.SIGSTOP)
        time.sleep(5)
        os.kill(process.process.pid, signal.SIGCONT)
        ended = process.end().ok()
    stall = re.search(r"\d+ stalls?[^\n]*", ended.out)
    assert stall, ended.out[-1500:]
    case.saw(f"SIGSTOP for 5 s: {stall[0]}")
    must_equal(run_folder(whole), run_folder(folder))


@pytest.mark.case("R32")
def test_pins(case):
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.match(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    versions = dict(pin.split("==")[:2] for pin in pins)
    assert versions["lightning"] == versions["pytorch-lightning"]
    assert versions["lightning"] not in {"2.6.2", "2.6.3"}
    assert tuple(map(int, versions["torch"].split(".")[:2])) >= (2, 10)
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'"torch>=2\.1\d', project)
    assert re.search(r'"lightning>=2\.6\.[6-9]', project)
    case.saw(f"{len(pins)} exact pins")


@pytest.mark.case("R32")
def test_pins_have_hashes(case):
    files = [p for p in ROOT.glob("*") if p.is_file() and p.suffix in {".txt", ".lock"}]
    with_hashes = [p.name for p in files if "--hash=sha256:" in p.read_text() or
                   re.search(r'hash(es)? = ".*sha256', p.read_text())]  # fmt: skip
    assert with_hashes, "no file of pins has digests (pip install --require-hashes)"
    case.saw(f"hashes in {', '.join(with_hashes)}")


@pytest.mark.case("R33")
def test_nothing_tells_to_listen_to_the_world(case):
    files = [p for p in ROOT.rglob("*") if p.suffix in {".py", ".md", ".yaml", ".toml", ".sh"}]
    files += [ROOT / "Makefile"]
    hidden = {".venv", ".git", "lightning_logs", "data", "build", "tests"}
    bad = [
        str(path.relative_to(ROOT))
        for path in files
        if not hidden & set(path.relative_to(ROOT).parts[:1])
        and re.search(r"\b0\.0\.0\.0\b|--bind_all", path.read_text(errors="replace"))
    ]
    assert bad == []
    case.saw("no file listens on all interfaces")


def listening(pids: list[int]) -> list[str]:
    """Return addresses beyond loopback, in hexadecimal, at which processes listen."""
    inodes = set()
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found = re.match(r"socket:\[(\d+)\]", os.readlink(path))
            except OSError:
                continue
            inodes |= {found[1]} if found else set()
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    addresses = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address = fields[1].split(":")[0]
            if fields[3] == "0A" and fields[9] in inodes and address not in loopback:
                addresses.append(fields[1])
    return addresses


@pytest.mark.case("R33")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_listens_to_nobody_outside(folder, case, ranks):
    with start_fit(folder, *(TWO if ranks == 2 else ()), "--data.num_workers", "2",
                   "--trainer.max_steps", "500") as process:  # fmt: skip
        process.wait_for(5)
        found = listening(process.descendants())
    case.saw(f"{ranks} ranks: listening at {found or 'nothing'} beyond loopback")
    assert found == [], "PyTorch's TCPStore, where the ranks meet, listens at every address"
