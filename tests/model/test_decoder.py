"""The decoder computes what the model computes, with fewer positions and other layouts."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from gpt_lightning.model.fast.cpu_kernels import install
from gpt_lightning.model.fast.decoder import Decoder, can_pack
from gpt_lightning.model.generate import generate
from gpt_lightning.model.gpt import GPT, GPTConfig


def make_model(**changes):
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 8, "vocab_size": 50}
    return GPT(GPTConfig(**{**shape, "dropout": 0.5, **changes}))


@pytest.fixture
def model():
    return make_model()


def decoded(model, idx, prompt=3, **how):
    """Return the logits after the prompt and after each later token, (B, T - prompt + 1, V)."""
    with torch.inference_mode():
        decoder = Decoder(model, **how)
        caches = decoder.new_caches(*idx.shape)
        parts = [decoder(idx[:, :prompt], 0, caches)]
        parts += [decoder(idx[:, t : t + 1], t, caches) for t in range(prompt, idx.size(1))]
    return torch.stack(parts, dim=1)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bias": False, "activation": "gelu"},
        {"tie_weights": False, "attention": "naive"},
        {"n_embd": 8, "residual": "bfloat16"},  # a narrow head
    ],
)
def test_logits_are_the_models_in_evaluation_mode(changes, pack):
    model = make_model(**changes).train()
    idx = torch.randint(50, (3, 8))
    found = decoded(model, idx, pack=pack)
    assert model.training
    # float32 sums in another order; logits are some 0.3
    torch.testing.assert_close(found, model.eval()(idx)[:, 2:], atol=1e-5, rtol=0)


def test_a_model_with_a_cpus_layers_is_decoded_as_it_was(model):
    idx = torch.randint(50, (3, 8))
    expected = decoded(model, idx)
    install(model)
    assert torch.equal(decoded(model, idx), expected)


def test_bfloat16_rounds_and_keeps_the_dtype_of_the_stream(model):
    idx = torch.randint(50, (2, 8))
    full, half = (decoded(model, idx, dtype=dtype) for dtype in (None, torch.bfloat16))
    assert half.dtype == torch.float32
    assert 1e-5 < (full - half).abs().max() < 0.05  # bfloat16 has eight bits
    plain = decoded(model, idx, dtype=torch.bfloat16, pack=False)
    torch.testing.assert_close(plain, half, atol=0.02, rtol=0)  # the order of sums differs


def test_plain_products_share_the_parameters(model):
    """A second copy is made for another layout or dtype alone."""
    assert Decoder(model, pack=False).head is model.lm_head
    assert Decoder(model, pack=True).head is not model.lm_head
    assert Decoder(model, torch.bfloat16, pack=False).head is not model.lm_head


def test_a_layer_with_an_adapter_is_called_as_it_is(model):
    """Its weight alone would be the model without the adapter."""

    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + self.adapter(x)

    for block in model.transformer.h:
        block.mlp.c_fc.__class__ = Adapted
        block.mlp.c_fc.adapter = nn.Linear(32, 128)
    idx = torch.randint(50, (2, 8))
    expected = model.eval()(idx)[:, 2:]
    torch.testing.assert_close(decoded(model, idx), expected, atol=1e-5, rtol=0)
    rounded = decoded(model, idx, dtype=torch.bfloat16)
    assert (rounded - expected).abs().max() < 0.05


def test_the_caches_are_one_buffer_of_the_size_that_is_needed(model):
    decoder = Decoder(model)
    caches = decoder.new_caches(3, 5)
    assert [cache.shape for cache in caches] == [(2, 3, 2, 5, 16)] * 2
    with torch.no_grad():
        decoder(torch.ones(3, 4, dtype=torch.int64), 0, caches)
        before = caches[0].clone()
        decoder(torch.ones(3, 1, dtype=torch.int64), 4, caches)
        assert torch.equal(caches[0][:, :, :, :4], before[:, :, :, :4])
        with pytest.raises(RuntimeError, match="exceeds dimension size"):
            decoder(torch.ones(3, 1, dtype=torch.int64), 5, caches)


def test_a_decoder_serves_several_texts(model):
    prompt = torch.tensor([[1, 2, 3]])
    decoder = Decoder(model, torch.bfloat16)
    first = generate(decoder, prompt, 12, temperature=0.0)
    assert torch.equal(generate(model, prompt, 12, 0.0, dtype=torch.bfloat16), first)
    generate(decoder, torch.tensor([[4]]), 12, temperature=0.0)
    assert torch.equal(generate(decoder, prompt, 12, temperature=0.0), first)
    assert decoder.device == torch.device("cpu")


def test_only_bfloat16_products_need_a_cpu_with_bfloat16(monkeypatch):
    weight = torch.ones(2, 2)
    for supported in (True, False):
        units = {"avx512_bw": supported, "avx512_bf16": False}  # oneDNN computes in float32 there
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda units=units: units, raising=False)
        assert can_pack(weight, torch.bfloat16) is supported
        assert can_pack(weight, torch.float32)
        assert not can_pack(weight, torch.float16)
        assert not can_pack(weight.to("meta"), torch.float32)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_linear_pointwise=None))
    assert can_pack(weight, torch.float32) is False  # a build without the other operator
