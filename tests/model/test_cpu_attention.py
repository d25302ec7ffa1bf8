"""The attention kernel for CPUs agrees with the plain version, masks of dropout included."""

import shutil

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from gpt_lightning.model.attention import naive_attention
from gpt_lightning.model.fast import cpu_attention, cpu_kernels
from gpt_lightning.model.fast.compilation import attention_kernel, compile_in_place
from gpt_lightning.model.fast.cpu_attention import CausalAttention
from gpt_lightning.model.fast.cpu_kernels import auto_attention, hashed_dropout
from gpt_lightning.model.gpt import GPT, GPTConfig

needs_avx512 = pytest.mark.skipif(
    not (getattr(torch.cpu, "get_capabilities", dict)().get("avx512_bf16") and shutil.which("g++")),
    reason="needs a CPU with AVX-512 BF16 and g++",
)
operators = torch.ops.gpt_lightning
SEEDS = torch.tensor([123456789, -987654321], dtype=torch.int32)
CAPABILITIES = {"avx512_bf16": True, "amx_bf16": False}


def heads(qkv: Tensor, nh: int) -> list[Tensor]:
    """Queries, keys and values as views of one tensor (B, T, 3 C), as in the model."""
    B, T, width = qkv.shape
    return [x.view(B, T, nh, -1).transpose(1, 2) for x in qkv.split(width // 3, dim=2)]


def plain(qkv: Tensor, nh: int, p: float) -> Tensor:
    return naive_attention(*heads(qkv, nh), p, lambda x, p: hashed_dropout(x, p, SEEDS) if p else x)


@needs_avx512
@pytest.mark.slow
@pytest.mark.parametrize(
    ("B", "nh", "T", "hs", "p"),
    [(2, 3, 64, 32, 0.0), (1, 2, 256, 64, 0.2), (2, 1, 96, 96, 0.5), (3, 2, 32, 64, 0.01)],
)
def test_it_is_the_plain_version_in_less_rounding(B, nh, T, hs, p):
    torch.manual_seed(0)
    qkv = torch.randn(B, T, 3 * nh * hs).bfloat16().requires_grad_()
    upstream = torch.randn(B, nh, T, hs).bfloat16()
    exact, rounded = (qkv.detach().to(d).requires_grad_() for d in (torch.float64, torch.bfloat16))
    y = CausalAttention.apply(*heads(qkv, nh), p, SEEDS if p else None)
    y.backward(upstream)
    expected = plain(exact, nh, p)
    expected.backward(upstream.double())
    theirs = plain(rounded, nh, p)
    theirs.backward(upstream)
    for ours, right, other in ((y, expected, theirs), (qkv.grad, exact.grad, rounded.grad)):
        error = (ours.double() - right).norm() / right.norm()
        # three roundings to bfloat16, of 2^-9 at most; another mask is off by a tenth and more
        assert error < 0.003
        assert error < (other.double() - right).norm() / right.norm()


@needs_avx512
@pytest.mark.slow
def test_large_scores_and_any_number_of_threads():
    torch.manual_seed(0)
    qkv = (torch.randn(2, 64, 3 * 64) * 30).bfloat16()  # most weights are 0 or 1
    threads, found = torch.get_num_threads(), []
    for n in (1, 2):
        torch.set_num_threads(n)
        y, lse = operators.attention(*heads(qkv, 2), 0.1, SEEDS)
        gradients = operators.attention_backward(y, *heads(qkv, 2), lse, 0.1, SEEDS)
        found.append([y, lse, *gradients])
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert all(x.isfinite().all() for x in found[0])
    scores = heads(qkv.double(), 2)[0] @ heads(qkv.double(), 2)[1].transpose(-1, -2) * 32**-0.5
    future = torch.ones(64, 64).triu(1).bool()
    expected = scores.masked_fill(future, -torch.inf).logsumexp(dim=-1)
    torch.testing.assert_close(found[0][1].double(), expected, rtol=1e-6, atol=1e-3)


@needs_avx512
@pytest.mark.slow
@pytest.mark.parametrize("p", [0.0, 0.2])
def test_pytorch_finds_the_operators_sound(p):
    q, k, v = heads(torch.randn(1, 32, 3 * 32).bfloat16(), 1)
    seeds = SEEDS if p else None
    y, lse = operators.attention(q, k, v, p, seeds)
    tests = ("test_schema", "test_faketensor")  # the gradient is CausalAttention's
    torch.library.opcheck(operators.attention, (q, k, v, p, seeds), test_utils=tests)
    torch.library.opcheck(
        operators.attention_backward, (y, q, k, v, lse, p, seeds), test_utils=tests
    )


def test_the_outputs_are_laid_out_as_the_model_reads_them():
    with FakeTensorMode():
        q, k, v = heads(torch.empty(2, 32, 3 * 64, dtype=torch.bfloat16), 2)
        y, lse = operators.attention(q, k, v, 0.0, None)
        gradients = operators.attention_backward(y, q, k, v, lse, 0.0, None)
    assert (lse.shape, lse.dtype) == ((2, 2, 32), torch.float32)
    for x in (y, *gradients):
        assert x.shape == q.shape
        assert x.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("T", "hs", "dtype", "units", "expected"),
    [
        (64, 32, torch.bfloat16, {}, True),
        (48, 32, torch.bfloat16, {}, False),
        (64, 48, torch.bfloat16, {}, False),
        (64, 32, torch.float32, {}, False),
        (64, 32, torch.bfloat16, {"amx_bf16": True}, False),
        (64, 32, torch.bfloat16, {"avx512_bf16": False}, False),
    ],
)
def test_where_it_runs(T, hs, dtype, units, expected, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: CAPABILITIES | units, raising=False)
    monkeypatch.setattr(cpu_attention, "library", lambda: (None, ""))
    assert cpu_attention.runs(T, hs, dtype) == expected


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize(("p", "draws"), [(0.0, 0), (0.2, 1)])
def test_compiled_code_calls_it_where_it_runs(there, p, draws, monkeypatch):
    graphs = []
    monkeypatch.setattr(cpu_attention, "runs", lambda T, hs, dtype: there)
    monkeypatch.setattr(cpu_kernels, "is_compiling", lambda: True)
    monkeypatch.setattr(
        CausalAttention, "apply", lambda q, k, v, p, seeds: graphs.append((p, seeds)) or q
    )
    q = torch.zeros(1, 1, 32, 32, dtype=torch.bfloat16)
    auto_attention(q, q, q, p)
    assert len(graphs) == there
    for found, seeds in graphs:
        assert (found, seeds is not None) == (p, draws)


@pytest.mark.parametrize(("bf16", "kernel"), [(True, "avx512"), (False, "naive")])
def test_a_run_names_it(bf16, kernel, monkeypatch):
    monkeypatch.setattr(cpu_attention, "cpu_has_kernel", lambda: True)
    monkeypatch.setattr(cpu_attention, "library", lambda: (None, ""))
    model = GPT(GPTConfig(1, 1, 32, block_size=32, vocab_size=8))
    compile_in_place(model, "cpu")
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        assert attention_kernel(model, torch.device("cpu"), 32, 0.0)[0] == kernel


def test_where_it_cannot_be_built_pytorchs_attention_runs(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: CAPABILITIES, raising=False)
    monkeypatch.setattr(cpu_attention, "library", lambda: (None, "error: no such instruction"))
    monkeypatch.setattr(cpu_kernels, "is_compiling", lambda: True)
    q, k, v = torch.randn(3, 1, 2, 32, 32).bfloat16()
    assert cpu_attention.fits(32, 32, q.dtype)
    assert not cpu_attention.runs(32, 32, q.dtype)
    # bfloat16 has 8 bits; outputs are means of at most 32 values near 1
    torch.testing.assert_close(
        auto_attention(q, k, v, 0.0), naive_attention(q, k, v, 0.0), atol=0.03, rtol=0.03
    )
