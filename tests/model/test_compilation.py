"""What is compiled where, and that compiled code for a CPU is the same function."""

import dataclasses
import subprocess
import sys

import pytest
import torch

from gpt_lightning.hardware.memory import keep_freed_memory
from gpt_lightning.model import attention, compilation
from gpt_lightning.model.compilation import compile_in_place, recompute_in_backward, should_compile
from gpt_lightning.model.embedding import Embedding, Lookup
from gpt_lightning.model.gpt import GPT, GPTConfig, project_to_vocabulary

CONFIG = GPTConfig(2, 2, 16, block_size=8, vocab_size=11, attention="auto")


@pytest.mark.parametrize(
    ("device", "precision", "compiler", "expected"),
    [
        ("cuda", "32-true", None, True),
        ("cpu", "32-true", "g++", False),
        ("cpu", "bf16-mixed", "g++", True),
        ("cpu", "bf16-true", "g++", True),
        ("cpu", "bf16-mixed", None, False),
        ("mps", "bf16-mixed", "g++", False),
    ],
)
def test_auto(device, precision, compiler, expected, monkeypatch, tmp_path):
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(compilation.shutil, "which", lambda name: compiler)
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    compiled, why = should_compile(device, precision)
    assert compiled is expected
    assert why.startswith(f"auto: {'on' if expected else 'off'}")
    if device == "cpu" and precision != "32-true" and not expected:
        assert "no C++ compiler" in why


