"""GELU's forms for compiled code are the function, and have its derivative."""

import math

import pytest
import torch
import torch.nn.functional as F

from gpt_lightning.model.gelu import GELU, ExactGELU, normal_distribution, sigmoid_gelu

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


@pytest.mark.parametrize("approximate", FORMS)
def test_bfloat16_is_rounded_once(approximate):
    x = X.bfloat16().requires_grad_()
    found = FORMS[approximate](x)
    assert found.dtype == torch.bfloat16
    expected = F.gelu(x.detach().double(), approximate=approximate)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=5e-7)
    (slope,) = torch.autograd.grad(found.sum(), x)
    assert slope.dtype == torch.bfloat16


def test_the_normal_distribution():
    below, density = normal_distribution(X)
    x = X.double()
    assert (below - 0.5 * (1 + torch.erf(x / math.sqrt(2)))).abs().max() < 3e-7
    expected = torch.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    torch.testing.assert_close(density.double(), expected, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("approximate", FORMS)
def test_eager_it_is_pytorchs(approximate):
    assert torch.equal(GELU(approximate)(X), F.gelu(X, approximate=approximate))


@pytest.mark.parametrize(("dtype", "ours"), [(torch.bfloat16, True), (torch.float64, False)])
@pytest.mark.parametrize(
    ("approximate", "form"), [("tanh", "sigmoid"), ("none", "autograd_function_apply")]
)
def test_compiled_it_is_the_form(approximate, form, dtype, ours):
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    x = X.to(dtype).requires_grad_()
    found = torch.compile(GELU(approximate), backend=backend)(x).detach()
    assert (form in graphs[0]) == ours
    expected = F.gelu(x.detach().double(), approximate=approximate)
    exact = {"rtol": 0.0, "atol": 1e-15}
    torch.testing.assert_close(
        found.double(), expected, **({"rtol": 2**-8, "atol": 5e-7} if ours else exact)
    )
