import dataclasses

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_lightning.errors import UserError
from gpt_lightning.model.attention import FUSED
from gpt_lightning.model.generate import (
    filter_min_p,
    filter_top_k,
    filter_top_p,
    generate,
    penalized,
    sample_token,
)
from gpt_lightning.model.gpt import GPT, GPTConfig


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=50, dropout=0.5))


@pytest.mark.parametrize("kernel", ["auto", *FUSED])
def test_text_needs_no_kernel_of_the_training(model, kernel, monkeypatch):
    """Its queries are in float32, which flash and cuDNN's kernel do not take on CUDA."""
    sdpa, enabled = torch.nn.functional.scaled_dot_product_attention, []

    def recording(*args, **kwargs):
        flags = torch.backends.cuda
        enabled.append((flags.math_sdp_enabled(), flags.cudnn_sdp_enabled()))
        return sdpa(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recording)
    other = GPT(dataclasses.replace(model.config, attention=kernel))
    other.load_state_dict(model.state_dict())
    trained_with = other.transformer.h[0].attn.attention
    prompt = torch.tensor([[1, 2, 3]])
    greedy = [generate(each, prompt, 12, temperature=0.0) for each in (model, other)]
    assert torch.equal(*greedy)
    # any kernel, but not cuDNN's, which plans for each length of the cache
    assert set(enabled) == {(True, False)}
    assert other.transformer.h[0].attn.attention is trained_with


def test_a_prompt_longer_than_the_context_keeps_its_end(model):
    long = torch.arange(20)[None] % 50
    out = generate(model, long, 3, temperature=0.0)
    assert torch.equal(out[:, :20], long)
    assert torch.equal(out[:, 20:], generate(model, long[:, -8:], 3, temperature=0.0)[:, 8:])


def test_same_seed_same_text_and_mode_is_restored(model):
    model.train()
    prompt = torch.tensor([[1]])
    a, b, c = (
        generate(model, prompt, 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)
    )
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert model.training


def test_a_row_with_a_generator_of_its_own_is_the_row_alone(model):
    """Also of another batch, and of other rows; one generator for all rows draws other numbers."""
    prompts = torch.tensor([[1, 2], [3, 4], [5, 6], [1, 2]])

    def sampled(rows, **kwargs):
        own = [torch.Generator().manual_seed(10 + row) for row in rows]
        return generate(model, prompts[rows], 12, 0.8, 20, own, **kwargs)

    together = sampled([0, 1, 2, 3])
    assert torch.equal(sampled([2, 0]), together[[2, 0]])
    for row in range(4):
        assert torch.equal(sampled([row]), together[[row]])
        single = torch.Generator().manual_seed(10 + row)
        assert torch.equal(generate(model, prompts[[row]], 12, 0.8, 20, single), together[[row]])
    assert not torch.equal(together[0], together[3])
    with pytest.raises(ValueError, match="shorter"):
        generate(model, prompts, 1, generator=[torch.Generator()])


def test_a_function_of_the_tokens_ends_the_rows(model):
    prompts = torch.tensor([[1, 2, 3], [4, 5, 6]])
    seen = []
    expected = generate(model, prompts, 12, temperature=0.0)
    found = generate(model, prompts, 12, 0.0, on_tokens=lambda t: seen.append(t) or len(seen) == 7)
    assert torch.equal(found, expected[:, : 3 + 7])
    assert seen == expected[:, 3:10].T.tolist()
    seen.clear()
    assert torch.equal(generate(model, prompts, 12, 0.0, on_tokens=seen.append), expected)
    assert seen == expected[:, 3:].T.tolist()
    assert not found.is_inference()


def test_padding_rows_are_never_sampled(model):
    with torch.no_grad():
        model.lm_head.weight[40:] = model.lm_head.weight[:10] * 50
    out = generate(
        model, torch.tensor([[1]]), 50, generator=torch.Generator().manual_seed(0), vocab_size=40
    )
    assert out.max() < 40


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (0.7, None, 0.9, None),
        (1.3, 20, None, 0.3),
        (0.7, 40, 0.8, 0.05),
        (1.0, 3, 0.99, 0.5),
        (2.0, 500, 0.3, 1.0),
    ],
)
def test_the_tokens_to_sample_from_are_those_of_transformers(
    temperature, top_k, top_p, min_p, ties
):
    from transformers.generation import logits_process as theirs

    logits = torch.randn(1000, 97, generator=torch.Generator().manual_seed(0)) * 3
    if ties:
        logits = logits.round()
    expected = theirs.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = theirs.TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = theirs.TopPLogitsWarper(top_p)(None, expected)
    if min_p is not None:
        expected = theirs.MinPLogitsWarper(min_p)(None, expected)
    ours = filter_top_p(filter_top_k(logits / temperature, top_k), top_p)
    assert torch.equal(filter_min_p(ours, min_p), expected)


