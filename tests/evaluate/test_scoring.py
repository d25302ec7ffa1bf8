"""Scorer: windows, padding, ranks, and equality with plain log-softmax."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from gpt_lightning.data.tokenizers import ByteTokenizer, CharTokenizer
from gpt_lightning.errors import MemoryExhaustedError, UserError
from gpt_lightning.evaluate import scoring
from gpt_lightning.evaluate.scoring import Request, Score, Scorer, windows
from tests.evaluate.made_up import tiny_gpt

T = 64
ROUNDING = 2e-6  # relative, of sums of float32 log-probabilities of other batches


def random_requests(n: int, seed: int = 0) -> list[Request]:
    """Requests of all kinds: a long context, a long continuation, one token, strides."""
    rng = np.random.default_rng(seed)
    sizes = [(3, 4), (1, 1), (100, 5), (1, 200), (70, 90), *rng.integers(1, 40, (n, 2)).tolist()]
    strides = [None, None, None, 16, 1]
    return [
        Request(rng.integers(0, 256, first + scored), first, stride)
        for (first, scored), stride in zip(sizes, strides + [None] * n, strict=True)
    ]


def plain(model, request: Request, vocab_size: int | None = None) -> Score:
    """The score of a request whose tokens fit into one window, or of its windows one by one."""
    total, count, greedy = 0.0, 0, True
    for tokens, n in windows(request, model.config.block_size):
        with torch.no_grad():
            logits = model(torch.tensor(tokens[None, :-1]))[0, :, :vocab_size]
        log_probs = F.log_softmax(logits, -1)[-n:]
        targets = torch.tensor(tokens[-n:])
        total += float(log_probs.gather(1, targets[:, None]).sum())
        greedy &= bool((log_probs.argmax(1) == targets).all())
        count += n
    return Score(total, count, greedy)


def assert_equal(found: list[Score], expected: list[Score]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert a.log_prob == pytest.approx(b.log_prob, rel=ROUNDING)
        assert a[1:] == b[1:]


@pytest.mark.parametrize(("batch_size", "chunk"), [(1, 1024), (4, 7), (100, 1024)])
def test_scores_are_those_of_the_plain_model_for_every_batch_size(batch_size, chunk, monkeypatch):
    monkeypatch.setattr(scoring, "CHUNK_TOKENS", chunk)  # positions whose logits are held
    model, requests = tiny_gpt(), random_requests(20)
    # the greedy continuation of a context
    context = requests[5].tokens[: requests[5].first]
    for _ in range(3):
        logits = model(torch.tensor(context[None]))
        context = np.append(context, int(logits[0, -1].argmax()))
    requests.append(Request(context, requests[5].first))
    found = Scorer(model, ByteTokenizer(), batch_size).score(requests)
    assert_equal(found, [plain(model, request) for request in requests])
    assert [score.greedy for score in found[-2:]] == [False, True]


@pytest.mark.parametrize("stride", [None, T, 16, 1])
@pytest.mark.parametrize("first", [1, 5, 90])
def test_windows_score_each_token_once_with_the_context_that_fits(first, stride):
    tokens = np.arange(first + 3 * T + 5)
    found = list(windows(Request(tokens, first, stride), T))
    scored = np.concatenate([window[-n:] for window, n in found])
    assert scored.tolist() == tokens[first:].tolist()
    for window, _ in found:
        assert np.all(np.diff(window) == 1)
        assert len(window) <= T + 1
        # as much context as fits: all, or the whole block
        assert window[0] == 0 or len(window) == T + 1
    for _, n in found[1:]:
        assert n <= (stride or T)
    assert found[0][1] == min(T, len(tokens) - first)


def test_rows_beyond_the_vocabulary_have_no_share():
    letters = CharTokenizer("".join(map(chr, range(97, 117))))
    padded = tiny_gpt(vocab_size=32)
    request = Request(np.arange(20) % 20, 3)
    (found,) = Scorer(padded, letters).score([request])
    assert_equal([found], [plain(padded, request, vocab_size=20)])
    assert found.log_prob > plain(padded, request).log_prob + 1


@pytest.mark.parametrize("n_embd", [8, 16])
def test_untied_narrow_and_bf16_models(n_embd):
    model = tiny_gpt(n_embd=n_embd, tie_weights=False)
    requests = random_requests(3)
    expected = [plain(model, request) for request in requests]
    assert_equal(Scorer(model, ByteTokenizer()).score(requests), expected)
    rounded = Scorer(model, ByteTokenizer(), dtype=torch.bfloat16).score(requests)
    for a, b in zip(rounded, expected, strict=True):
        assert a.log_prob == pytest.approx(b.log_prob, rel=0.05)
        assert a.log_prob != b.log_prob


def test_the_model_keeps_its_mode_its_weights_and_the_random_numbers():
    model = tiny_gpt(dropout=0.5).train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    before = [p.clone() for p in model.parameters()]
    first = Scorer(model, ByteTokenizer()).score(random_requests(2))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, before, model.parameters()))
    assert_equal(first, [plain(model.eval(), r) for r in random_requests(2)])  # no dropout


def test_ranks_share_the_windows_and_all_have_the_scores(monkeypatch):
    """Two ranks, one after the other: what rank 1 hands over is what rank 0 gathers."""
    model, requests = tiny_gpt(), random_requests(9)
    alone = Scorer(model, ByteTokenizer(), 4).score(requests)
    parts = {}

    def score(rank: int) -> list[Score]:
        def gather(found: list, own: list) -> None:
            parts[rank] = own
            found[:] = [parts.get(0, []), parts.get(1, [])]

        monkeypatch.setattr(scoring.dist, "is_initialized", lambda: True)
        monkeypatch.setattr(scoring.dist, "get_world_size", lambda: 2)
        monkeypatch.setattr(scoring.dist, "get_rank", lambda: rank)
        monkeypatch.setattr(scoring.dist, "all_gather_object", gather)
        return Scorer(model, ByteTokenizer(), 4).score(requests)

    score(1)
    assert_equal(score(0), alone)
    assert abs(len(parts[0]) - len(parts[1])) <= 1


def test_a_text_without_context_follows_the_tokenizers_start():
    scorer = Scorer(tiny_gpt(), ByteTokenizer())
    assert scorer.continuation("", "ab").tokens.tolist() == [*b"\nab"]
    # spaces at the end of the context belong to the text
    request = scorer.continuation("a  ", "b")
    assert (request.tokens.tolist(), request.first) == ([*b"a  b"], 1)


def test_broken_weights_and_too_little_memory_are_one_line(monkeypatch):
    model = tiny_gpt().train()
    scorer = Scorer(model, ByteTokenizer(), 3)
    with torch.no_grad():
        model.transformer.ln_f.weight[0] = math.nan
    with pytest.raises(UserError, match="not finite"):
        scorer.score(random_requests(1))

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(scorer, "_score_batch", full)
    with pytest.raises(MemoryExhaustedError, match="lower batch_size"):
        scorer.score(random_requests(1))
    assert model.training


def test_a_request_is_greedy_if_all_its_windows_are(monkeypatch):
    scorer = Scorer(tiny_gpt(), ByteTokenizer(), 1)
    hits = iter([False, True])
    monkeypatch.setattr(scorer, "_score_batch", lambda batch: [(0, -1.0, 1, next(hits))])
    assert scorer.score([Request(np.arange(T + 2), 1)]) == [Score(-2.0, 2, False)]


def test_each_batch_is_a_sign_of_progress():
    beats = []
    scorer = Scorer(tiny_gpt(), ByteTokenizer(), 2)
    scorer.beat = lambda: beats.append(1)
    scorer.score([Request(np.arange(9), 3)] * 5)
    assert len(beats) == 3
