import math

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.behaviours.non_finite import NonFiniteGuard
from gpt_lightning.training.behaviours.step_seeds import mix
from gpt_lightning.training.optim import (
    clip_gradients,
    make_adamw,
)
from gpt_lightning.training.optimizers import muon as muon_file
from gpt_lightning.training.optimizers.muon import MuonAdamW, orthogonalize
from gpt_lightning.training.schedule import place_steps, share_of_peak

NANOGPT = {"learning_rate": 1e-3, "min_learning_rate": 1e-4, "warmup_steps": 100}


def rate(step: int, decay_steps: int = 5000, **changes) -> float:
    settings = Settings(**{**NANOGPT, **changes})
    return settings.learning_rate * share_of_peak(step, settings, decay_steps)


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
    assert rate(step) == pytest.approx(expected, rel=1e-12)


def test_a_seed_is_splitmix64s():
    """Its first number, as published: every checkpoint's dropout and data depend on these bits."""
    assert mix(1234567) == 6457827717110365317 >> 1
    assert mix(1, 2) != mix(2, 1)
    assert mix(3) != mix(3, 0)
    # the first number of the state that is 7's first number, xor 1
    assert mix(7, 1) == 2207009715805324207


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "linear"}, {50: 1e-3 * 51 / 101, 100: 1e-3, 1325: 7.75e-4, 9999: 1e-4}),
        ({"schedule": "linear", "decay_start": 3000},
         {50: 1e-3 * 51 / 101, 2999: 1e-3, 3000: 1e-3, 4000: 5.5e-4, 5000: 1e-4}),
        ({"decay_start": 50}, {150: rate(150)}),
        ({"schedule": "constant"}, {0: 1e-3 / 101, 100: 1e-3, 100_000: 1e-3}),
        ({"warmup_steps": 0, "decay_steps": 0}, {0: 1e-4}),  # nothing divides by zero
    ],
)  # fmt: skip
def test_schedules(changes, expected):
    rates = {step: rate(step, **changes) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-12)


def test_matrices_decay_and_vectors_do_not():
    model = tiny()
    decaying, rest = make_adamw(model.named_parameters(), Settings(), False).param_groups
    assert all(p.dim() >= 2 for p in decaying["params"])
    assert decaying["weight_decay"] == 0.1
    assert all(p.dim() < 2 for p in rest["params"])
    assert rest["weight_decay"] == 0.0
    assert sum(p.numel() for g in (decaying, rest) for p in g["params"]) == model.num_params()
    (group,) = make_adamw(model.named_parameters(), Settings(decay="all"), False).param_groups
    assert len(group["params"]) == len(list(model.parameters()))


def make_muon(model: GPT, fused: bool = False) -> MuonAdamW:
    return MuonAdamW(model, Settings(optimizer="muon", learning_rate=1e-3), fused)


def train(model: GPT, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(*batch()).backward()
        optimizer.step()


def test_muon_adamw_equals_the_two_side_by_side(monkeypatch):
    """Bit for bit: a stack of matrices has the arithmetic of single ones on a CPU."""
    monkeypatch.setattr(muon_file, "iteration_dtype", lambda device_type: torch.bfloat16)
    ours, theirs = tiny(), tiny()
    optimizer = make_muon(ours)
    train(ours, optimizer, 3)
    named = list(theirs.named_parameters())
    matrices = [p for n, p in named if ".h." in n and p.dim() == 2]
    rest = [(n, p) for n, p in named if not any(p is m for m in matrices)]
    muon = torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.1)
    adamw = make_adamw(rest, Settings(learning_rate=1e-3), fused=False)
    for _ in range(3):
        theirs.zero_grad()
        theirs(*batch()).backward()
        muon.step()
        adamw.step()
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, q), name
        state = (muon if ".h." in name and p.dim() == 2 else adamw).state[q]
        assert optimizer.state[p].keys() == state.keys()


@pytest.mark.parametrize(("factor", "written"), [(0.5, True), (2.0, False)])
def test_clipping_is_pytorchs_bit_for_bit(factor, written):
    ours, theirs = tiny(), tiny()
    theirs.load_state_dict(ours.state_dict())
    for model in (ours, theirs):
        model(*batch()).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in ours.parameters()])
    before = [p.grad._version for p in ours.parameters()]
    limit = norm.item() * factor
    assert clip_gradients(ours.parameters(), None) == norm
    assert clip_gradients(ours.parameters(), limit) == norm  # the one before
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), limit)
    for p, q in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
    after = [p.grad._version for p in ours.parameters()]
    assert (after != before) == written  # to multiply by 1 takes two passes over memory


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_a_fused_update_scales_gradients_as_clipping_does(factor, monkeypatch):
    models = tiny(), tiny()
    models[1].load_state_dict(models[0].state_dict())
    for model, deferred_on in zip(models, ({"cpu"}, set()), strict=True):
        monkeypatch.setattr("gpt_lightning.training.optim.DEFERRED_ON", deferred_on)
        adamw = make_adamw(model.named_parameters(), Settings(learning_rate=1e-3), fused=True)
        for _ in range(3):
            adamw.zero_grad()
            model(*batch()).backward()
            limit = factor * clip_gradients(model.parameters(), None).item()
            clip_gradients(model.parameters(), limit, adamw)
            adamw.step()
    for p, q in zip(*(model.parameters() for model in models), strict=True):
        assert (p.grad - q.grad).norm() < 1e-5 * q.grad.norm()
        assert (p - q).norm() < 1e-3 * q.norm()  # tiny gradients are divided by tiny ones


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_fused_update_is_given_float32_alone(dtype, monkeypatch):
    """Its kernel on CUDA reads the scale and the flag in float32, whatever the gradients are in."""
    monkeypatch.setattr("gpt_lightning.training.optim.DEFERRED_ON", {"cpu"})
    weight = torch.nn.Parameter(torch.ones(4, dtype=dtype))
    weight.grad = torch.ones_like(weight)
    adamw = torch.optim.AdamW([weight], fused=True)
    norm = clip_gradients([weight], 1.0, adamw)
    NonFiniteGuard().watch(adamw, norm, norm, 1)
    assert getattr(adamw, "grad_scale", None) is None
    assert weight.grad.norm().item() == pytest.approx(1.0, rel=1e-2)
    assert adamw.found_inf.dtype == torch.float32


