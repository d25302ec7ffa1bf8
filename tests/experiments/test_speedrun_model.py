"""The speedrun's model: causal, decoded as it is computed, and an error where it has no part."""

import pytest
import torch

from experiments.speedrun.model import SpeedrunGPT, hashed
from gpt_lightning.errors import UserError
from gpt_lightning.model.fast.compilation import compile_in_place
from gpt_lightning.model.generate import generate
from gpt_lightning.model.gpt import GPT, GPTConfig

V, T = 20, 16
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": T, "vocab_size": V}
SHAPE |= {"tie_weights": False}


def config(**changes) -> GPTConfig:
    return GPTConfig(**SHAPE | changes)


@pytest.fixture
def model() -> GPT:
    """A model whose projections are no longer zero."""
    torch.manual_seed(0)
    found = SpeedrunGPT(config())
    for parameter in found.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return found


def tokens(B: int = 3, n: int = T) -> torch.Tensor:
    return torch.randint(V, (B, n), generator=torch.Generator().manual_seed(1))


def test_no_position_sees_a_later_one(model):
    idx = tokens()
    changed = idx.clone()
    changed[:, 9] = (changed[:, 9] + 1) % V
    before, after = model(idx), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_a_token_is_embedded_with_the_two_before_it(model):
    for block in model.transformer.h:  # without attention a position knows its triple alone
        torch.nn.init.zeros_(block.attn.c_proj.weight)

    def last(*idx: int) -> torch.Tensor:
        return model(torch.tensor([idx]))[0, -1]

    assert torch.allclose(last(9, 3, 1, 5), last(8, 3, 1, 5))
    assert not torch.isclose(last(3, 1, 5), last(4, 1, 5)).any()
    assert not torch.isclose(last(3, 1, 5), last(3, 2, 5)).any()
    assert torch.allclose(last(1, 5), last(0, 1, 5))  # token 0 comes before the first
    assert torch.allclose(last(5), last(0, 0, 5))


def test_triples_are_spread_over_the_table():
    """Rows hit by the 274,625 triples of 65 characters: nearly all, and none by many."""
    hits = torch.bincount(hashed(torch.arange(65**3), 2**13), minlength=2**13)
    assert len(hits) == 2**13
    assert hits.min() >= 25
    assert hits.max() <= 42  # 33.5 in the mean


def test_generated_tokens_are_those_of_the_plain_loop(model):
    """Also past the context, with dropout in the model, whose mode stays."""
    model.transformer.h[0].attn.resid_dropout.p = 0.5
    found = generate(model, tokens(2, 3), 20, temperature=0.0)
    assert model.training
    model.eval()
    expected = tokens(2, 3)
    for _ in range(20):
        logits = model(expected[:, -T:])[:, -1]
        expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"activation": "gelu"}, 'activation is gelu,.*set it to "gelu_tanh"'),
        ({"tie_weights": True}, r"tie_weights is True.*set it to false"),
        ({"init": "nanogpt"}, "init"),
        ({"residual": "bfloat16"}, "residual"),
        ({"checkpointing": True}, "checkpointing"),
        ({"vocab_size": None}, "vocab_size is null"),
        ({"n_head": 16}, "n_embd / n_head is even"),
    ],
)
def test_what_it_does_not_have_is_an_error(changes, named):
    with pytest.raises(UserError, match=named):
        SpeedrunGPT(config(**changes))


@pytest.mark.long
def test_compiled_it_computes_the_same(model):
    """Loss and gradients; the layers of a compiled CPU model are others."""
    idx, targets = tokens(), tokens().roll(1)
    plain = SpeedrunGPT(config())
    plain.load_state_dict(model.state_dict())
    compile_in_place(model, "cpu", "block")
    losses = [m(idx, targets) for m in (plain, model)]
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-5)
    for loss in losses:
        loss.backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-3, atol=1e-5)
