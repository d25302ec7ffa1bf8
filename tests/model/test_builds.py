"""The C++ builds of compiled code: by graph, ahead, kept, and as exact as PyTorch's own."""

import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from gpt_lightning.model import builds

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


def test_pieces_have_all_kernels_and_about_equal_lengths():
    graph = builds.Builds(lambda task: None, pieces=2)
    for length in (5, 1, 9, 2, 2):
        graph.add("x" * length)
    assert sorted(map(sorted, graph.split())) == [[0, 3, 4], [1, 2]]
    assert builds.Builds(lambda task: None, pieces=2).split() == []


COMPILED = """
import sys
from pathlib import Path
import torch
from gpt_lightning.model import builds
from gpt_lightning.model.compilation import compile_in_place
from gpt_lightning.model.gpt import GPT, GPTConfig

folder, way = sys.argv[1:]
if way == "alone":
    builds.build_by_graph = lambda: None
torch.manual_seed(0)
model = GPT(GPTConfig(2, 2, 64, 32, 65, dropout=0.1))
compile_in_place(model, "cpu", "block")
with torch.autocast("cpu", torch.bfloat16):
    loss = model(*torch.randint(65, (2, 2, 32)))
loss.backward()
torch.save([loss, *(p.grad for p in model.parameters())], f"{folder}/{way}.pt")

double = torch.compile(lambda x, n: (x * n).sin(), dynamic=True)  # a kernel with a number
for n in (3, 5):
    assert torch.allclose(double(torch.ones(n, 7), n), torch.full((n, 7), float(n)).sin())
print(len(list(Path(folder, way).rglob("*.so"))))
"""


@pytest.mark.slow
@needs_compiler
def test_kernels_built_together_compute_the_same_bits(tmp_path):
    counts = []
    for way in ("alone", "together"):
        own = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / way), "TORCHINDUCTOR_COMPILE_THREADS": "2"}
        done = run(COMPILED, str(tmp_path), way, **own)
        assert done.returncode == 0, done.stderr
        counts.append(int(done.stdout))
    alone, together = (torch.load(tmp_path / f"{way}.pt") for way in ("alone", "together"))
    assert all(map(torch.equal, alone, together))
    assert counts[1] < counts[0] - 6


WRONG = """
import torch
from gpt_lightning.model import builds
from gpt_lightning.model.compilation import compile_in_place

model = torch.nn.Linear(3, 3, bias=False)
compile_in_place(model, "cpu")
graph = builds.Builds(None, 1)
kernel = graph.add('extern "C" void kernel(float* x, const float* y) { x[0] += y[1]; }')
x = torch.ones(2)
kernel(x, torch.tensor([1.0, 5.0]))
assert x.tolist() == [6.0, 1.0]
try:
    kernel(x)
except TypeError as error:
    print(error)
try:
    builds.Builds(None, 1).add("no program")(x)
except torch._dynamo.exc.TorchDynamoException as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
@needs_compiler
def test_wrong_calls_and_failed_builds_are_errors(tmp_path):
    done = run(WRONG, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert done.stdout.splitlines() == ["1 arguments for 2", "InductorError"], done.stderr


@pytest.fixture
def caches(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(builds.platformdirs, "user_cache_dir", lambda name: tmp_path / name)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # restored after the test
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    return tmp_path / "gpt-lightning" / "compiled"


def cache_folder() -> str | None:
    builds.keep_compiled_code()
    return os.environ.get("TORCHINDUCTOR_CACHE_DIR")


def test_compiled_code_is_kept_for_each_processor(caches, monkeypatch):
    first = cache_folder()
    assert Path(first).is_dir()
    assert Path(first).parent == caches
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert cache_folder() == first
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True})
    assert cache_folder() != first


def test_a_cache_folder_that_was_chosen_stays(caches, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    assert cache_folder() == "mine"


def test_a_cache_folder_that_cannot_hold_programs_is_pytorchs(caches, monkeypatch):
    mount = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: mount)
    assert cache_folder() is None
    mount.f_flag = 0
    caches.parent.rename(caches.parents[1] / "elsewhere")
    caches.parent.touch()  # a file in the way of the folder
    assert cache_folder() is None


AHEAD = """
import threading
from pathlib import Path
import torch
from gpt_lightning.model import builds
from gpt_lightning.model.compilation import compile_in_place
from gpt_lightning.model.gpt import GPT, GPTConfig

def headers():
    return sorted(path.name for path in Path(CACHE).rglob("*.h.gch"))

builds.keep_compiled_code()
builds.trust_vector_instructions()
model = GPT(GPTConfig(1, 2, 64, 32, 65))
builds.build_ahead(model)
for thread in set(threading.enumerate()) - {threading.main_thread()}:
    thread.join()
ahead = headers()
compile_in_place(model, "cpu")
with torch.autocast("cpu", torch.bfloat16):
    model(*torch.randint(65, (2, 2, 32))).backward()
assert ahead, "no header"
assert headers() == ahead
"""


@pytest.mark.long
@needs_compiler
def test_the_headers_of_a_model_are_built_ahead(tmp_path):
    own = {"TMPDIR": str(tmp_path), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "compiled")}
    script = AHEAD.replace("CACHE", repr(str(tmp_path)))
    done = run(script, **own)
    assert done.returncode == 0, done.stderr


CACHED = """
import os
import torch
from gpt_lightning.model.compilation import compile_in_place

compile_in_place(torch.nn.Linear(3, 3), "cpu")
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""


@pytest.mark.slow
@needs_compiler
def test_a_model_is_compiled_into_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    done = run(CACHED, HOME=str(tmp_path), XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith(str(tmp_path)), done.stderr
