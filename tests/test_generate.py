import pytest
import torch

from gpt_lightning.generate import filter_top_k, generate, sample_token
from gpt_lightning.model import GPT, GPTConfig


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