def test_the_repetition_penalty_is_that_of_transformers(model):
    transformers = pytest.importorskip("transformers")
    penalty = transformers.RepetitionPenaltyLogitsProcessor(1.3)
    tokens = torch.tensor([[3, 1, 3], [2, 5, 6]])
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    assert torch.equal(penalized(logits, tokens, 1.3), penalty(tokens, logits))
    plain, other = (generate(model, tokens, 9, 0.0, repetition_penalty=p) for p in (1.0, 1e6))
    assert len(plain[0].unique()) < len(other[0].unique()) == 11  # no token comes again


def test_draws_are_from_the_tokens_that_every_filter_keeps():
    """The filters follow each other: top_p is a share of what temperature and top_k have left."""
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log().expand(2000, 4)
    generator = torch.Generator().manual_seed(0)

    def drawn(*how):
        temperature, top_k, top_p = how
        return set(sample_token(logits, temperature, top_k, generator, top_p)[:, 0].tolist())

    assert drawn(1.0, None, 0.65) == {0, 1}
    assert drawn(1.0, 3, 0.75) == {0, 1}  # 0.4 / 0.9 + 0.3 / 0.9 = 0.78
    assert drawn(1.0, None, 0.75) == {0, 1, 2}
    assert drawn(0.5, None, 0.75) == {0, 1}  # squares: (0.16 + 0.09) / 0.3 = 0.83
    assert drawn(0.0, None, 0.1) == {0}


@pytest.mark.parametrize(
    "how",
    [
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": 0},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"min_p": 0.0},
        {"repetition_penalty": 0.0},
        {"max_new_tokens": -1},
        {"max_new_tokens": 2.5},
        {"vocab_size": 0},
        {"dtype": "bfloat16"},
        {"model": None},
        {"model": nn.Linear(2, 2)},
        *({"idx": wrong} for wrong in ("a", None, [[1, 2], [1]], torch.ones(1, 2))),
        *({"idx": torch.ones(shape, dtype=torch.int64)} for shape in ([2], [1, 0], [0, 2])),
    ],
)
def test_python_has_the_types_and_bounds_of_the_command(model, how):
    with pytest.raises(UserError, match=rf"^{next(iter(how))} is .*(expected|must)"):
        generate(**{"model": model, "idx": torch.tensor([[1]]), "max_new_tokens": 1} | how)


@pytest.mark.parametrize("token", [-1, 50])
def test_tokens_outside_of_the_vocabulary_are_an_error(model, token):
    with pytest.raises(UserError, match=f" {token}.*; expected int64 .* from 0 to 49"):
        generate(model, torch.tensor([[1, token]]), 1)


def test_greedy_text_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    from gpt_lightning.model.huggingface import to_huggingface

    torch.manual_seed(1)
    ours = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=48, vocab_size=99))
    for parameter in ours.parameters():  # the small initial values repeat one token for ever
        torch.nn.init.normal_(parameter, std=0.3)
    torch.nn.init.normal_(ours.transformer.wpe.weight, std=3.0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 48, "vocab_size": 99}
    config = transformers.GPT2Config(**shape, bos_token_id=None, eos_token_id=None)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    theirs.load_state_dict(to_huggingface(ours.state_dict(), ours.config), strict=False)
    prompts = torch.randint(99, (5, 7))
    expected = theirs.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=41, do_sample=False
    )
    assert len(expected[:, 7:].unique()) > 5
    assert torch.equal(generate(ours, prompts, 41, temperature=0.0), expected)


