"""Lean updates: weights and states have the bits of PyTorch's own AdamW, whatever else happens."""

import copy

import pytest
import torch
from torch.optim import SGD, AdamW
from torch.optim import optimizer as base

from gpt_lightning.training.lean_step import files_digest
from gpt_lightning.training.optimizers import adamw


def make(kind=AdamW, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    options = {"lr": 0.01, "fused": True, "weight_decay": 0.1} | options
    if kind is SGD:
        del options["fused"]
    groups = [
        {"params": [model[0].weight, model[2].weight]},
        {"params": [model[0].bias, model[2].bias], "weight_decay": 0.0},
    ]
    return model, kind(groups, **options)


def train(lean, between=lambda model, optimizer, step: None, **options):
    """Return weights, states and the number of groups that were updated lean in four steps."""
    model, optimizer = make(**options)
    lean_optimizer = adamw.LeanAdamW(optimizer, True)
    updated, plain = [], adamw.update

    def update(*args):
        updated.append(1)
        plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adamw, "update", update)
        for step in range(4):
            x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))

            def closure(x=x, step=step):
                assert torch.is_grad_enabled()
                (lean_optimizer if lean else optimizer).zero_grad()
                assert all(p.grad is None for p in model.parameters())
                model(x).square().mean().backward()
                between(model, optimizer, step)

            (lean_optimizer if lean else optimizer).step(closure)
            assert torch.is_grad_enabled()
    return model.state_dict(), optimizer.state_dict(), len(updated)


def without_gradient(model, optimizer, step):
    if step == 2:
        model[2].bias.grad = None


def loaded(model, optimizer, step):
    if step == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def replaced(model, optimizer, step):
    if step == 2:
        optimizer.state[model[0].weight]["exp_avg"] = torch.ones(8, 4)


def cleared(model, optimizer, step):
    if step == 2:
        optimizer.state.clear()


def other_rate(model, optimizer, step):
    optimizer.param_groups[1]["lr"] = 0.1 / (step + 1)


def maximized(model, optimizer, step):
    optimizer.param_groups[0]["maximize"] = step == 2


def hooked(model, optimizer, step):
    if step == 1:
        optimizer.register_step_pre_hook(lambda o, *_: o.param_groups[0].update(lr=0.2))


def wrapped(model, optimizer, step):
    if step == 1:
        step_of_pytorch = optimizer.step

        def step_twice(closure=None):
            step_of_pytorch(closure)
            step_of_pytorch()

        optimizer.step = step_twice


def skipped(model, optimizer, step):
    optimizer.found_inf = torch.tensor(float(step == 2))


@pytest.mark.parametrize(
    ("between", "lean_groups"),
    [
        (lambda *_: None, 6),  # the first step makes the states
        (without_gradient, 4),
        (loaded, 6),
        (replaced, 6),
        (cleared, 4),
        (other_rate, 6),
        (maximized, 4),
        (hooked, 2),  # from the step after
        (wrapped, 2),
        (skipped, 0),
    ],
)
def test_weights_and_states_are_those_of_pytorch(between, lean_groups):
    weights, states, updated = train(True, between)
    their_weights, their_states, _ = train(False, between)
    assert str(states) == str(their_states)
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)
    assert updated == lean_groups


@pytest.mark.parametrize(
    "options",
    [
        {"fused": None},
        {"amsgrad": True},
        {"maximize": True},
        {"lr": torch.tensor(0.01)},
        {"kind": SGD},
        {"kind": type("Mine", (AdamW,), {})},
    ],
)
def test_other_optimizers_are_pytorchs(options):
    weights, states, updated = train(True, **options)
    their_weights, their_states, _ = train(False, **options)
    assert (str(states), updated) == (str(their_states), 0)
    assert all(torch.equal(weights[name], their_weights[name]) for name in weights)


def test_a_profiler_sees_the_step_and_a_global_hook_is_called():
    with torch.profiler.profile() as profile:
        train(True)
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["Optimizer.step#AdamW.step"] == 4
    called = []
    handle = base.register_optimizer_step_post_hook(lambda *_: called.append(1))
    try:
        train(True)
    finally:
        handle.remove()
    assert len(called) == 4


def test_the_files_are_known_and_functions_of_others_are_left_alone(monkeypatch):
    assert files_digest(adamw.FILES).startswith(adamw.DIGEST)
    _, optimizer = make()
    assert adamw.LeanAdamW(optimizer, True).usual
    assert not adamw.LeanAdamW(optimizer, False).usual
    monkeypatch.setattr(AdamW, "step", lambda self, closure=None: None)
    assert not adamw.LeanAdamW(optimizer, True).usual
