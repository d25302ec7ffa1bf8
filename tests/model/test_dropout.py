"""The hashed mask is dropout: its rate, its mean, no pattern, the same from the same seeds."""

import math

import pytest
import torch
import torch.nn.functional as F

from gpt_lightning.model.compilation import recompute_in_backward
from gpt_lightning.model.dropout import Dropout, dropout, hashed_dropout, hashed_numbers

SHAPE = torch.Size((64, 4, 64, 64))  # 2^20 elements
N = SHAPE.numel()


def seeds(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, generator=generator)


def dropped(number: int, p: float) -> torch.Tensor:
    return hashed_dropout(torch.ones(SHAPE), p, seeds(number)) == 0.0


@pytest.mark.parametrize("p", [0.01, 0.1, 0.2, 0.5, 0.9])
def test_the_rate_is_the_probability(p):
    sigma = math.sqrt(p * (1 - p) / N)
    for number in range(5):
        assert abs(dropped(number, p).float().mean() - p) < 5 * sigma
        # as PyTorch's own, of which nothing else is known either
        assert abs((F.dropout(torch.ones(SHAPE), p) == 0).float().mean() - p) < 5 * sigma


def test_what_stays_is_scaled_so_that_the_mean_stays():
    x = torch.rand(SHAPE)
    y = hashed_dropout(x, 0.2, seeds(0))
    kept = y != 0
    assert torch.equal(y[kept], (x * 1.25)[kept])
    assert y.mean().item() == pytest.approx(x.mean().item(), rel=3e-3)  # 5 sigma are 2.8e-3


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
@pytest.mark.parametrize("distance", [1, 2, 3])
def test_neighbours_are_independent(dim, distance):
    mask = dropped(1, 0.2).float() - 0.2
    product = (mask * mask.roll(distance, dim)).mean() / (0.2 * 0.8)
    assert abs(product) < 5 / math.sqrt(N)


def test_rows_and_columns_have_the_rate():
    mask = dropped(2, 0.2).float()
    for dim, size in enumerate(SHAPE):
        rates = mask.mean(dim=[d for d in range(4) if d != dim])
        assert (rates - 0.2).abs().max() < 5 * math.sqrt(0.16 * size / N)


@pytest.mark.parametrize("changed", [0, 1])
def test_one_bit_of_a_seed_makes_another_mask(changed):
    ours = seeds(3)
    theirs = ours.clone()
    theirs[changed] ^= 1
    a, b = (hashed_numbers(SHAPE, s) < 0.2 * 2**32 - 2**31 for s in (ours, theirs))
    both = (a & b).float().mean()
    assert both.item() == pytest.approx(0.04, abs=5 * math.sqrt(0.04 * 0.96 / N))


def test_the_numbers_are_uniform():
    numbers = hashed_numbers(SHAPE, seeds(4)).double()
    counts = torch.histc(numbers, bins=256, min=-(2**31), max=2**31)
    chi_squared = ((counts - N / 256) ** 2 / (N / 256)).sum()
    assert 160 < chi_squared < 370  # 255 degrees of freedom: mean 255, deviation 22.6


def test_eager_dropout_is_pytorchs():
    x = torch.rand(8, 8)
    torch.manual_seed(0)
    ours = dropout(x, 0.2)
    torch.manual_seed(0)
    assert torch.equal(ours, F.dropout(x, 0.2))
    assert torch.equal(Dropout(0.2).eval()(x), x)


def test_compiled_it_is_hashed_and_its_gradient_has_its_mask():
    torch.compiler.reset()
    recompute_in_backward()

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
    assert torch.equal(y, gradient)  # of ones: 0 or 1.25 both
    assert torch.equal(y, run(5)[0])  # by the seed
    assert not torch.equal(y, run(6)[0])
    torch.manual_seed(5)
    drawn = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32)
    assert torch.equal(y, hashed_dropout(torch.ones(64, 64), 0.2, drawn))
