"""The kernels of attention: each computes the definition, and the one that runs is named."""

import pickle

import pytest
import torch

from gpt_lightning.model.attention import (
    ATTENTION,
    FUSED,
    NoKernelError,
    find_kernel,
    graph_nodes,
    naive_attention,
)
from gpt_lightning.model.fast.compilation import attention_kernel
from gpt_lightning.model.gpt import GPT, GPTConfig


def qkv(T: int, S: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 3, n, 16, requires_grad=True) for n in (T, S, S)]


@pytest.mark.parametrize("name", ["auto", "sdpa", "flash"])
def test_kernels_of_a_cpu_compute_the_definition(name):
    inputs = qkv(40, 40)
    out = ATTENTION[name](*inputs, 0.0)
    plain = naive_attention(*inputs, 0.0)
    torch.testing.assert_close(out, plain, rtol=1e-5, atol=1e-6)
    gradients = (torch.autograd.grad(y.square().sum(), inputs) for y in (out, plain))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dropout_p", "kernel"),
    [("sdpa", 0.0, "flash"), ("flash", 0.0, "flash"), ("sdpa", 0.1, "math")],
)
def test_the_kernel_that_runs_is_named(name, dropout_p, kernel):
    assert find_kernel(ATTENTION[name], torch.zeros(1), 32, dropout_p) == kernel


@pytest.mark.parametrize(
    ("name", "dropout_p", "reason"),
    [
        ("flash", 0.1, "do not support non-zero dropout"),
        ("cudnn", 0.0, "(?i)no viable backend|no available kernel"),
        ("efficient", 0.0, "(?i)no viable backend|no available kernel"),
    ],
)
def test_a_kernel_that_does_not_run_is_an_error_with_the_reason(name, dropout_p, reason):
    with pytest.raises(NoKernelError, match=reason):
        find_kernel(ATTENTION[name], torch.zeros(1), 32, dropout_p)


@pytest.mark.parametrize("name", list(FUSED))
def test_another_kernel_than_the_configured_one_is_an_error(name):
    """A device without PyTorch's choice of kernels, as MPS was until 2026, takes its products."""
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=16, vocab_size=8, attention=name))
    with pytest.raises(NoKernelError, match="PyTorch takes its math kernel instead"):
        attention_kernel(model, torch.device("meta"), 16, 0.0)


def test_looking_for_the_kernel_draws_no_random_number():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert find_kernel(ATTENTION["sdpa"], torch.zeros(1), 32, 0.1) == "math"
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("kernel", list(FUSED))
def test_a_kernel_is_known_by_its_node(kernel, monkeypatch):
    """The names of PyTorch's nodes, of which a CPU has one."""
    node = f"ScaledDotProduct{FUSED[kernel][1]}Backward0"
    monkeypatch.setattr("gpt_lightning.model.attention.graph_nodes", lambda call: {"Other", node})
    assert find_kernel(naive_attention, torch.zeros(1), 32, 0.0) == kernel


def test_other_errors_are_not_a_lack_of_kernels():
    def broken() -> torch.Tensor:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        graph_nodes(broken)


@pytest.mark.parametrize("attention", ["auto", "naive", *FUSED])
def test_a_model_can_be_pickled(attention):
    model = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=8, block_size=8, attention=attention))
    again = pickle.loads(pickle.dumps(model))
    assert again.transformer.h[0].attn.attention.__name__ == (
        model.transformer.h[0].attn.attention.__name__
    )
