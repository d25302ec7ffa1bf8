"""Defaults, scopes and settings of compilation, and that each graph is one."""

import copy
import dataclasses
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from tiny_fit import TINY_FIT
from torch import nn

from gpt_lightning.errors import UserError
from gpt_lightning.model.fast import compilation, compiled_code
from gpt_lightning.model.fast.compilation import (
    check_cuda_graphs,
    compile_in_place,
    is_compiled,
    should_compile,
)
from gpt_lightning.model.fast.compiled_code import kept_code
from gpt_lightning.model.fast.cpu_kernels import PaddedHead
from gpt_lightning.model.generate import generate
from gpt_lightning.model.gpt import GPT, GPTConfig

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=6500)


PROGRAMS = "g++ gcc triton Python.h"


@pytest.mark.parametrize(
    ("device", "precision", "programs", "CC", "reason"),
    [
        ("cuda", "32-true", PROGRAMS, None, "on for cuda"),
        ("cuda", "bf16-mixed", "clang triton Python.h", None, "on for cuda"),
        ("cuda", "bf16-mixed", "mycc triton Python.h", "mycc", "on for cuda"),
        ("cuda", "bf16-mixed", "gcc Python.h", None, "off, Triton is not installed"),
        # without a compiler a run would end with BackendCompilerFailed at its first step
        ("cuda", "bf16-mixed", "cc triton", None, "off, there is no C compiler for Triton (gcc"),
        # Triton takes CC as it is
        ("cuda", "bf16-mixed", PROGRAMS, "mycc", "off, there is no C compiler for Triton (mycc)"),
        ("cpu", "bf16-mixed", PROGRAMS, None, "on for cpu"),
        ("cpu", "bf16-true", PROGRAMS, None, "on for cpu"),
        ("cpu", "32-true", PROGRAMS, None, "off for cpu, 32-true, dropout 0"),
        ("cpu", "32-true 0.2", PROGRAMS, None, "on for cpu, 32-true, dropout 0.2"),
        ("cpu", "bf16-mixed", "Python.h", None, "off, there is no C++ compiler"),
        # Inductor's code for a CPU includes it, and so does Triton's launcher of kernels
        ("cpu", "bf16-mixed", "g++", None, "off, there is no Python.h"),
        ("cuda", "bf16-mixed", "gcc triton", None, "off, there is no Python.h"),
        ("mps", "bf16-mixed", PROGRAMS, None, "off for mps"),
    ],
)
def test_auto(device, precision, programs, CC, reason, monkeypatch, tmp_path):
    there = programs.split()
    if "Python.h" in there:
        (tmp_path / "Python.h").touch()
    for name, value in (("CC", CC), ("CXX", None)):
        monkeypatch.setenv(name, value or "")
    monkeypatch.setattr(compilation.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(compilation, "has_triton", lambda: "triton" in there)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    precision, _, dropout = precision.partition(" ")
    compiled, why = should_compile(device, precision, float(dropout or 0))
    assert compiled is reason.startswith("on")
    assert why.startswith(f"auto: {reason}")


@pytest.mark.parametrize(
    ("device", "pad_head", "expected"),
    [
        ("cpu", "auto", PaddedHead),
        ("cpu", False, nn.Linear),
        ("cuda", "auto", nn.Linear),
        ("cuda", True, PaddedHead),
    ],
)
def test_the_head_is_padded(device, pad_head, expected):
    model = GPT(TINY)
    compile_in_place(model, device, pad_head=pad_head)
    assert type(model.lm_head) is expected
    assert (type(model.transformer.drop) is nn.Dropout) == (device == "cuda")


@pytest.mark.parametrize("scope", ["model", "block"])
def test_a_copy_is_compiled_again(scope):
    """PyTorch copies no compiled code: the copy would train in eager mode, called compiled."""
    model = GPT(TINY)
    compile_in_place(model, "cuda", scope)
    copied = copy.deepcopy(model)
    assert (is_compiled(model), is_compiled(copied)) == (True, False)
    compile_in_place(copied, "cuda", scope)
    assert is_compiled(copied)


def test_a_cuda_graph_may_not_write_accumulated_gradients(monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CUDAGRAPHS", raising=False)
    check_cuda_graphs()
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", "0")
    check_cuda_graphs()
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", "1")
    with pytest.raises(UserError, match="unset TORCHINDUCTOR_CUDAGRAPHS"):
        check_cuda_graphs()


@pytest.mark.parametrize("scope", ["block", pytest.param("model", marks=pytest.mark.slow)])
def test_each_scope_computes_the_same_model(scope, monkeypatch):
    """With the compiler's front half; the number of graphs does not grow with the layers."""
    torch.compiler.reset()
    compilation.compiled_head.cache_clear()
    compiler, graphs = torch.compile, torch._dynamo.utils.counters["stats"]

    def front_half(*args, **kwargs):
        return compiler(*args, **kwargs | {"backend": "aot_eager", "fullgraph": True})

    monkeypatch.setattr(torch, "compile", front_half)
    torch.manual_seed(0)
    plain = GPT(TINY)
    model = GPT(TINY)
    model.load_state_dict(plain.state_dict())
    assert not is_compiled(model)
    compile_in_place(model, "cuda", scope)
    assert is_compiled(model)
    idx = torch.randint(0, 6500, (2, 16))
    graphs.clear()
    losses = []
    for either in (plain, model):
        losses.append(either(idx, idx))
        losses[-1].backward()
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-7)
    assert graphs["unique_graphs"] == {"model": 1, "block": 2}[scope]
    torch.testing.assert_close(model(idx), plain(idx), rtol=1e-5, atol=1e-6)
    prompt = idx[:, :3]  # by a copy of the model
    greedy = [generate(either, prompt, 5, temperature=0.0) for either in (plain, model)]
    assert torch.equal(*greedy)
    compilation.compiled_head.cache_clear()


@pytest.mark.parametrize(
    "settings",
    [
        {"dropout": 0.1},
        {"dropout": 0.1, "attention": "naive"},
        {"attention": "flash"},
        {"loss_chunk": 5},
        {"checkpointing": True},
        {"checkpointing": "products"},
        {"checkpointing": "products", "dropout": 0.1},
        {"residual": "bfloat16"},
        {"bias": False, "activation": "gelu"},
    ],
    ids=lambda settings: " ".join(f"{k}={v}" for k, v in settings.items()),
)
def test_forward_and_loss_are_one_graph(settings):
    torch.compiler.reset()
    model = GPT(dataclasses.replace(TINY, n_layer=1, vocab_size=64, **settings))
    model.compile(backend="eager", fullgraph=True)  # raises at a graph break
    idx = torch.randint(0, 64, (2, 16))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)
    loss.backward()
    assert loss.isfinite()


