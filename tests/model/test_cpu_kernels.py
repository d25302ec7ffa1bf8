"""Layers for compiled CPU code agree with PyTorch's own, and the plain model knows none of them."""

import ast
import dataclasses
import inspect
import math
from collections.abc import Iterator

import pytest
import torch
import torch._functorch.config
import torch.nn as nn
import torch.nn.functional as F

from gpt_lightning.model import attention, gpt
from gpt_lightning.model.fast import cpu_kernels
from gpt_lightning.model.fast.compilation import (
    RECOMPUTE_IN_BACKWARD,
    attention_kernel,
    compile_in_place,
    compiled_head,
)
from gpt_lightning.model.fast.cpu_kernels import (
    DeterministicEmbedding,
    ExactGELU,
    FastGELU,
    HashedDropout,
    Lookup,
    PaddedHead,
    auto_attention,
    dropout,
    hashed_dropout,
    hashed_numbers,
    install,
    sigmoid_gelu,
)
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.model.network import has_our_forward

CONFIG = GPTConfig(2, 2, 16, block_size=8, vocab_size=11, attention="auto")


class Graphs:
    """Compiler backend that runs eagerly and keeps each traced graph and its products' shapes."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.texts: list[str] = []
        self.products: list[tuple[int, ...]] = []

    def __call__(self, graph, inputs):
        self.texts.append(str(graph.graph))
        for node in graph.graph.nodes:
            if node.target is F.linear:
                self.products.append(tuple(node.meta["example_value"].shape))
        return graph.forward


@pytest.fixture
def recompute_in_backward() -> Iterator[None]:
    torch.compiler.reset()
    with torch._functorch.config.patch(RECOMPUTE_IN_BACKWARD):
        yield


# ---- the whole model -----------------------------------------------------------------------------


@pytest.mark.parametrize("module", [gpt, attention])
def test_the_plain_model_has_no_branch_on_a_device_or_on_compilation(module):
    names = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Attribute | ast.Name)
    }
    assert "device" in names  # tensors are made where the input is
    assert not names & {"is_compiling", "type", "is_cuda", "is_cpu", "is_mps", "cpu_kernels"}


def test_install_leaves_parameters_and_eager_results_alone():
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, dropout=0.3)
    plain, ours = GPT(config), GPT(config)
    ours.load_state_dict(plain.state_dict())
    install(ours)
    install(ours)  # twice is as good as once
    assert list(ours.state_dict()) == list(plain.state_dict())
    assert ours.lm_head.weight is ours.transformer.wte.weight
    kinds = {type(module) for module in ours.modules()}
    assert kinds >= {HashedDropout, FastGELU, DeterministicEmbedding, PaddedHead}
    assert not kinds & {nn.Dropout, nn.GELU, nn.Embedding}
    idx = torch.randint(11, (3, 8))
    losses = []
    for model in (plain, ours):
        torch.manual_seed(1)
        losses.append(model(idx, idx))
        losses[-1].backward()
    assert torch.equal(*losses)
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    assert torch.equal(plain.eval()(idx), ours.eval()(idx))


@pytest.mark.parametrize(
    ("activation", "bf16", "vocab_size", "rtol", "atol"),
    # naive and fused attention round differently
    [
        pytest.param("gelu_tanh", False, 11, 1e-4, 1e-6, marks=pytest.mark.slow),
        ("gelu", False, 11, 1e-4, 1e-6),
        pytest.param("gelu", True, 6500, 2**-5, 2e-3, marks=pytest.mark.slow),  # padded to 6,528
    ],
)
def test_compiled_it_is_the_same_model(
    activation, bf16, vocab_size, rtol, atol, recompute_in_backward
):
    """Traced with the compiler's front half, whose kernels are PyTorch's own."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, vocab_size=vocab_size, activation=activation)
    plain, traced = GPT(config), GPT(config)
    traced.load_state_dict(plain.state_dict())
    install(traced)
    traced.compile(backend="aot_eager")
    idx = torch.randint(vocab_size, (3, 8))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        losses = [model(idx, idx) for model in (plain, traced)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-4 if bf16 else 1e-6, atol=1e-6)
    for p, q in zip(plain.parameters(), traced.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=rtol, atol=atol)


class Tripled(nn.Linear):
    def forward(self, x):
        return 3 * super().forward(x)


