"""Files that are damaged, swapped or malicious: named, passed over, and never run."""

import hashlib
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import RESUME, checkpoints, must_equal, run_of, start_fit, step_of

from gpt_lightning.cli import main

pytestmark = pytest.mark.slow
FIT = ["fit", "--config", "run.yaml"]
DAMAGE = {
    "cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "cut by a byte": lambda path: os.truncate(path, path.stat().st_size - 1),
    "empty": lambda path: os.truncate(path, 0),
    "a text": lambda path: path.write_text("not a checkpoint\n" * 100),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "an older save": lambda path: path.write_bytes(checkpoints(Path())[2].read_bytes()),
}


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DAMAGE)
def test_auto_takes_the_file_before_a_damaged_one(whole, stopped, capsys, kind):
    path = checkpoints(stopped)[0]
    DAMAGE[kind](path)
    assert main([*FIT, "--resume", str(path)]) == 2
    assert path.name in capsys.readouterr().err
    assert main([*FIT, *RESUME]) == 0
    printed = capsys.readouterr()
    assert path.name in printed.err
    assert "step 9" in printed.out
    must_equal(whole, stopped)


def test_a_run_with_damaged_files_alone_does_not_begin_again(stopped, capsys):
    for path in checkpoints(stopped):
        path.write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in run_of(stopped).rglob("*")}
    assert main([*FIT, *RESUME]) == 2
    assert checkpoints(stopped)[0].name in capsys.readouterr().err.splitlines()[-1]
    assert {path: path.stat().st_mtime_ns for path in run_of(stopped).rglob("*")} == before


def test_times_of_files_and_the_clock_mean_nothing(whole, stopped, capsys, monkeypatch):
    for path in checkpoints(stopped):
        moment = 4102444800 if step_of(path) % 2 else 0  # 2100 for odd steps, 1970 for even
        os.utime(path, (moment, moment))
    now = time.time
    monkeypatch.setattr(time, "time", lambda: now() - 7200)
    assert main([*FIT, *RESUME]) == 0
    assert "step 10" in capsys.readouterr().out
    must_equal(whole, stopped)


@pytest.mark.parametrize("tail", ['{"step": 11', "\0\0\0\0", '{"step": 11, "time": 1.0}\n{"st'])
def test_a_torn_last_row_is_repaired(whole, stopped, tail):
    file = run_of(stopped) / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["step"] <= 10]
    file.write_text("".join(kept) + tail)
    assert main([*FIT, *RESUME]) == 0
    must_equal(whole, stopped)