# ---- settings ------------------------------------------------------------------------------------

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def caches(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(compiled_code.platformdirs, "user_cache_dir", lambda name: tmp_path / name)
    monkeypatch.setenv(VARIABLE, "")  # restored after the test
    monkeypatch.delenv(VARIABLE)
    return tmp_path / "gpt-lightning" / "compiled"


def folder_of_code() -> str | None:
    before = os.environ.get(VARIABLE)
    with kept_code():
        found = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "as PyTorch does"
    assert os.environ.get(VARIABLE) == before
    return found


def test_compiled_code_is_kept_for_each_processor(caches, monkeypatch):
    first = folder_of_code()
    assert Path(first).is_dir()
    assert Path(first).parent == caches
    assert folder_of_code() == first
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True}, raising=False)
    assert folder_of_code() != first


def test_a_folder_of_code_that_was_chosen_stays(caches, monkeypatch):
    monkeypatch.setenv(VARIABLE, "mine")
    assert folder_of_code() == "mine"
    pytorchs = f"{compiled_code.tempfile.gettempdir()}/torchinductor_user"
    monkeypatch.setenv(VARIABLE, pytorchs)
    assert Path(folder_of_code()).parent == caches


def test_the_compiled_header_of_loops_survives_an_emptied_temporary_folder(caches, monkeypatch):
    pytorchs = caches.parents[1] / "torchinductor_user"
    monkeypatch.setattr(compiled_code.tempfile, "tempdir", str(pytorchs.parent))
    monkeypatch.setenv(VARIABLE, str(pytorchs))
    header = pytorchs / "precompiled_headers" / "loops.h.gch"
    with kept_code():
        header.parent.mkdir(parents=True)
        header.write_bytes(b"compiled")
    shutil.rmtree(pytorchs)
    with kept_code():
        assert header.read_bytes() == b"compiled"
    assert [path.name for path in pytorchs.iterdir()] == ["precompiled_headers"]


def test_pytorchs_compiler_does_not_quote_a_path_with_a_space(caches, monkeypatch):
    spaced = caches.parents[1] / "my caches"
    monkeypatch.setattr(compiled_code.platformdirs, "user_cache_dir", lambda name: spaced / name)
    assert folder_of_code() is None