OWN_LAYERS = [
    ("lm_head", Tripled(16, 11, bias=False), False),
    ("lm_head", nn.Linear(16, 11), False),
    ("transformer.wpe", nn.Embedding(8, 16, max_norm=0.5), True),
    ("transformer.h.0.attn.attention", lambda q, k, v, p: v, True),
]


@pytest.mark.parametrize(("place", "own", "same_loss"), OWN_LAYERS)
def test_a_users_own_layers_stay_in_compiled_code(place, own, same_loss):
    torch.manual_seed(0)
    model, idx = GPT(CONFIG), torch.randint(11, (3, 8))
    parent, _, name = place.rpartition(".")
    setattr(model.get_submodule(parent), name, own)
    expected = model(idx, idx).item()
    assert has_our_forward(model) == same_loss
    kernel, _ = attention_kernel(model, torch.device("cpu"), 8, 0.0)
    assert (kernel == "the network's own") == (name == "attention")
    install(model)
    model.compile(backend=Graphs())
    assert model(idx, idx).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("backend", "scope"),
    [
        ("aot_eager", "model"),
        ("aot_eager", "block"),
        pytest.param("inductor", "model", marks=pytest.mark.slow),
    ],
)
def test_with_hashed_dropout_the_gradient_is_the_derivative(backend, scope, monkeypatch):
    """Compare with finite differences: a backward with other masks would be far off."""
    torch.compiler.reset()
    compiled_head.cache_clear()
    compiler = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **options: compiler(f, backend=backend))
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(CONFIG, n_layer=1, dropout=0.5))
    compile_in_place(model, "cpu", scope)
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


# ---- dropout -------------------------------------------------------------------------------------

SHAPE = torch.Size((64, 4, 64, 64))  # 2^20 elements
N = SHAPE.numel()


def seeds(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, generator=generator)


def dropped(number: int, p: float) -> torch.Tensor:
    return hashed_dropout(torch.ones(SHAPE), p, seeds(number)) == 0.0


@pytest.mark.parametrize("p", [0.01, 0.2, 0.9])
def test_the_rate_is_the_probability(p):
    sigma = math.sqrt(p * (1 - p) / N)
    for number in range(5):
        assert abs(dropped(number, p).float().mean() - p) < 5 * sigma
        # the same bound for PyTorch's own
        assert abs((F.dropout(torch.ones(SHAPE), p) == 0).float().mean() - p) < 5 * sigma


def test_what_stays_is_scaled_so_that_the_mean_stays():
    x = torch.rand(SHAPE)
    y = hashed_dropout(x, 0.2, seeds(0))
    kept = y != 0
    assert torch.equal(y[kept], (x * 1.25)[kept])
    assert y.mean().item() == pytest.approx(x.mean().item(), rel=3e-3)  # 5 sigma are 2.8e-3


def triple32(index: int, first: int, second: int) -> int:
    """The hash in whole numbers: Wellons' triple32 without its last round."""
    mask = 2**32 - 1
    x = (index + first) & mask
    x = ((x ^ x >> 17) * 0xED5AD4BB & mask) ^ (second & mask)
    x = (x ^ x >> 11) * 0xAC4C1B51 & mask
    x = (x ^ x >> 15) * 0x31848BAB & mask
    return x - 2**32 if x >= 2**31 else x


@pytest.mark.parametrize("seeds", [(0, 0), (1, -1), (-(2**31), 2**31 - 1), (123456789, -987654321)])
def test_the_hash_is_the_one_that_its_source_states(seeds):
    """A mask depends on these bits alone: with others an older run resumes to another model."""
    found = hashed_numbers(torch.Size([5, 40]), torch.tensor(seeds, dtype=torch.int32))
    assert found.shape == (5, 40)
    assert found.view(-1).tolist() == [triple32(index, *seeds) for index in range(200)]


