"""The machine around a run, and `gpt-lightning prepare`: R21 to R23, R28, R32, R33."""

import codecs
import os
import random
import re
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from exact import checkpoints, must_equal, step_of
from folders import contents, leftovers, run_folder
from harness import RESUME, Running, fit, gpt, start, start_fit
from test_ranks import TWO

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.case("R28")
def test_a_files_time_means_nothing(every, stopped, case):
    for path in checkpoints(run_folder(stopped)):
        soon = 4102444800 if step_of(path) % 2 else 0  # 2100 for odd steps, 1970 for even
        os.utime(path, (soon, soon))
    ended = fit(stopped, *RESUME).ok()
    assert re.search(r"step 10\b", ended.out)
    case.saw("mtime 1970 and 2100: went on from step 10")
    must_equal(every, stopped)


@pytest.mark.case("R28")
@pytest.mark.parametrize("calls", [0, 300])
def test_a_clock_that_is_set_back(every, stopped, case, calls):
    fit(stopped, *RESUME, faults={"clock": [-3600.0, calls]}).ok()
    must_equal(every, stopped)
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
    must_equal(whole, folder)


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


TEXTS: dict[str, tuple[bytes, tuple[str, ...] | None]] = {
    "empty": (b"", ("bad.txt", "empty")),
    "one token": (b"a", ("bad.txt",)),
    "not UTF-8": (b"good text " * 50 + b"\xff\xfe", ("bad.txt", "500")),
    "a lone surrogate": (b"good text " * 50 + b"\xed\xa0\x80", ("bad.txt", "500")),
    "white space": (b" \n\t" * 500, ("bad.txt", "white space")),
    "NUL bytes": (b"some\0text\0\n" * 300, None),
    "a byte order mark": (b"\xef\xbb\xbf" + b"some text\n" * 100, None),
    "CRLF": (b"some text\r\n" * 100, None),
}


@pytest.mark.case("R21")
@pytest.mark.parametrize("kind", TEXTS)
def test_prepare_of_odd_texts(tmp_path, case, kind):
    content, words = TEXTS[kind]
    (tmp_path / "bad.txt").write_bytes(content)
    ended = gpt(tmp_path, "prepare", "bad.txt", "--tokenizer", "byte", "--out", "set")
    assert ended.seconds < 10
    if words is not None:
        case.saw(f"{kind}: {ended.refused(*words).removeprefix('error: ')}")
        assert not (tmp_path / "set").exists()
        return
    ended.ok()
    tokens = [np.load(path) for path in sorted((tmp_path / "set").glob("train-*.npy"))]
    tokens += [np.load(path) for path in sorted((tmp_path / "set").glob("val-*.npy"))]
    assert bytes(np.concatenate(tokens).astype(np.uint8)) == content.removeprefix(codecs.BOM_UTF8)
    case.saw(f"{kind}: kept byte for byte, without a byte order mark")


@pytest.mark.case("R21")
@pytest.mark.parametrize("kind", ["one letter", "words"])
def test_one_line_of_50_mb(tmp_path, case, kind):
    piece = "a" if kind == "one letter" else "some words and more "
    (tmp_path / "text.txt").write_text((piece * (50_000_000 // len(piece)))[:50_000_000])
    ended = gpt(tmp_path, "prepare", "text.txt", "--tokenizer", "gpt2", "--out", "set",
                "--workers", "1").ok()  # fmt: skip
    case.saw(f"50 MB line of {kind}: {ended.seconds:.0f} s")


def prepare(folder: Path, text: str, out: str) -> Running:
    return start(folder, "prepare", text, "--tokenizer", "byte", "--out", out)


@pytest.fixture
def big_text(tmp_path: Path) -> Path:
    rng = random.Random(22)
    (tmp_path / "text.txt").write_bytes(rng.randbytes(15_000_000).hex().encode())
    return tmp_path


@pytest.mark.case("R22")
def test_two_prepare_one_directory(big_text, case):
    with prepare(big_text, "text.txt", "clean") as process:
        process.end().ok()
    with prepare(big_text, "text.txt", "set") as one, prepare(big_text, "text.txt", "set") as two:
        codes = [one.end().code, two.end().code]
    assert codes == [0, 0]
    assert contents(big_text / "set") == contents(big_text / "clean")
    assert leftovers(big_text) == []
    case.saw("two at once: one identical manifest")


@pytest.mark.case("R22")
def test_killed_in_prepare_and_run_again(big_text, case):
    seed, delays = 22, []
    with prepare(big_text, "text.txt", "clean") as process:
        seconds = process.end().ok().seconds
    rng = random.Random(seed)
    for _ in range(4):
        delays.append(rng.uniform(0.2, 0.9) * seconds)
        with prepare(big_text, "text.txt", "set") as process:
            time.sleep(delays[-1])
            os.kill(process.process.pid, signal.SIGKILL)
            code = process.end().code
        if code == -signal.SIGKILL and (big_text / "set").exists():
            gpt(big_text, "data", "verify", "set").ok()
    with prepare(big_text, "text.txt", "set") as process:
        process.end().ok()
    assert contents(big_text / "set") == contents(big_text / "clean")
    assert leftovers(big_text) == []
    case.saw(f"seed {seed}, killed after {', '.join(f'{d:.2f} s' for d in delays)}")


@pytest.mark.case("R23")
@pytest.mark.parametrize("limit", [0, 5_000, 1_000_000])
def test_prepare_on_a_full_disk(big_text, case, limit):
    before = contents(big_text)
    ended = gpt(big_text, "prepare", "text.txt", "--tokenizer", "byte", "--out", "set",
                wrap=["prlimit", f"--fsize={limit}"])  # fmt: skip
    line = ended.refused("set", "File too large")
    case.saw(line.removeprefix("error: "))
    assert contents(big_text) == before
    assert leftovers(big_text) == []
