"""`gpt-lightning bench generate` on a tiny model."""

import pytest
import torch

from gpt_lightning.bench import generate
from gpt_lightning.model.fast.decoder import Decoder
from gpt_lightning.model.gpt import Transformer
from gpt_lightning.tables.worker import call


@pytest.fixture(autouse=True)
def smaller(monkeypatch):
    tiny = {"size": "1/1/16", "context": 32, "vocab_size": 65}
    monkeypatch.setitem(generate.MODELS, "tiny", tiny)


@pytest.fixture
def calls(monkeypatch):
    """Tokens (B, T) of each forward pass: of the naive loop, and of ours."""
    noted = {"naive": [], "cached": []}

    def note(name, original):
        def forward(self, idx, *rest):
            noted[name].append(tuple(idx.shape))
            return original(self, idx, *rest)

        return forward

    monkeypatch.setattr(Transformer, "forward", note("naive", Transformer.forward))
    monkeypatch.setattr(Decoder, "__call__", note("cached", Decoder.__call__))
    return noted


def measure(against="naive", batch=1, tokens=24, every=8, rounds=2):
    sizes = {"size": "tiny", "batch": batch, "prompt": 3, "tokens": tokens, "against": against}
    row = {"device": "cpu", "dtype": "fp32", "every": every, "rounds": rounds}
    return call(generate.measure_generate, row | sizes)


def test_both_ways_are_measured_and_agree(calls):
    found = measure()
    # once before the clock, once for the agreement, and a block a round
    assert [T for _, T in calls["naive"][:3]] == [7, 15, 23]
    assert len(calls["naive"]) == 3 + 3 + 2 * 3
    assert len(calls["cached"]) == 3 * 24  # the text, and a block a round
    assert found["agreement"] == 1.0
    assert found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert found["cached_tokens_per_sec"] == pytest.approx(1e3 / found["cached_ms"])
    assert found["prepare_ms"] > 0


def test_transformers_draws_as_many_tokens_with_our_weights(monkeypatch):
    transformers = pytest.importorskip("transformers")
    texts, weights = [], []
    original = transformers.GPT2LMHeadModel.generate

    def sampled(self, *args, **kwargs):
        weights.append(self.transformer.wte.weight.detach().clone())
        texts.append(original(self, *args, **kwargs))
        assert (kwargs["do_sample"], kwargs["temperature"], kwargs["top_k"]) == (True, 0.8, 200)
        return texts[-1]

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "generate", sampled)
    torch.manual_seed(0)
    found = measure("transformers", batch=3)
    assert [tuple(text.shape) for text in texts] == [(3, 3 + 24)] * 2
    assert weights[0].shape == (65, 16)
    assert found["ratio"] == pytest.approx(found["other_ms"] / found["cached_ms"], rel=1.0)


def test_times_are_those_of_a_token_of_one_sequence(monkeypatch):
    """Each call takes as long as its sequences have tokens, by a clock of the test."""
    clock = [0.0]
    step = Decoder.__call__

    def forward(self, idx, start, caches):
        clock[0] += len(idx) * 1e-3
        return step(self, idx, start, caches)

    monkeypatch.setattr(Decoder, "__call__", forward)
    monkeypatch.setattr(generate.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(
        generate, "transformers_generate", lambda *args: lambda idx: clock.append(clock.pop() + 0.2)
    )
    found = measure("transformers", batch=4)
    assert found["cached_ms"] == pytest.approx(1.0)
    assert found["other_ms"] == pytest.approx(200 / (4 * 24))
