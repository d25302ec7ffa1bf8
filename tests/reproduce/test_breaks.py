"""A program that is broken on purpose fails a rung of `reproduce`, by its settings or its losses.

A break replaces one function while the first steps are trained, so that flags, parameter groups and
configuration still have the published values.
"""

import math
from collections.abc import Callable
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt_lightning.data.readers import NanoGPTLoader
from gpt_lightning.model import gpt
from gpt_lightning.model.gpt import GPT, MLP, CausalSelfAttention
from gpt_lightning.reproduce.cases import CASES, Verdict
from gpt_lightning.reproduce.runner import CaseRun
from gpt_lightning.training import schedule, update

CASE = CASES["shakespeare-char-small"]
(RUNG,) = CASE.rungs
Change = Callable[..., Any]  # takes the right function and its arguments


def failed(folder, *options: str) -> set[str]:
    """Return what differs from the published run within four steps."""
    run = CaseRun(CASE, ["--trainer.max_steps=4", *options], folder, [])
    run.run(RUNG.on("cpu"))
    names = {row.setting for row in run.settings if row.verdict == Verdict.FAILED}
    losses = {f"{row.split} loss" for row in run.losses if row.verdict == Verdict.FAILED}
    return names | losses


def test_the_program_as_it_is_fails_nothing(tmp_path, tinyshakespeare):
    assert failed(tmp_path) == set()


def test_an_option_that_changes_the_run_is_seen(tmp_path, tinyshakespeare):
    assert "learning_rates" in failed(tmp_path, "--model.warmup_steps=99")


def other_gelu(right, self, x):
    return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


def unscaled_attention(right, self, *args) -> None:
    right(self, *args)

    def attention(q, k, v, dropout):
        scores = q @ k.mT
        future = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(future, -math.inf).softmax(-1) @ v

    self.attention = attention


def redrawn(right, self, *args) -> None:
    """Draw the residual projections without their smaller standard deviation."""
    right(self, *args)
    for name, weight in self.named_parameters():
        if name.endswith("c_proj.weight"):
            nn.init.normal_(weight, 0, 0.02)


def late_targets(right, self, x, y=None):
    return right(self, x, y if y is None else y.roll(-1, 1))


def smoothed(right, logits, y):
    return F.cross_entropy(logits.mT, y, label_smoothing=0.01)


def while_it_updates(key: str, value: Callable[[Any], Any]) -> Change:
    """Return a change of build_optimizer: a key of all groups has another value in `step`."""

    def build(right, *args):
        optimizer = right(*args)
        step = optimizer.step

        def wrong_step(_, closure) -> None:
            loss = closure()
            kept = [group[key] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group[key] = value(group[key])
            step(lambda: loss)
            for group, old in zip(optimizer.param_groups, kept, strict=True):
                group[key] = old

        optimizer.step = MethodType(wrong_step, optimizer)
        return optimizer

    return build


def not_clipped(right, parameters, limit, *rest):
    return right(parameters, None, *rest)


def early(right, step, *rest):
    return right(step + 1, *rest)


def other_split(right, self, split, starts):
    return right(self, "train", starts)


def swapped_draws(right, self):
    """Draw nanoGPT's next batch, the third and the fourth swapped."""
    self.count = getattr(self, "count", 0) + 1
    if self.count == 3:
        self.kept = right(self)
    return self.kept if self.count == 4 else right(self)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "change", "seen"),
    [
        (MLP, "forward", other_gelu, "arithmetic"),
        (CausalSelfAttention, "__init__", unscaled_attention, "arithmetic"),
        (GPT, "__init__", redrawn, "init_std"),
        (GPT, "forward", late_targets, "val loss"),
        (gpt, "mean_loss", smoothed, "arithmetic"),
        (update, "build_optimizer", while_it_updates("lr", lambda lr: 1.01 * lr), "updates"),
        (update, "build_optimizer", while_it_updates("weight_decay", lambda _: 0), "updates"),
        (update, "clip_gradients", not_clipped, "updates"),
        (schedule, "share_of_peak", early, "learning_rates"),
        (NanoGPTLoader, "_batch", other_split, "val loss"),
        (NanoGPTLoader, "training_batch", swapped_draws, "batches"),
    ],
)
def test_a_broken_program_is_seen(
    owner, name, change, seen, tmp_path, tinyshakespeare, monkeypatch
):
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, wraps(right)(lambda *args: change(right, *args)))
    assert seen in failed(tmp_path)
