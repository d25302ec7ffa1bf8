import copy
import math

import pytest
import torch

from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.optim import clip_gradients, decay_groups, learning_rate, mix
from gpt_lightning.training.optimizers.muon import MuonAdamW

NANOGPT = {
    "peak": 1e-3,
    "minimum": 1e-4,
    "warmup_steps": 100,
    "decay_steps": 5000,
    "schedule": "cosine",
}


def tiny() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=8, vocab_size=50))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    idx = torch.randint(0, 50, (4, 9), generator=torch.Generator().manual_seed(1))
    return idx[:, :-1], idx[:, 1:]


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 1e-3 * 1 / 101),
        (99, 1e-3 * 100 / 101),
        (100, 1e-3),
        (2550, 1e-4 + 0.5 * 9e-4),  # half way: cos(pi / 2) = 0
        (1325, 1e-4 + 0.5 * (1 + math.sqrt(0.5)) * 9e-4),  # a quarter of the way
        (5000, 1e-4),
        (9999, 1e-4),
    ],
)
def test_learning_rate_is_nanogpts(step, expected):
    assert learning_rate(step, **NANOGPT) == pytest.approx(expected, rel=1e-12)


def test_a_seed_is_splitmix64s():
    """Its first number, as published: every checkpoint's dropout and data depend on these bits."""
    assert mix(1234567) == 6457827717110365317 >> 1
    assert mix(1, 2) != mix(2, 1)
    assert mix(3) != mix(3, 0)
    assert mix(7, 1) == mix_state(mix_state(7) ^ 1) >> 1


def mix_state(number: int) -> int:
    """SplitMix64's first number from a state, all 64 bits of it."""
    mask = 2**64 - 1
    z = (number + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_constant_schedule_warms_up_and_stays():
    rates = [learning_rate(s, **{**NANOGPT, "schedule": "constant"}) for s in (0, 100, 100_000)]
    assert rates == [1e-3 / 101, 1e-3, 1e-3]


def test_without_warmup_or_decay_nothing_divides_by_zero():
    assert (
        learning_rate(0, peak=1.0, minimum=0.1, warmup_steps=0, decay_steps=0, schedule="cosine")
        == 0.1
    )


def test_matrices_decay_and_vectors_do_not():
    model = tiny()
    decaying, rest = decay_groups(model.named_parameters(), 0.1)
    assert all(p.dim() >= 2 for p in decaying["params"])
    assert decaying["weight_decay"] == 0.1
    assert all(p.dim() < 2 for p in rest["params"])
    assert rest["weight_decay"] == 0.0
    assert sum(p.numel() for g in (decaying, rest) for p in g["params"]) == model.num_params()


def test_decay_all_is_one_group():
    model = tiny()
    (group,) = decay_groups(model.named_parameters(), 0.1, decay="all")
    assert len(group["params"]) == len(list(model.parameters()))


def make_muon(model: GPT) -> MuonAdamW:
    return MuonAdamW(model, Settings(optimizer="muon", learning_rate=1e-3), fused=False)


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(*batch()).backward()
        optimizer.step()


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    model = tiny()
    optimizer = make_muon(model)
    names = {id(p): n for n, p in model.named_parameters()}
    muon = {names[id(p)] for g in optimizer.muon.param_groups for p in g["params"]}
    adamw = {names[id(p)] for g in optimizer.adamw.param_groups for p in g["params"]}
    assert muon == {n for n, p in model.named_parameters() if ".h." in n and p.dim() == 2}
    assert muon | adamw == set(names.values())
    assert not muon & adamw


def test_muon_adamw_equals_the_two_side_by_side():
    ours, theirs = tiny(), tiny()
    train(ours, make_muon(ours), 3)
    named = list(theirs.named_parameters())
    matrices = [p for n, p in named if ".h." in n and p.dim() == 2]
    rest = [(n, p) for n, p in named if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1)
    adamw = torch.optim.AdamW(decay_groups(rest, 0.1), lr=1e-3, betas=(0.9, 0.95))
    for _ in range(3):
        theirs.zero_grad()
        theirs(*batch()).backward()
        muon.step()
        adamw.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_adamw_resumes_from_its_state_dict():
    straight, resumed = tiny(), tiny()
    optimizer = make_muon(straight)
    train(straight, optimizer, 2)
    resumed.load_state_dict(straight.state_dict())
    other = make_muon(resumed)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in other.param_groups:  # what the schedule does: it must reach both optimizers
        group["lr"] = group["lr"] * 0.5
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.5
    train(straight, optimizer, 2)
    train(resumed, other, 2)
    for a, b in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("factor", "written"), [(0.5, True), (2.0, False)])
def test_clipping_is_pytorchs_bit_for_bit(factor, written):
    ours, theirs = tiny(), tiny()
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model(*batch()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
    before = [p.grad._version for p in ours.parameters()]
    clip_gradients(ours.parameters(), norm.item() * factor)
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), norm.item() * factor)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    after = [p.grad._version for p in ours.parameters()]
    assert (after != before) == written  # to multiply by 1 takes two passes over memory


def test_clipping_scales_to_the_norm_and_reports_the_one_before():
    model = tiny()
    model(*batch()).backward()
    before = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    norm = clip_gradients(model.parameters(), 0.1)
    after = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    torch.testing.assert_close(norm, before)
    assert after.item() == pytest.approx(0.1, rel=1e-4)
    assert clip_gradients(model.parameters(), None).item() == pytest.approx(0.1, rel=1e-4)