# ---- Muon with one batch for all matrices of a shape ---------------------------------------------


@pytest.mark.parametrize("shape", [(3, 8, 32), (3, 32, 8), (2, 16, 16)])
def test_a_stack_is_as_near_to_the_polynomial_as_single_matrices(shape):
    torch.manual_seed(0)
    x, coefficients = torch.randn(shape), (3.4445, -4.7750, 2.0315)
    exact = torch.stack([newton_schulz(matrix.double(), coefficients) for matrix in x])
    single = [_zeropower_via_newtonschulz(matrix, coefficients, 5, 1e-7) for matrix in x]
    ours = (orthogonalize(x, coefficients, 5) - exact).norm()
    assert ours < 1.5 * (torch.stack(single) - exact).norm()


@pytest.mark.parametrize(("units", "largest"), [({}, 1e-5), ({"avx512_bf16": True}, 0.1)])
def test_a_cpu_that_emulates_bfloat16_iterates_in_float32(units, largest, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: units, raising=False)
    muon_file.iteration_dtype.cache_clear()
    try:
        x, coefficients = torch.randn(1, 8, 32), (3.4445, -4.7750, 2.0315)
        error = orthogonalize(x, coefficients, 5)[0] - newton_schulz(x[0].double(), coefficients)
        assert largest / 100 < error.abs().max() < largest
        assert muon_file.iteration_dtype("cuda") == torch.bfloat16
    finally:
        muon_file.iteration_dtype.cache_clear()


def newton_schulz(x: torch.Tensor, coefficients: tuple[float, float, float]) -> torch.Tensor:
    """Return the definition, of one matrix in the dtype of x."""
    a, b, c = coefficients
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def test_a_stacked_update_is_orthogonal():
    torch.manual_seed(0)
    coefficients = (3.4445, -4.7750, 2.0315)
    for shape in ((3, 8, 32), (3, 32, 8)):
        x = torch.randn(shape)
        y = orthogonalize(x, coefficients, 5)
        values = torch.linalg.svdvals(y)
        assert values.min() > 0.6
        assert values.max() < 1.3
        assert y.dtype == x.dtype
        assert (x * y).sum(dim=(1, 2)).min() > 0  # along x, for each matrix alone
    assert torch.equal(orthogonalize(torch.zeros(1, 4, 4), coefficients, 5), torch.zeros(1, 4, 4))


@pytest.mark.parametrize("found", [0.0, 1.0])
def test_a_stacked_step_is_skipped_by_the_device(found):
    model, free = tiny(), tiny()
    optimizer = make_muon(model, fused=True)
    other = make_muon(free, fused=True)
    train(model, optimizer, 2)
    train(free, other, 2)
    before = [p.clone() for p in model.parameters()]
    momenta = [s["momentum_buffer"].clone() for s in optimizer.state.values() if len(s) == 1]
    assert optimizer.takes_found_inf
    assert not make_muon(free, fused=False).takes_found_inf
    optimizer.found_inf = torch.tensor(found)
    for each in (model, free):
        each.zero_grad()
        each(*batch()).backward()
    if found:
        for p in model.parameters():
            p.grad.fill_(torch.nan)
    optimizer.step()
    other.step()
    after = [s["momentum_buffer"] for s in optimizer.state.values() if len(s) == 1]
    expected = before if found else list(free.parameters())
    for p, q in zip(model.parameters(), expected, strict=True):
        assert torch.equal(p, q)
    assert all(map(torch.equal, momenta, after)) == bool(found)


# ---- step counters -------------------------------------------------------------------------------


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (None, "cpu")])
def test_step_counters_are_where_the_kernel_reads_them(fused, device):
    """A checkpoint of a fused AdamW has them on the device, one of another AdamW on the host."""
    weight = torch.nn.Parameter(torch.zeros(2, device="meta"))
    optimizer = make_adamw([("w", weight)], Settings(), fused=False)
    optimizer.state[weight]["step"] = torch.zeros(())
    optimizer.param_groups[0]["fused"] = fused
    place_steps(optimizer, optimizer.param_groups[0])
    assert optimizer.state[weight]["step"].device.type == device
    place_steps(make_adamw([("w", weight)], Settings(), False), {"params": [weight]})
