"""`gpt-lightning bench generate` on a tiny model."""

import pytest

from gpt_lightning.bench import generate
from gpt_lightning.bench.core import results as folders
from gpt_lightning.cli import main


def measure(monkeypatch, tokens=24, every=8):
    """The measurement, and the lengths that the naive loop was timed at."""
    lengths = []
    transformer = "gpt_lightning.model.gpt.Transformer.forward"
    from gpt_lightning.model.generate import CachedAttention
    from gpt_lightning.model.gpt import Transformer

    original = Transformer.forward

    def forward(self, idx, start=0):
        cached = isinstance(self.h[0].attn.attention, CachedAttention)
        lengths.append(None if cached else idx.size(1))
        return original(self, idx, start)

    monkeypatch.setattr(transformer, forward)
    row = generate.GenerateRow("cpu", "fp32", "tiny", prompt=3, tokens=tokens)
    found = generate.measure_generate(row, [1, 1, 16, 32, 65], every, rounds=2)
    return found, lengths


def test_both_ways_are_measured_and_agree(monkeypatch):
    found, lengths = measure(monkeypatch)
    naive = [length for length in lengths if length is not None]
    # once before the clock, once for the agreement, and a block a round
    assert naive[:3] == [7, 15, 23]
    assert len(naive) == 3 + 3 + 2 * 3
    assert lengths.count(None) == 3 * 24  # the text, and a block a round
    assert found["agreement"] == 1.0
    assert found["ratio_min"] <= found["ratio"] <= found["ratio_max"]
    assert found["cached_tokens_per_sec"] == pytest.approx(1e3 / found["cached_ms"])


def test_a_cache_that_forgets_is_seen(monkeypatch):
    from gpt_lightning.model.generate import CachedAttention

    monkeypatch.setattr(CachedAttention, "__call__", lambda self, *args: self.attention(*args))
    monkeypatch.setattr("gpt_lightning.model.gpt.GPT._init_normal", spread)
    assert measure(monkeypatch)[0]["agreement"] < 1.0


def spread(self, residual_std):
    for parameter in self.parameters():
        parameter.data.normal_()


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--sizes", "huge"], "error: --sizes is 'huge'"),
        (["--rounds", "0"], "error: rounds is 0; it must be at least 1"),
        (["--prompts", "0"], "error: --prompts is '0': 0 is below 1"),
        (["--tokens", "8"], "error: --every 16 is more than --tokens 8"),
    ],
)
def test_mistakes_take_one_line(args, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "generate", *args]) == 2
    assert capsys.readouterr().err.startswith(line)
    assert not folders.ROOT.exists()
