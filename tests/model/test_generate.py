import dataclasses
from types import SimpleNamespace

import pytest
import torch

from gpt_lightning.commands.sample import sample
from gpt_lightning.data.tokenizers import ByteTokenizer
from gpt_lightning.model.attention import FUSED
from gpt_lightning.model.generate import (
    can_pack,
    filter_top_k,
    generate,
    key_value_cache,
    prepack_for_decoding,
    sample_token,
)
from gpt_lightning.model.gpt import GPT, GPTConfig


@pytest.fixture
def model():
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=50, dropout=0.5))


def test_the_cache_changes_nothing(model):
    """Greedy text within and past the context equals recomputing everything at each step."""
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6]])
    expected = prompt
    model.eval()
    for _ in range(12):
        logits = model(expected[:, -8:])[:, -1]
        expected = torch.cat((expected, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(generate(model, prompt, 12, temperature=0.0), expected)


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


def test_padding_rows_are_never_sampled(model):
    with torch.no_grad():
        model.lm_head.weight[40:] = model.lm_head.weight[:10] * 50
    out = generate(
        model, torch.tensor([[1]]), 50, generator=torch.Generator().manual_seed(0), vocab_size=40
    )
    assert out.max() < 40


def test_top_k_keeps_the_k_largest():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    assert filter_top_k(logits, 2).tolist() == [[-torch.inf, 3.0, 2.0, -torch.inf]]
    assert filter_top_k(logits, 9) is logits
    assert filter_top_k(logits, None) is logits


def test_temperature_sharpens():
    logits = torch.tensor([[0.0, 1.0]]).expand(4000, 2)
    generator = torch.Generator().manual_seed(0)
    cold, hot = (sample_token(logits, t, None, generator).float().mean().item() for t in (0.5, 2.0))
    # sigmoid(2) = 0.881 and sigmoid(0.5) = 0.622; 0.03 is four standard errors
    assert cold == pytest.approx(0.881, abs=0.03)
    assert hot == pytest.approx(0.622, abs=0.03)


# ---- cost and packed weights ---------------------------------------------------------------------


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
    weights = {
        "body": model.transformer.h[0].mlp.c_fc.weight,
        "head": model.lm_head.weight,  # which is the embedding's too; that only looks up
    }

    def count(module, args):
        for where, weight in weights.items():
            if getattr(module, "weight", None) is weight and args[0].is_floating_point():
                positions[where].append(args[0].shape[:-1].numel())

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        generate(model, torch.tensor([[1, 2, 3]]), 7, temperature=0.0)
    finally:
        hook.remove()
    # the prompt, then one token each until 8 fill the context; the last slides
    assert positions == {"body": [3, 1, 1, 1, 1, 1, 8], "head": [1] * 7}


def test_the_cache_is_one_buffer_of_the_size_that_is_needed(model):
    model.eval()
    with torch.no_grad(), key_value_cache(model, 5) as caches:
        model.transformer(torch.tensor([[1, 2, 3]]))
        before = caches[0].k.data_ptr()
        model.transformer(torch.tensor([[4]]), start=3)
        assert caches[0].k.data_ptr() == before
        assert caches[0].k.shape == (1, 2, 5, 16)
        assert caches[0].length == 4
        model.transformer(torch.tensor([[4]]), start=4)
        with pytest.raises(AssertionError, match="room"):
            model.transformer(torch.tensor([[4]]), start=5)


def test_a_model_forgets_its_cache(model):
    """A packed copy does so, too: the sample command uses one for all its texts."""
    prompt = torch.tensor([[1, 2, 3]])
    plain = model.transformer.h[0].attn.attention
    twin = prepack_for_decoding(model, torch.bfloat16, pack=False)
    first = generate(twin, prompt, 12, temperature=0.0, dtype=torch.bfloat16)
    assert twin.transformer.h[0].attn.attention is plain
    assert torch.equal(generate(twin, prompt, 12, temperature=0.0, dtype=torch.bfloat16), first)
    with pytest.raises(AssertionError, match="room"), key_value_cache(model, 2):
        model.transformer(prompt)
    assert model.transformer.h[0].attn.attention is plain


@pytest.mark.parametrize("pack", [False, True])
def test_a_twin_shares_parameters_and_rounds_in_bfloat16_alone(model, pack):
    model.train()
    idx = torch.randint(50, (2, 8))
    full, half = (prepack_for_decoding(model, dtype, pack) for dtype in (None, torch.bfloat16))
    assert {id(p) for p in full.parameters()} == {id(p) for p in model.parameters()}
    assert model.training
    assert not full.training
    expected = model.eval()(idx)
    # float32 sums in another order; logits are some 0.3
    torch.testing.assert_close(full.lm_head(full.transformer(idx)), expected, atol=1e-5, rtol=0)
    rounded = half.lm_head(half.transformer(idx))
    assert rounded.dtype == torch.float32
    assert 1e-5 < (rounded - expected).abs().max() < 0.05  # bfloat16 has eight bits
    assert prepack_for_decoding(half, torch.bfloat16) is half


def test_bfloat16_samples_are_the_float32_ones_mostly(model):
    prompt = torch.arange(50)[:, None]
    full, half = (generate(model, prompt, 1, 0.0, dtype=d)[:, 1] for d in (None, torch.bfloat16))
    assert (full == half).float().mean() > 0.8


def test_autocast_casts_no_weight_while_sampling(model):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Casts(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.n += func is torch.ops.aten._to_copy.default and args[0].dim() == 2
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        tokens = generate(model, torch.tensor([[1]]), 5)
    assert casts.n == 0
    assert not tokens.is_inference()  # a model that trains may read it


def test_a_compiled_model_is_not_compiled_again_for_sampling(model):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    model.compile(backend="eager")
    generate(model, torch.tensor([[1, 2]]), 12)
    assert counters["stats"]["unique_graphs"] == 0
    model(torch.tensor([[1, 2]]))
    assert counters["stats"]["unique_graphs"] == 1  # it is counted, and it was compiled


@pytest.mark.parametrize(
    ("precision", "asked", "used", "why"),
    [
        ("bf16-mixed", "auto", "bf16", "it has it"),
        ("16-mixed", "auto", "fp32", "it has it"),
        ("32-true", "auto", "fp32", "it has it"),
        ("bf16-mixed", "fp32", "fp32", "as set"),
    ],
)
def test_the_commands_products(precision, asked, used, why, monkeypatch, tmp_path, capsys):
    model = GPT(GPTConfig(1, 1, 8, block_size=8, vocab_size=256)).eval()
    found = SimpleNamespace(source="a.ckpt", model=lambda: model)
    monkeypatch.setattr("gpt_lightning.runs.sources.read_source", lambda path: found)
    monkeypatch.setattr("gpt_lightning.runs.sources.tokenizer_of", lambda _: ByteTokenizer())
    monkeypatch.setattr(
        "gpt_lightning.hardware.precision.fastest_precision",
        lambda device: (precision, "it has it"),
    )
    dtypes = []
    monkeypatch.setattr(
        "gpt_lightning.model.generate.generate",
        lambda model, start, *rest: dtypes.append(rest[-1]) or start,
    )
    sample(str(tmp_path / "a.ckpt"), max_new_tokens=1, device="cpu", dtype=asked)
    assert dtypes == [torch.bfloat16 if used == "bf16" else None]
    assert capsys.readouterr().out.startswith(f"# a.ckpt, in {used}: {why}\n")


def test_only_bfloat16_products_need_a_cpu_with_bfloat16(monkeypatch):
    weight = torch.ones(2, 2)
    for supported in (True, False):
        monkeypatch.setattr(
            torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda bf16=supported: bf16
        )
        assert can_pack(weight, torch.bfloat16) is supported
        assert can_pack(weight, torch.float32)
        assert not can_pack(weight, torch.float16)
        assert not can_pack(weight.to("meta"), torch.float32)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_linear_pointwise=None))
    assert can_pack(weight, torch.float32) is False  # a build without the other operator
