"""Datasets and checkpoints that are damaged, malicious or huge: R11 to R14, R16, R17, R24."""

import hashlib
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import finite, load, newest
from folders import run_folder, write_inputs
from harness import Ended, fit, gpt, refusals, start_fit

pytestmark = pytest.mark.faults
SET = ("--data.text_file", "null", "--data.dataset", "data/set")


def shard(folder: Path, number: int = 1) -> Path:
    return folder / "data" / "set" / f"train-{number:05d}.npy"


def edit(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = shard(folder)
        path.write_bytes(change(path.read_bytes()))

    return apply


DAMAGE: dict[str, Callable[[Path], None]] = {
    "odd truncation": edit(lambda content: content[:-1]),
    "even truncation": edit(lambda content: content[:-2]),
    "wrong magic": edit(lambda content: b"\x92" + content[1:]),
    "wrong version": edit(lambda content: content[:6] + b"\x09" + content[7:]),
    "missing in the middle": lambda folder: shard(folder).unlink(),
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


class Shell:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class Eval(Shell):
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').system({self.command!r})",)


def malicious(kind: str, good: dict[str, Any], marker: Path) -> Any:
    """Return the content of a malicious checkpoint of one kind."""
    command = f"touch {marker}"
    inner = good["hyper_parameters"]
    return {
        "os.system": lambda: Shell(command),
        "eval in a tensor file": lambda: {**good, "more": Eval(command)},
        "eval in the optimizer": lambda: {**good, "optimizer_states": [Eval(command)]},
        "_instantiator": lambda: good | {"hyper_parameters": inner | {"_instantiator": "evil.run"}},
        "_class_path": lambda: good | {"hyper_parameters": inner | {"_class_path": "evil.Evil"}},
        "class_path": lambda: (
            good | {"hyper_parameters": {"class_path": "evil.Evil", "init_args": {}}}
        ),
        "class_path of the model": lambda: (
            good | {"hyper_parameters": inner | {"config": {"class_path": "evil.Evil"}}}
        ),
    }[kind]()


HARMLESS = ("_instantiator", "_class_path")  # a key that nobody reads, beside a good model


@pytest.mark.case("R16")
@pytest.mark.parametrize("force", [False, True])
def test_nothing_in_a_checkpoint_runs(stopped, tmp_path, case, force):
    marker = tmp_path / "marker"
    (stopped / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nEvil = run = dict\n")
    good = load(newest(run_folder(stopped)))
    kinds = ["os.system", "eval in a tensor file", "eval in the optimizer", "class_path",
             "class_path of the model", *HARMLESS]  # fmt: skip
    commands, names = [], []
    for number, kind in enumerate(kinds):
        path = stopped / "bad" / f"run{number}" / "checkpoints" / "step-0000010.ckpt"
        path.parent.mkdir(parents=True)
        what = malicious(kind, good, marker)
        if kind == "os.system":
            path.write_bytes(pickle.dumps(what))
        else:
            torch.save(what, path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
        for words in (["fit", "--config", "run.yaml", "--resume"], ["sample"],
                      ["validate", "--config", "run.yaml", "--ckpt_path"]):  # fmt: skip
            commands.append([*words, str(path)])
            names.append(str(path))
    env = {"PYTHONPATH": str(stopped)}
    env |= {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"} if force else {}
    codes = refusals(stopped, commands, names, env=env)
    assert not marker.exists(), "code of the file ran, or a module that it names was imported"
    ignored = [c for c, code in zip(commands, codes, strict=True) if code == 0]
    case.saw(f"{codes.count(2)} of {len(codes)} refused, nothing ran"
             + (", with TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" if force else ""))  # fmt: skip
    assert not ignored, f"accepted: {[(c[0], c[-1][-35:]) for c in ignored]}"


def test_the_marker_would_be_made(tmp_path):
    """The pickles do what they are made for where nobody looks."""
    marker = tmp_path / "marker"
    code = f"import pickle; pickle.loads({pickle.dumps(Shell(f'touch {marker}'))!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert marker.exists()


@pytest.mark.case("R17")
@pytest.mark.parametrize("kind", ["array of objects", "pickle"])
def test_nothing_in_a_shard_runs(shards, tmp_path, case, kind):
    marker = tmp_path / "marker"
    if kind == "pickle":
        shard(shards).write_bytes(pickle.dumps(Shell(f"touch {marker}")))
    else:
        np.save(
            shard(shards),
            np.array([Shell(f"touch {marker}")] * 1000, dtype=object),
            allow_pickle=True,
        )
    line = fit(shards, *SET).refused("train-00001.npy")
    gpt(shards, "data", "verify", "data/set").refused("train-00001.npy")
    assert not marker.exists()
    case.saw(f"{kind}: {line.removeprefix('error: ')}")


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
