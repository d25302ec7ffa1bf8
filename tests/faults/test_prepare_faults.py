"""`gpt-lightning prepare` of odd texts, twice at once, killed, and on a full disk: R21 to R23."""

import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from folders import contents, leftovers
from harness import Running, gpt, start

pytestmark = pytest.mark.faults


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
    assert bytes(np.concatenate(tokens).astype(np.uint8)) == content
    case.saw(f"{kind}: kept byte for byte")


@pytest.mark.case("R21")
def test_special_text_is_text(tmp_path, case):
    (tmp_path / "text.txt").write_text("one <|endoftext|> two\n" * 100)
    gpt(tmp_path, "prepare", "text.txt", "--tokenizer", "gpt2", "--out", "set").ok()
    tokens = np.concatenate([np.load(path) for path in (tmp_path / "set").glob("*.npy")])
    assert 50256 not in tokens
    case.saw("<|endoftext|> is text")


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
