"""Datasets that are damaged, malicious, huge or half-made: R11 to R14, R17, R21 to R24."""

import hashlib
import json
import os
import pickle
import random
import re
import signal
import struct
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exact import finite, newest
from harness import (
    Ended,
    Running,
    contents,
    copied,
    fit,
    gpt,
    leftovers,
    run_folder,
    start,
    start_fit,
    write_inputs,
)

pytestmark = pytest.mark.faults
SET = ("--data.text_file", "null", "--data.dataset", "data/set")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a dataset of four training shards and a validation shard."""
    folder = write_inputs(tmp_path_factory.mktemp("prepared"))
    gpt(folder, "prepare", "text.txt", "--tokenizer", "char", "--out", "data/set",
        "--shard-tokens", "1000").ok()  # fmt: skip
    return folder


@pytest.fixture
def shards(prepared: Path, tmp_path: Path) -> Path:
    return copied(prepared, tmp_path / "work")


def shard(folder: Path, number: int = 1) -> Path:
    return folder / "data" / "set" / f"train-{number:05d}.npy"


def edit(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = shard(folder)
        path.write_bytes(change(path.read_bytes()))

    return apply


def in_header(old: str, new: str) -> Callable[[Path], None]:
    assert len(old) == len(new)
    return edit(lambda content: content.replace(old.encode(), new.encode(), 1))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "odd truncation": edit(lambda content: content[:-1]),
    "even truncation": edit(lambda content: content[:-2]),
    "wrong magic": edit(lambda content: b"\x92" + content[1:]),
    "wrong version": edit(lambda content: content[:6] + b"\x09" + content[7:]),
    "wrong count": in_header("(1000,)", "(1001,)"),
    "another dtype": in_header("<u2", "<i2"),
    "missing in the middle": lambda folder: shard(folder).unlink(),
    "empty": edit(lambda content: b""),
}


@pytest.mark.case("R11")
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_shard_is_refused_at_start(shards, case, kind):
    DAMAGE[kind](shards)
    for ended in (fit(shards, *SET), gpt(shards, "verify", "data/set")):
        line = ended.refused("train-00001.npy", "expected|missing|No such", "prepare")
        assert "step  1/" not in ended.out
    case.saw(line.removeprefix("error: "))
    assert not (shards / "lightning_logs").exists()


@pytest.mark.case("R11")
def test_an_extra_shard_is_refused_at_start(shards, case):
    np.save(shard(shards, 9), np.zeros(10, np.uint16))
    line = fit(shards, *SET).refused("train-00009.npy", "expected", "found", "remove it|prepare")
    gpt(shards, "verify", "data/set").refused("train-00009.npy")
    case.saw(line.removeprefix("error: "))


@pytest.mark.case("R11")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_verify_finds_a_flipped_bit(shards, case, seed):
    path = shard(shards, seed)
    content = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * 128, 8 * len(content))  # of a token
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    gpt(shards, "verify", "data/set").refused(path.name, "expected", "found", "prepare")
    case.saw(f"seed {seed}: bit {bit} found by verify")


@pytest.mark.case("R12")
@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("left", [0, 1001])
def test_a_shard_that_is_cut_while_it_is_read(prepared, shards, case, workers, left):
    with start_fit(shards, *SET, "--data.num_workers", workers,
                   "--trainer.max_steps", "2000") as process:  # fmt: skip
        process.wait_for(9)
        for number in range(3):
            os.truncate(shard(shards, number), left)
        ended = process.end()
    assert ended.code != -signal.SIGBUS
    line = ended.refused(r"train-0000\d.npy", "changed|expected", "prepare")
    case.saw(f"{workers} workers: {line.removeprefix('error: ')}")
    assert finite(newest(run_folder(shards)))


@pytest.mark.case("R13")
@pytest.mark.parametrize("times", ["new", "old"])
def test_a_replaced_shard_is_refused_on_resume(shards, case, times):
    """The same name and size; with a new time, and as `cp -p` or `rsync -t` would leave it."""
    path = shard(shards)
    stop = {"signal_at": [int(signal.SIGTERM), 10, 1]}
    assert fit(shards, *SET, faults=stop).code == 143
    before = path.stat()
    tokens = np.load(path)
    np.save(path, tokens[::-1])
    assert path.stat().st_size == before.st_size
    if times == "old":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    ended = fit(shards, *SET, "--resume", "auto")
    case.saw(f"{times} time: {ended.refused(path.name, 'expected', 'found')[7:]}")


@pytest.mark.case("R14")
def test_a_token_beyond_the_vocabulary(shards, case):
    """Also where the digest is of these very tokens: a maker's mistake, not a disk's."""
    path, manifest = shard(shards, 2), shards / "data" / "set" / "manifest.json"
    content = bytearray(path.read_bytes())
    content[-2:] = struct.pack("<H", 9999)
    old = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(content)
    manifest.write_text(manifest.read_text().replace(old, hashlib.sha256(content).hexdigest()))
    gpt(shards, "verify", "data/set").refused("9,?999", "vocabulary")
    ended = fit(shards, *SET)
    line = ended.refused("9,?999", "vocabulary")
    case.saw(line.removeprefix("error: "))
    assert "step  1/" not in ended.out, "it was refused in the middle of the run"


@pytest.mark.case("R14")
@pytest.mark.parametrize("size", [100_277, 65_537])
def test_a_large_vocabulary_in_two_bytes(shards, case, size):
    path = shards / "data" / "set" / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps(manifest | {"vocab_size": size}))
    line = fit(shards, *SET).refused(f"{size:,}", "uint16", "uint32")
    case.saw(line.removeprefix("error: "))


@pytest.mark.case("R14")
def test_a_model_of_another_vocabulary(shards, case):
    ended = fit(shards, *SET, "--model.config.vocab_size", "10")
    line = ended.refused("vocab_size is 10", r"\d+ tokens")
    assert "step  1/" not in ended.out
    case.saw(line.removeprefix("error: "))


class Malice:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.case("R17")
@pytest.mark.parametrize("kind", ["array of objects", "pickle"])
def test_nothing_in_a_shard_runs(shards, tmp_path, case, kind):
    marker = tmp_path / "marker"
    if kind == "pickle":
        shard(shards).write_bytes(pickle.dumps(Malice(marker)))
    else:
        np.save(shard(shards), np.array([Malice(marker)] * 1000, dtype=object), allow_pickle=True)
    line = fit(shards, *SET).refused("train-00001.npy")
    gpt(shards, "verify", "data/set").refused("train-00001.npy")
    assert not marker.exists()
    case.saw(f"{kind}: {line.removeprefix('error: ')}")


# ---- prepare -------------------------------------------------------------------------------------

TEXTS: dict[str, tuple[bytes, tuple[str, ...] | None]] = {
    "empty": (b"", ("bad.txt", "empty")),
    "one token": (b"a", ("bad.txt",)),
    "not UTF-8": (b"good text " * 50 + b"\xff\xfe", ("bad.txt", "500")),
    "a lone surrogate": (b"good text " * 50 + b"\xed\xa0\x80", ("bad.txt", "500")),
    "white space": (b" \n\t" * 500, ("bad.txt", "white space")),
    "NUL bytes": (b"a\0b\0\n" * 300, None),
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
            gpt(big_text, "verify", "set").ok()
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


# ---- huge shards ---------------------------------------------------------------------------------


def sparse(folder: Path, n_shards: int, shard_bytes: int) -> Path:
    """A dataset of zeros that takes no room: files with holes."""
    write_inputs(folder)
    gpt(folder, "prepare", "text.txt", "--tokenizer", "char", "--out", "data/set").ok()
    path = folder / "data" / "set" / "manifest.json"
    manifest = json.loads(path.read_text())
    (folder / "data" / "set" / "train-00000.npy").unlink()
    entries = []
    for number in range(n_shards):
        file, tokens = f"train-{number:05d}.npy", shard_bytes // 2
        with (folder / "data" / "set" / file).open("wb") as stream:
            header = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
            np.lib.format.write_array_header_1_0(stream, header)
            stream.truncate(stream.tell() + shard_bytes)
        entries.append({"file": file, "tokens": tokens, "sha256": "0" * 64})
    manifest["splits"]["train"] = entries
    path.write_text(json.dumps(manifest))
    return folder


def measured(folder: Path) -> tuple[Ended, float, float]:
    """A run of 20 steps: most anonymous memory in MB, and seconds to its first step."""
    began, most = time.monotonic(), 0
    with start_fit(folder, *SET, "--trainer.max_steps", "20") as process:
        status = Path(f"/proc/{process.process.pid}/status")
        process.wait_for(1)
        first_s = time.monotonic() - began
        while process.process.poll() is None:
            found = re.search(r"RssAnon:\s+(\d+) kB", status.read_text())
            most = max(most, int(found[1]) if found else 0)
            time.sleep(0.005)
        return process.end().ok(), most / 1024, first_s


@pytest.mark.case("R24")
def test_memory_and_start_do_not_grow_with_the_data(tmp_path, case):
    _, base_mb, base_s = measured(sparse(tmp_path / "small", 1, 10_000_000))
    for n_shards, size in ((1, 10 * 10**9), (20, 10**9)):
        _, mb, s = measured(sparse(tmp_path / f"huge{n_shards}", n_shards, size))
        case.saw(f"{n_shards} x {size // 10**9} GB: {mb - base_mb:+.0f} MB, {s - base_s:+.1f} s")
        assert mb - base_mb < 64
        assert s - base_s < 2
