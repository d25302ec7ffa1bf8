"""The systems course's model: its counts, its formulas, and the FLOPs that torch counts."""

import math
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt_lightning.bench.models import SHAPES, CourseModel, Peer, RMSNorm, make_model
from gpt_lightning.model.flops import flops_per_token
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.tables.worker import SkippedError

TINY = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=12, vocab_size=50)


@pytest.mark.parametrize(
    ("size", "n_params"),
    [
        # 2 V C + n_layer (4 C^2 + 3 C 4 C + 2 C) + C
        ("small", 128_625_408),  # a published report: 128.6 M
        ("medium", 423_183_360),
        ("large", 969_411_840),
        ("xl", 1_998_235_200),
        ("2.7B", 3_406_809_600),  # 3,407 M
    ],
)
def test_parameters_are_those_of_the_course(size, n_params):
    with torch.device("meta"):
        model = CourseModel(GPTConfig(*SHAPES[size], 256, 10_000))
    assert model.num_params() == n_params
    assert model.num_params(embeddings=False) == n_params - 10_000 * SHAPES[size][2]
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_flops_are_those_that_torch_counts():
    torch.manual_seed(0)
    model = CourseModel(TINY)
    B, T = 3, TINY.block_size
    idx, targets = torch.randint(TINY.vocab_size, (2, B, T))
    with FlopCounterMode(display=False) as counter:
        model(idx, targets).backward()
    norms = sum(m.weight.numel() for m in model.modules() if isinstance(m, RMSNorm))
    matrices = model.num_params(embeddings=False) - norms
    # the full square of the attention, and each product twice in the backward
    per_token = flops_per_token(matrices, TINY.n_layer, TINY.n_embd, T)
    assert counter.get_total_flops() == per_token * B * T


def by_definition(model: CourseModel, idx: torch.Tensor) -> torch.Tensor:
    """The logits, with complex numbers as rotations and nothing of the model but its weights."""
    weights = dict(model.named_parameters())
    (B, T), nh = idx.shape, model.config.n_head
    hs = model.config.n_embd // nh
    turns = torch.arange(T)[:, None] * 10_000.0 ** (-torch.arange(hs // 2) * 2 / hs)
    rotations = torch.polar(torch.ones_like(turns), turns)  # (T, hs / 2)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / ((x**2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def rotated(x: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(B, nh, T, hs // 2, 2))
        return torch.view_as_real(pairs * rotations).reshape(x.shape)

    x = weights["transformer.wte.weight"][idx]
    for i in range(model.config.n_layer):
        block = f"transformer.h.{i}"

        def linear(y: torch.Tensor, name: str, block: str = block) -> torch.Tensor:
            return y @ weights[f"{block}.{name}.weight"].T

        y = norm(x, f"{block}.ln_1")
        q, k, v = (
            linear(y, f"attn.{name}_proj").reshape(B, T, nh, hs).movedim(2, 1) for name in "qkv"
        )
        scores = rotated(q) @ rotated(k).mT / math.sqrt(hs)
        visible = torch.ones(T, T).tril() > 0
        y = torch.where(visible, scores, -torch.inf).softmax(-1) @ v
        x = x + linear(y.movedim(1, 2).reshape(B, T, -1), "attn.out_proj")
        y = norm(x, f"{block}.ln_2")
        gate = linear(y, "mlp.w1")
        x = x + linear(gate * gate.sigmoid() * linear(y, "mlp.w3"), "mlp.w2")
    return norm(x, "transformer.ln_f") @ weights["lm_head.weight"].T


def test_the_model_is_its_definition():
    torch.manual_seed(0)
    model = CourseModel(TINY)
    for parameter in model.parameters():  # norms too: ones would hide where they are
        torch.nn.init.normal_(parameter, std=0.3)
    idx, targets = torch.randint(TINY.vocab_size, (2, 2, 12))
    logits = by_definition(model, idx)
    torch.testing.assert_close(model(idx), logits)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(model(idx, targets), loss)


def test_weights_are_drawn_within_three_deviations():
    torch.manual_seed(0)
    model = CourseModel(GPTConfig(1, 2, 64, 8, 1000))
    std = math.sqrt(2 / (64 + 4 * 64))
    weight = model.transformer.h[0].mlp.w1.weight
    assert float(weight.std()) == pytest.approx(std, rel=0.05)
    assert weight.abs().max() <= 3 * std
    assert float(model.transformer.wte.weight.std()) == pytest.approx(1.0, rel=0.05)


def test_checkpointing_changes_no_gradient():
    torch.manual_seed(0)
    model = CourseModel(TINY)
    idx, targets = torch.randint(TINY.vocab_size, (2, 2, 12))
    gradients = []
    for model.transformer.checkpointing in (False, True):
        model.zero_grad()
        model(idx, targets).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for plain, checkpointed in zip(*gradients, strict=True):
        torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)


def test_the_peer_is_our_model_with_weights_of_its_own():
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = make_model("gpt2", "2/2/32", 16)
    peer = Peer(model)
    assert sum(p.numel() for p in peer.parameters()) == model.num_params()
    x, y = (torch.randint(10_000, (2, 16)) for _ in range(2))
    for _ in range(2):  # an update of one is none of the other
        losses = [m(x, y) for m in (model, peer)]
        # float32 sums in another order
        assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-4)
        for m, loss in zip((model, peer), losses, strict=True):
            loss.backward()
            torch.optim.SGD(m.parameters(), lr=0.1).step()


def test_without_transformers_the_row_is_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SkippedError, match="transformers is missing"):
        Peer(make_model("gpt2", "2/2/32", 16))
