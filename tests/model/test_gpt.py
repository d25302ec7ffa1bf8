import dataclasses
import math

import pytest
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.model.attention import naive_attention
from gpt_lightning.model.gpt import GPT, SIZES, GPTConfig
from gpt_lightning.model.loss import NarrowHead

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=101)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 101, shape, generator=torch.Generator().manual_seed(seed))


def test_published_sizes_have_their_exact_parameter_counts():
    counts = {}
    for name, config in SIZES.items():
        with torch.device("meta"):
            counts[name] = GPT(config).num_params()
    assert counts == {
        "gpt2": 124_439_808,
        "gpt2-medium": 354_823_168,
        "gpt2-large": 774_030_080,
        "gpt2-xl": 1_557_611_200,
    }


def test_a_traced_model_computes_the_same():
    model, idx = GPT(TINY).eval(), tokens(2, 16)
    assert torch.equal(torch.jit.trace(model, idx)(idx), model(idx))


@pytest.mark.parametrize("attention", ["sdpa", "naive"])
def test_no_logit_depends_on_a_later_token(attention):
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(TINY, attention=attention, tie_weights=False)).eval()
    embedded = []
    model.transformer.wte.register_forward_hook(
        lambda module, args, out: embedded.append(out.requires_grad_().retain_grad() or out)
    )
    t = 7
    model(tokens(1, 16))[0, t].sum().backward()
    reached = embedded[0].grad[0].abs().sum(dim=-1) > 0  # (T,)
    assert reached[: t + 1].all()
    assert not reached[t + 1 :].any()


def test_attention_dropout_drops_and_keeps_the_mean():
    q = k = torch.zeros(1, 1, 2, 8)  # equal scores: every weight of row t is 1 / (t + 1)
    v = torch.ones(1, 1, 2, 8)
    torch.manual_seed(0)
    rows = torch.stack([naive_attention(q, k, v, 0.5)[0, 0, 0, 0] for _ in range(2000)])
    assert set(rows.tolist()) == {0.0, 2.0}
    assert abs(rows.mean().item() - 1.0) < 0.1  # 4.5 standard errors of 1 / sqrt(2000)


def test_initialization_follows_gpt2():
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=1000))
    std = {name: p.std().item() for name, p in model.named_parameters() if p.dim() == 2}
    residual = 0.02 / (2 * 8) ** 0.5
    for name, value in std.items():
        expected = residual if name.endswith("c_proj.weight") else 0.02
        assert value == pytest.approx(expected, rel=0.05), (
            name
        )  # 8,192 draws or more: 1% is a standard error
    assert all((p == 0).all() for name, p in model.named_parameters() if name.endswith(".bias"))


def test_default_initialization_is_pytorchs():
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(TINY, init="default"))
    bound = 32**-0.5  # nn.Linear draws uniformly within 1 / sqrt(fan_in)
    weight = model.transformer.h[0].attn.c_attn.weight
    assert bound * 0.95 < weight.abs().max().item() <= bound


def test_tied_weights_are_one_tensor_and_untied_are_two():
    tied = GPT(TINY)
    untied = GPT(dataclasses.replace(TINY, tie_weights=False))
    assert tied.lm_head.weight is tied.transformer.wte.weight
    assert untied.num_params() - tied.num_params() == 101 * 32
    assert untied.num_params(embeddings=False) == tied.num_params(embeddings=False)


def test_num_params_without_embeddings_is_nanogpts_count():
    config = GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256, vocab_size=65, bias=False)
    assert GPT(config).num_params(embeddings=False) == 10_646_784


def test_the_number_of_matrix_parameters_before_the_vocabulary_is_known():
    config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=None)
    assert config.n_matrix_params == (16 + 12 * 2 * 32) * 32
    assert dataclasses.replace(config, vocab_size=9).n_matrix_params == (25 + 12 * 2 * 32) * 32


def test_loss_skips_targets_of_minus_100():
    model = GPT(TINY)
    idx, targets = tokens(2, 16), tokens(2, 16, seed=1)
    padded = targets.clone()
    padded[1] = -100
    torch.testing.assert_close(model(idx, padded), model(idx[:1], targets[:1]))


def test_narrow_head_gradient_is_accurate():
    """One running float32 sum over 50,257 terms would be ten times worse."""
    torch.manual_seed(0)
    x = torch.randn(4, 32, 6, requires_grad=True)
    head = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=6, block_size=8)).lm_head
    assert isinstance(head, NarrowHead)
    weight = torch.nn.init.normal_(head.weight, std=0.3).detach()
    logits = head(x)
    torch.testing.assert_close(logits, x @ weight.T)
    upstream = logits.softmax(-1).detach()
    logits.backward(upstream)
    exact = upstream.double() @ weight.double()
    assert ((x.grad - exact).norm() / exact.norm()).item() < 1.5e-6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_embd": 33}, "n_embd 33 is not divisible by n_head 2"),
        ({"n_layer": 0}, "n_layer is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"block_size": -4}, "block_size is -4"),
        ({"loss_chunk": 0}, "loss_chunk is 0"),
        ({"activation": "relu"}, "model.config.activation is 'relu'; expected gelu_tanh, gelu"),
        ({"bias": 5}, "model.config.bias is '5'; expected bool"),
        ({"attention": "x"}, "model.config.attention is 'x'; expected auto, sdpa"),
        ({"n_layer": "two"}, "model.config.n_layer is 'two'; expected int"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(TINY, **change)


def test_unknown_vocabulary_is_refused():
    with pytest.raises(UserError, match="vocab_size is null"):
        GPT(dataclasses.replace(TINY, vocab_size=None))


def test_nanogpts_initialization_draws_as_its_program_does():
    config = GPTConfig(
        n_layer=2, n_head=2, n_embd=8, block_size=4, vocab_size=11, bias=True, init="nanogpt"
    )
    torch.manual_seed(1337)
    ours = GPT(config)
    torch.manual_seed(1337)
    theirs = GPT(dataclasses.replace(config, init="default"))  # PyTorch's draws come first in both
    for module in theirs.modules():  # self.apply(self._init_weights)
        if isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
            if getattr(module, "bias", None) is not None:
                torch.nn.init.zeros_(module.bias)
    for name, weight in theirs.named_parameters():  # and then the residual projections again
        if name.endswith("c_proj.weight"):
            torch.nn.init.normal_(weight, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name