def test_auto_needs_pythons_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(compilation.shutil, "which", lambda name: "g++")
    monkeypatch.setattr(compilation.sysconfig, "get_path", lambda name: str(tmp_path))
    compiled, why = should_compile("cpu", "bf16-mixed")
    assert not compiled
    assert "Python.h" in why


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu"])
@pytest.mark.parametrize(
    ("bf16", "vocab_size", "rtol", "atol"),
    # the naive attention and the fused one round otherwise
    [(False, 11, 1e-4, 1e-6), (True, 6500, 2**-5, 2e-3)],  # in bfloat16 it is padded to 6,528
)
def test_compiled_it_is_the_same_model(activation, bf16, vocab_size, rtol, atol):
    """Traced with the compiler's front half, whose kernels are PyTorch's own."""
    torch.compiler.reset()
    recompute_in_backward()
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size, activation=activation)
    plain, traced = GPT(config), GPT(config)
    traced.load_state_dict(plain.state_dict())
    traced.compile(backend="aot_eager")
    idx = torch.randint(vocab_size, (3, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        losses = [model(idx, idx) for model in (plain, traced)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4 if bf16 else 1e-6, atol=1e-6)
    for p, q in zip(plain.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_with_hashed_dropout_the_gradient_is_the_derivative(backend):
    """By differences: a backward with other masks than the forward's is far off."""
    torch.compiler.reset()
    recompute_in_backward()
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(CONFIG, dropout=0.5))
    model.compile(backend=backend)
    idx = torch.randint(11, (3, 8))

    def loss() -> torch.Tensor:
        torch.manual_seed(7)
        return model(idx, idx)

    loss().backward()
    direction = [torch.randn_like(p) for p in model.parameters()]
    slope = sum((p.grad * d).sum() for p, d in zip(model.parameters(), direction, strict=True))

    def moved(step: float) -> float:
        with torch.no_grad():
            for p, d in zip(model.parameters(), direction, strict=True):
                p.add_(d, alpha=step)
        return loss().item()

    up, down = moved(1e-4), moved(-2e-4)
    # the loss is a float32 of seven digits; other masks are off by half and more
    assert (up - down) / 2e-4 == pytest.approx(slope.item(), rel=1e-2, abs=1e-2)


def test_attention_is_naive_where_it_is_compiled(monkeypatch):
    torch.compiler.reset()
    called = []
    for name in ("naive_attention", "sdpa_attention"):
        function = getattr(attention, name)
        monkeypatch.setattr(
            attention, name, lambda *a, f=function, n=name: called.append(n) or f(*a)
        )
    q = torch.rand(1, 1, 4, 8)
    attention.auto_attention(q, q, q, 0.0)
    torch.compile(attention.auto_attention, backend="eager")(q, q, q, 0.0)
    assert called == ["sdpa_attention", "naive_attention"]


def test_the_embeddings_gradient_is_pytorchs_and_always_the_same():
    torch.manual_seed(0)
    weight = torch.randn(5, 16, requires_grad=True)
    idx = torch.randint(5, (8, 200))  # each row 320 times: any other order rounds otherwise
    upstream = torch.randn(8, 200, 16)
    (expected,) = torch.autograd.grad(torch.nn.functional.embedding(idx, weight), weight, upstream)
    for _ in range(3):
        (found,) = torch.autograd.grad(Lookup.apply(idx, weight), weight, upstream)
        assert torch.equal(found, expected)


def test_compiled_code_calls_that_gradient():
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    layer = Embedding(5, 16)
    compiled = torch.compile(layer, backend=backend)
    compiled(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert "autograd_function_apply" in graphs[0]
    assert layer.weight.grad[0].eq(6.0).all()


@pytest.mark.parametrize(
    ("rows", "bf16", "product"),
    [(50_257, True, 50_304), (50_257, False, 50_257), (50_304, True, 50_304), (65, True, 65)],
)
def test_a_large_vocabulary_is_multiplied_in_a_multiple_of_64_rows(rows, bf16, product):
    torch.compiler.reset()
    shapes = []

    def backend(graph, inputs):
        for node in graph.graph.nodes:
            if node.target is torch.nn.functional.linear:
                shapes.append(node.meta["example_value"].shape)
        return graph.forward

    x, weight = torch.randn(1, 2, 16), torch.randn(rows, 16)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = torch.compile(project_to_vocabulary, backend=backend)(x, weight)
        expected = x @ weight.t()
    assert shapes == [(1, 2, product)]
    torch.testing.assert_close(logits, expected)


def test_parameters_keep_their_names():
    model = GPT(CONFIG)
    compile_in_place(model, "cpu")
    assert list(dict(model.named_parameters())) == list(dict(GPT(CONFIG).named_parameters()))


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept():
    """After its first steps, training needs no page that the system would have to clear."""
    code = (
        "import resource, sys, torch\n"
        "from gpt_lightning.hardware.memory import keep_freed_memory\n"
        "kept = sys.argv[1] == 'keep' and keep_freed_memory()\n"
        "layer, x = torch.nn.Linear(8, 4096), torch.rand(4096, 8)\n"
        "for step in range(8):\n"
        "    if step == 4: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.nn.functional.gelu(layer(x)).sum().backward()\n"  # blocks of 64 MiB
        "print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    faults = {}
    for how in ("keep", "leave"):
        done = subprocess.run(
            [sys.executable, "-c", code, how], capture_output=True, text=True, check=True
        )
        kept, count = done.stdout.split()
        faults[how] = int(count)
        if how == "keep" and kept == "False":
            pytest.skip("another C library")
    assert faults["leave"] > 4 * 16_384  # pages of 4 KiB in a block
    assert faults["keep"] < faults["leave"] / 4  # a few blocks more, now and then
    assert keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_blocks_of_more_than_2_gib_are_kept_too():
    """The heap's end, before and after a block of 2.5 GiB that is never touched."""
    code = (
        "import ctypes\n"
        "from gpt_lightning.hardware.memory import hand_back_freed_memory, keep_freed_memory\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p\n"
        "libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]\n"
        "kept, size = keep_freed_memory(), 5 * 2**29\n"
        "start = libc.sbrk(0)\n"
        "libc.free(libc.malloc(size))\n"
        "grown = libc.sbrk(0) - start\n"
        "hand_back_freed_memory()\n"
        "print(kept, grown >= size, libc.sbrk(0) - start < size)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["True", "True"] or done.stdout.startswith("False")