class Shell:
    """Unpickled, it runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (self.command,)


class Eval(Shell):
    def __reduce__(self) -> tuple[Any, ...]:
        return eval, (f"__import__('os').system({self.command!r})",)


def malicious(kind: str, state: dict[str, Any], command: str) -> Any:
    """Return the content of a malicious checkpoint of one kind."""
    settings = state["hyper_parameters"]
    evil = {"class_path": "evil.Evil", "init_args": {}}
    return {
        "pickle": Shell(command),
        "eval in a tensor file": state | {"more": Eval(command)},
        "eval in the optimizer": state | {"optimizer_states": [Eval(command)]},
        "_instantiator": state | {"hyper_parameters": settings | {"_instantiator": "evil.run"}},
        "_class_path": state | {"hyper_parameters": settings | {"_class_path": "evil.Evil"}},
        "class_path": state | {"hyper_parameters": evil},
        "class_path of the model": state | {"hyper_parameters": settings | {"config": evil}},
    }[kind]


KINDS = ["pickle", "eval in a tensor file", "eval in the optimizer"]
KINDS += ["_instantiator", "_class_path", "class_path", "class_path of the model"]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_a_checkpoint_runs(stopped, tmp_path, monkeypatch, capsys, kind):
    marker = tmp_path / "marker"
    Path("evil.py").write_text(f"open({str(marker)!r}, 'w').close()\nEvil = run = dict\n")
    monkeypatch.syspath_prepend(stopped)
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    path = stopped / "bad" / "checkpoints" / "step-0000010.ckpt"
    path.parent.mkdir(parents=True)
    state = torch.load(checkpoints(stopped)[0], weights_only=True)
    content = malicious(kind, state, f"touch {marker}")
    if kind == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    path.with_name(path.name + ".sha256").write_text(f"{digest}  {path.name}\n")
    validate = ["validate", "--config", "run.yaml", "--ckpt_path"]
    for command in ([*FIT, "--resume"], ["sample"], validate):
        assert main([*command, str(path)]) == 2, command
        assert str(path) in capsys.readouterr().err.splitlines()[-1]
    assert not marker.exists(), "code of the file ran, or a module that it names was imported"


def test_the_marker_would_be_made(tmp_path):
    """The pickles do what they are made for where nobody looks."""
    marker = tmp_path / "marker"
    code = f"import pickle; pickle.loads({pickle.dumps(Shell(f'touch {marker}'))!r})"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert marker.exists()


# ---- shards --------------------------------------------------------------------------------------

USE = ["--data.text_file=null", "--data.dataset=set", "--run_name=shards"]


@pytest.fixture
def shard(folder, monkeypatch) -> Path:
    """The second of four shards of the dataset `set`, which USE trains on."""
    monkeypatch.chdir(folder)
    options = ["--tokenizer=char", "--out=set", "--shard-tokens=1000"]
    assert main(["prepare", "text.txt", *options]) == 0
    return folder / "set" / "train-00001.npy"


def unlisted(path: Path) -> None:
    """Save a shard that the manifest does not list, under the name of the next one."""
    np.save(path.with_name("train-00004.npy"), np.zeros(10, np.uint16))


def unknown(path: Path) -> None:
    """Let a shard's last token be one that no tokenizer has, and the manifest's digest fit."""
    content = path.read_bytes()[:-2] + b"\x0f\x27"
    old, new = (hashlib.sha256(data).hexdigest() for data in (path.read_bytes(), content))
    path.write_bytes(content)
    manifest = path.with_name("manifest.json")
    manifest.write_text(manifest.read_text().replace(old, new))


SHARD_DAMAGE = {
    "odd truncation": (lambda path: os.truncate(path, path.stat().st_size - 1), "train-00001"),
    "wrong version": (
        lambda path: path.write_bytes(path.read_bytes()[:6] + b"\x09" + path.read_bytes()[7:]),
        "train-00001",
    ),
    "missing": (Path.unlink, "train-00001"),
    "not in the manifest": (unlisted, "train-00004"),
    "an unknown token": (unknown, "9,?999"),
}


@pytest.mark.parametrize("kind", SHARD_DAMAGE)
def test_a_damaged_shard_is_an_error_before_the_first_step(shard, capsys, kind):
    damage, words = SHARD_DAMAGE[kind]
    damage(shard)
    for command in ([*FIT, *USE], ["data", "verify", "set"]):
        assert main(command) == 2
        assert re.search(words, capsys.readouterr().err)
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("kind", ["array of objects", "pickle"])
def test_nothing_in_a_shard_runs(shard, tmp_path, capsys, kind):
    marker = tmp_path / "marker"
    shell = Shell(f"touch {marker}")
    if kind == "pickle":
        shard.write_bytes(pickle.dumps(shell))
    else:
        np.save(shard, np.array([shell] * 1000, dtype=object), allow_pickle=True)
    for command in ([*FIT, *USE], ["data", "verify", "set"]):
        assert main(command) == 2
        assert shard.name in capsys.readouterr().err
    assert not marker.exists()


@pytest.mark.parametrize(("workers", "left"), [("0", 0), ("2", 1001)])
def test_a_shard_that_is_cut_while_it_is_read_is_no_signal(shard, workers, left):
    options = [*USE, "--data.num_workers", workers, "--trainer.max_steps", "2000"]
    with start_fit(shard.parents[1], *options) as process:
        process.wait_for(9)
        for path in shard.parent.glob("train-*.npy"):
            os.truncate(path, left)
        code = process.end()
    assert code == 2, (code, signal.SIGBUS, process.output[-2000:])
    (line,) = process.errors()
    assert "train-0000" in line
