"""The model of the tests of `sample` and `play`."""

from types import SimpleNamespace

import pytest
import torch

from gpt_lightning.data.tokenizers import ByteTokenizer
from gpt_lightning.model.gpt import GPT, GPTConfig


@pytest.fixture
def model(monkeypatch, tmp_path):
    """The model and tokenizer that `sample a.ckpt` loads, in a folder of its own."""
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(2, 2, 32, block_size=32, vocab_size=300)).eval()
    loaded = [gpt, ByteTokenizer()]
    found = SimpleNamespace(source="a.ckpt", model=lambda: gpt)
    monkeypatch.setattr("gpt_lightning.runs.sources.read_source", lambda *given: found)
    monkeypatch.setattr("gpt_lightning.runs.sources.tokenizer_of", lambda found: loaded[1])
    monkeypatch.chdir(tmp_path)
    return loaded
