"""Files that would run code where they are read: R16, R17."""

import hashlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exact import load, newest
from folders import run_folder
from harness import fit, gpt, refusals
from test_damaged_data import SET, shard

pytestmark = pytest.mark.faults


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