def test_draws_have_the_probabilities_of_multinomial():
    """Frequencies of 100,000 draws; 0.008 is five standard errors of the largest probability."""
    logits = torch.tensor([[0.4, 0.0, 0.3, 0.2, 0.0, 0.1, 0.0]]).log().expand(100_000, 7)
    shared = torch.Generator().manual_seed(0)
    drawn = sample_token(logits, 1.0, None, shared)[:, 0]
    found = drawn.bincount(minlength=7) / len(drawn)
    assert torch.allclose(found, logits[0].exp(), atol=0.008)
    assert found[[1, 4, 6]].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 3), (1.0 - 2.0**-53, 1)])
def test_the_ends_of_the_random_numbers_draw_tokens_that_have_a_probability(
    uniform, expected, monkeypatch
):
    drawn = torch.tensor([[uniform]], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *shape, **how: drawn)
    logits = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]]).log()
    assert sample_token(logits, 1.0, None).item() == expected


@pytest.mark.parametrize(
    ("value", "temperature"), [(float("nan"), 0.0), (float("inf"), 1.0), (2.0, 1e-40)]
)
def test_logits_that_are_not_finite_are_an_error(value, temperature):
    logits = torch.zeros(2, 9)
    logits[1, 4] = value
    with pytest.raises(UserError, match="the logits over the temperature are not finite"):
        sample_token(logits, temperature, 5)


# ---- cost --------------------------------------------------------------------------------------


def naive_loop(model, idx, n, temperature, top_k, generator=None):
    """Return the tokens of nanoGPT's loop, which computes the whole window for each."""
    model.eval()
    for _ in range(n):
        with torch.no_grad():
            logits = model(idx[:, -model.config.block_size :])[:, -1]
        idx = torch.cat((idx, sample_token(logits, temperature, top_k, generator)), dim=1)
    return idx


@pytest.mark.parametrize("packed_from", [0, 1000])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, None), (0.8, None), (0.8, 5)])
def test_tokens_are_the_naive_loops(temperature, top_k, packed_from, model, monkeypatch):
    monkeypatch.setattr("gpt_lightning.model.generate.PACKED_FROM", packed_from)
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    seeds = (torch.Generator().manual_seed(7) for _ in range(2))
    expected = naive_loop(model, prompt, 12, temperature, top_k, next(seeds))
    assert torch.equal(generate(model, prompt, 12, temperature, top_k, next(seeds)), expected)


@pytest.mark.parametrize("packed_from", [0, 1000])
def test_a_token_costs_one_position_of_the_body_and_of_the_head(model, packed_from, monkeypatch):
    """Count positions; the naive loop would compute 3, 4, 5, 6, 7, 8, 8 in both."""
    monkeypatch.setattr("gpt_lightning.model.generate.PACKED_FROM", packed_from)
    positions = {"body": [], "head": []}
    of_width = {128: "body", 50: "head"}  # widths of c_fc and the head for 32 channels
    products = (torch.ops.aten.linear.default, torch.ops.mkldnn._linear_pointwise.default)

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in products and out.size(-1) in of_width:
                positions[of_width[out.size(-1)]].append(out.shape[:-1].numel())
            return out

    with Count():
        generate(model, torch.tensor([[1, 2, 3]]), 7, temperature=0.0)
    # the prompt, then one token each until 8 fill the context; the last slides
    assert positions["body"][::2] == [3, 1, 1, 1, 1, 1, 8]  # every second one: two layers
    assert positions["head"] == [1] * 7


def test_autocast_casts_no_weight_while_sampling(model):
    class Casts(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += func is torch.ops.aten._to_copy.default and args[0].dim() == 2
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        tokens = generate(model, torch.tensor([[1]]), 5)
    assert casts.n == 0
    assert not tokens.is_inference()  # a model that trains may read it


def test_a_wrapper_of_torch_compile_is_sampled_from(model):
    prompt = torch.tensor([[1, 2, 3]])
    expected = generate(model, prompt, 2, temperature=0.0)
    compiled = torch.compile(model, backend="eager")
    assert torch.equal(generate(compiled, prompt, 2, temperature=0.0), expected)


def test_a_compiled_model_is_not_compiled_again_for_sampling(model):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model.compile(backend="eager")
    generate(model, torch.tensor([[1, 2]]), 12)
    assert counters["stats"]["unique_graphs"] == 0
    model(torch.tensor([[1, 2]]))
    assert counters["stats"]["unique_graphs"] == 1  # it is counted, and it was compiled
