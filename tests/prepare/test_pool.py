"""The executors give the same results, and a clear line where one cannot work."""

import subprocess
import sys
from pathlib import Path

import pytest

from gpt_lightning.errors import UserError
from gpt_lightning.prepare import documents
from gpt_lightning.prepare.command import prepare
from gpt_lightning.prepare.pool import run_all
from gpt_lightning.prepare.settings import Settings


def square(x: int) -> int:
    if x < 0:
        raise UserError(f"{x} is negative")
    return x * x


@pytest.mark.parametrize("workers", [1, 2])
def test_each_unit_once(workers: int) -> None:
    found = list(run_all(square, range(20), Settings("gpt2", workers=workers)))
    assert found == [x * x for x in range(20)]
    assert list(run_all(square, [], Settings("gpt2", workers=workers))) == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_mistake_comes_through(workers: int) -> None:
    with pytest.raises(UserError, match=r"^-1 is negative$"):
        list(run_all(square, [1, -1, 2], Settings("gpt2", workers=workers)))


GUARDLESS = """
import sys
from gpt_lightning.prepare import documents
from gpt_lightning.prepare.command import prepare
documents.UNIT_BYTES = 100
prepare(sys.argv[1], out=sys.argv[2], workers=2)
"""


@pytest.mark.slow
def test_a_script_without_a_main_guard_ends(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    for name in "ab":
        (source / f"{name}.jsonl").write_text('{"text": "some text"}\n' * 20)
    (tmp_path / "script.py").write_text(GUARDLESS)
    command = [sys.executable, str(tmp_path / "script.py"), str(source), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert 'put the call below `if __name__ == "__main__":`' in done.stderr


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'gpt-lightning\[ray\]'"):
        list(run_all(square, [1], Settings("gpt2", executor="ray")))


RAY = """
import os, sys
sys.path.insert(0, {folder!r})
import ray
from ray.cluster_utils import Cluster
from gpt_lightning.prepare import documents
documents.UNIT_BYTES = 1000
cluster = Cluster(initialize_head=True, head_node_args={{"num_cpus": 1}})
cluster.add_node(num_cpus=1)
os.environ["RAY_ADDRESS"] = cluster.address
from gpt_lightning.prepare import command as prepare
prepare.prepare({source!r}, out={out!r}, executor="ray", shard_tokens=500)
open({bad!r}, "w").write("no json\\n")
try:
    prepare.prepare({bad!r}, out={out!r} + "-bad", executor="ray")
except prepare.UserError as error:
    print("REFUSED", error)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_ray_cluster_of_two_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(documents, "UNIT_BYTES", 1000)
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for i in range(6):
        lines = [f'{{"text": "file {i} line {j}"}}\n' for j in range(100)]
        (source / f"{i}.jsonl").write_text("".join(lines))
    code = RAY.format(
        folder=str(tmp_path), source=str(source), out=str(out), bad=str(tmp_path / "bad.jsonl")
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr
    assert "REFUSED" in done.stdout
    assert "bad.jsonl, line 1: damaged document, Expecting value" in done.stdout
    prepare(str(source), out=str(tmp_path / "clean"), shard_tokens=500, workers=1)
    for path in (tmp_path / "clean").iterdir():
        assert path.read_bytes() == (out / path.name).read_bytes()