def test_a_folder_that_cannot_hold_programs_is_pytorchs(caches, monkeypatch):
    mount = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda path: mount)
    assert folder_of_code() is None
    mount.f_flag = 0
    caches.parent.rename(caches.parents[1] / "elsewhere")
    caches.parent.touch()  # a file in the way of the folder
    assert folder_of_code() is None


def test_the_settings_hold_for_a_graph_of_ours_alone(monkeypatch):
    """Also for its backward graph, which PyTorch would compile later."""
    from torch._functorch import config
    from torch._inductor.config import cpp, triton

    names = [*compilation.RECOMPUTE_IN_BACKWARD, "force_non_lazy_backward_lowering"]
    seen = []

    def inductor(graph, inputs):
        found = [getattr(config, name) for name in names]
        seen.append((found, cpp.vec_isa_ok, triton.mix_order_reduction))
        return graph.forward

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inductor)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    torch.compiler.reset()
    before = [getattr(config, name) for name in names]
    for kind, version, *gpt in map(str.split, ("cpu 2.13 +", "cpu 2.13", "cuda 2.11", "cuda 2.10")):
        monkeypatch.setattr(torch, "__version__", torch.torch_version.TorchVersion(version))
        backend = compilation.compiler_of.__wrapped__(kind, bool(gpt))
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3))
        torch.compiler.reset()
    ours, theirs = [False] * 3 + [True], [*before[:3], True]
    # torch 2.10's gradients are wrong with the last one
    assert seen == [(ours, True, True), *[(theirs, True, True)] * 2, (theirs, True, False)]
    assert [getattr(config, name) for name in names] == before
    assert cpp.vec_isa_ok is None


def test_another_pytorch_compiles_without_the_settings(monkeypatch):
    monkeypatch.delattr(torch._dynamo, "lookup_backend")
    assert compilation.compiler_of.__wrapped__("cpu") == "inductor"


@pytest.mark.slow
@pytest.mark.timeout(400)  # 20 s on an idle machine
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_a_fit_compiles_in_the_users_cache(text_file, tmp_path):
    """The first two commands of a new user, with an emptied temporary folder between them."""
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    folders = {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "TMPDIR": str(temporary)}
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE} | folders
    command = [sys.executable, "-m", "gpt_lightning", "fit", *TINY_FIT, "--data.batch_size=2"]
    command += ["--trainer.max_steps=2", "--trainer.precision=bf16-mixed", "--model.compile=true"]
    found = []
    for _ in range(2):
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        subprocess.run(command, env=environment, cwd=text_file.parent, check=True)
        found.append({path: path.stat().st_mtime for path in home.rglob("*.so")})
    assert found[0] == found[1] != {}
    assert not list(temporary.rglob("*.so"))


FAILING = """
import sys
import torch
from gpt_lightning.model.fast import compilation
from gpt_lightning.model.fast.compilation import attention_kernel, compile_in_place
from gpt_lightning.model.gpt import GPT, GPTConfig

model = GPT(GPTConfig(1, 2, 64, 32, 65))
compile_in_place(model, "cpu")
idx = torch.randint(65, (2, 32))
with torch.autocast("cpu", torch.bfloat16):
    kernel, error = attention_kernel(model, torch.device("cpu"), 32, 0.0)
    print(kernel)
    print(error)
    compiled = model(idx, idx)
with torch.compiler.set_stance("force_eager"):
    print(abs(compiled - model(idx, idx)).item() < 0.02)
"""


@pytest.mark.long  # two compilations; test_cpu_attention.py has the error by default
@pytest.mark.skipif(
    not (getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16") and shutil.which("g++")),
    reason="needs a CPU with AVX-512 BF16 and g++",
)
def test_a_kernel_that_cannot_be_built_leaves_attention_to_pytorch(tmp_path):
    """With a compiler that knows all but the kernel's instructions."""
    compiler = tmp_path / "g++"
    text = f"""#!/bin/sh
case "$*" in *.cpp*) grep -qs _mm512_dpbf16_ps $(echo "$*" | tr ' ' '\n' | grep cpp$) &&
    echo "x.cpp:1: error: no such instruction" >&2 && exit 1;; esac
exec {shutil.which("g++")} "$@"
"""
    compiler.write_text(text)
    compiler.chmod(0o755)
    own = {"CXX": str(compiler), VARIABLE: str(tmp_path / "code")}
    done = subprocess.run(
        [sys.executable, "-c", FAILING], env=os.environ | own, capture_output=True, text=True
    )
    expected = ["naive", "x.cpp:1: error: no such instruction", "True"]
    assert done.stdout.splitlines() == expected, done.stderr