def test_compiled_it_is_hashed_and_its_gradient_has_its_mask(recompute_in_backward):
    @torch.compile(backend="aot_eager")
    def function(x):
        return dropout(x, 0.2)

    def run(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.ones(64, 64, requires_grad=True)
        torch.manual_seed(seed)
        y = function(x)
        y.sum().backward()
        return y.detach(), x.grad

    y, gradient = run(5)
    assert torch.equal(y, gradient)  # x is ones: both are 0 or 1.25
    assert torch.equal(y, run(5)[0])  # the seed decides
    assert not torch.equal(y, run(6)[0])
    torch.manual_seed(5)
    drawn = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
    assert torch.equal(y, hashed_dropout(torch.ones(64, 64), 0.2, drawn))


# ---- GELU ----------------------------------------------------------------------------------------

FORMS = {"tanh": sigmoid_gelu, "none": ExactGELU.apply}
X = torch.linspace(-12.0, 12.0, 24_001)


@pytest.mark.parametrize("approximate", FORMS)
def test_the_function_and_its_derivative(approximate):
    exact = X.double().requires_grad_()
    expected = F.gelu(exact, approximate=approximate)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    x = X.clone().requires_grad_()
    found = FORMS[approximate](x)
    (found_slope,) = torch.autograd.grad(found.sum(), x)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=5e-7)
    torch.testing.assert_close(found_slope.double(), slope, rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize(("dtype", "ours"), [(torch.bfloat16, True), (torch.float64, False)])
@pytest.mark.parametrize(
    ("approximate", "form"), [("tanh", "sigmoid"), ("none", "autograd_function_apply")]
)
def test_compiled_gelu_is_the_form(approximate, form, dtype, ours):
    graphs = Graphs()
    x = X.to(dtype).requires_grad_()
    found = torch.compile(FastGELU(approximate), backend=graphs)(x).detach()
    assert (form in graphs.texts[0]) == ours
    expected = F.gelu(x.detach().double(), approximate=approximate)
    exact = {"rtol": 0.0, "atol": 1e-15}
    torch.testing.assert_close(
        found.double(), expected, **({"rtol": 2**-8, "atol": 5e-7} if ours else exact)
    )


# ---- embedding, head, attention ------------------------------------------------------------------


def test_the_embeddings_gradient_is_pytorchs_and_always_the_same():
    torch.manual_seed(0)
    weight = torch.randn(5, 16, requires_grad=True)
    idx = torch.randint(5, (8, 200))  # each row 320 times: another order would round differently
    upstream = torch.randn(8, 200, 16)
    (expected,) = torch.autograd.grad(torch.nn.functional.embedding(idx, weight), weight, upstream)
    for _ in range(3):
        (found,) = torch.autograd.grad(Lookup.apply(idx, weight), weight, upstream)
        assert torch.equal(found, expected)


def test_compiled_code_calls_that_gradient():
    graphs = Graphs()
    layer = DeterministicEmbedding(5, 16)
    compiled = torch.compile(layer, backend=graphs)
    compiled(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert "autograd_function_apply" in graphs.texts[0]
    assert layer.weight.grad[0].eq(6.0).all()


@pytest.mark.parametrize(
    ("rows", "bf16", "product"),
    [(50_257, True, 50_304), (50_257, False, 50_257), (50_304, True, 50_304), (65, True, 65)],
)
def test_a_large_vocabulary_is_multiplied_in_a_multiple_of_64_rows(rows, bf16, product):
    graphs = Graphs()
    x = torch.randn(1, 2, 16)
    head = PaddedHead(16, rows, bias=False)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        logits = torch.compile(head, backend=graphs)(x)
        expected = nn.Linear.forward(head, x)
    assert graphs.products == [(1, 2, product)]
    torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize(
    ("T", "dropout_p", "naive"),
    [(256, 0.0, True), (257, 0.0, False), (257, 0.1, True), (1025, 0.1, False)],
)
def test_attention_is_naive_where_a_compiled_context_is_short(T, dropout_p, naive, monkeypatch):
    called = []
    for name in ("hashed_attention", "sdpa_attention"):
        function = getattr(cpu_kernels, name)
        monkeypatch.setattr(
            cpu_kernels, name, lambda *a, f=function, n=name: called.append(n) or f(*a)
        )
    q = torch.rand(1, 1, T, 8)
    auto_attention(q, q, q, dropout_p)
    torch.compile(auto_attention, backend=Graphs())(q, q, q, dropout_p)
    assert called == ["sdpa_attention", "hashed_attention" if naive else "sdpa_attention"]


def test_dropout_inside_compiled_attention_is_hashed():
    graphs = Graphs()
    model = GPT(dataclasses.replace(CONFIG, dropout=0.2, attention="naive"))
    install(model)
    torch.compile(model, backend=graphs)(torch.zeros(1, 8, dtype=torch.int64))
    assert "dropout" not in "".join(graphs.texts)  # PyTorch's own, which draws serially
    assert graphs.texts[0].count("torch.randint") == 1 + 3 * 2  # embeddings; 3 in each block
