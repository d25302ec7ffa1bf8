"""Datasets that are damaged, or are not what they were: R11 to R14."""

import hashlib
import json
import os
import random
import signal
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exact import finite, newest
from folders import run_folder
from harness import fit, gpt, start_fit

pytestmark = pytest.mark.faults
SET = ("--data.text_file", "null", "--data.dataset", "data/set")


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
    for ended in (fit(shards, *SET), gpt(shards, "data", "verify", "data/set")):
        line = ended.refused("train-00001.npy", "expected|missing|No such", "prepare")
        assert "step  1/" not in ended.out
    case.saw(line.removeprefix("error: "))
    assert not (shards / "lightning_logs").exists()


@pytest.mark.case("R11")
def test_an_extra_shard_is_refused_at_start(shards, case):
    np.save(shard(shards, 9), np.zeros(10, np.uint16))
    line = fit(shards, *SET).refused("train-00009.npy", "expected", "found", "remove it|prepare")
    gpt(shards, "data", "verify", "data/set").refused("train-00009.npy")
    case.saw(line.removeprefix("error: "))


@pytest.mark.case("R11")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_verify_finds_a_flipped_bit(shards, case, seed):
    path = shard(shards, seed)
    content = bytearray(path.read_bytes())
    bit = random.Random(seed).randrange(8 * 128, 8 * len(content))  # of a token
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    gpt(shards, "data", "verify", "data/set").refused(path.name, "expected", "found", "prepare")
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
    gpt(shards, "data", "verify", "data/set").refused("9,?999", "vocabulary")
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
