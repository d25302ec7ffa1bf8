"""The published formulas: a small model of a run's class, its batches, its first updates."""

import zlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gpt_lightning.data.tokenizers import build_tokenizer
from gpt_lightning.model.gpt import GPT, MLP, Block, CausalSelfAttention, GPTConfig
from gpt_lightning.reproduce.cases import CASES
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training.callbacks.arithmetic import AS_PUBLISHED, ArithmeticCheck, check_model

TANH = {"activation": "gelu_tanh"}
GELU = {"activation": "gelu"}
SHAPE = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 20}
THEIRS = {
    "activation": "gelu, none",
    "betas": [0.9, 0.99],
    "eps": 1e-8,
    "weight_decay": 0.1,
    "gradient_clip": "1.0, norm",
}


@pytest.mark.parametrize("options", [{}, TANH, {"bias": False}, {"tie_weights": False}])
@pytest.mark.parametrize("attention", ["naive", "sdpa"])
def test_our_model_has_the_published_formulas(options, attention):
    state = torch.get_rng_state()
    model = GPT(GPTConfig(**SHAPE, **GELU | options, dropout=0.2, attention=attention))
    drawn = torch.get_rng_state()
    assert check_model(model, "gelu, tanh" if options == TANH else "gelu, none") == ""
    assert torch.equal(torch.get_rng_state(), drawn)
    assert not torch.equal(state, drawn)


@pytest.mark.parametrize(
    ("owner", "wrong"),
    [
        (MLP, lambda self, x: self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))),
        (Block, lambda self, x: x + self.attn(self.ln_1(x)) + self.mlp(self.ln_2(x))),
        (nn.LayerNorm, lambda self, x: F.layer_norm(x, x.shape[-1:], self.weight, self.bias, 1e-6)),
        (CausalSelfAttention, lambda self, x: self.c_proj(self.c_attn(x)[..., : x.size(-1)])),
    ],
)
def test_a_model_with_another_formula_differs(owner, wrong, monkeypatch):
    model = GPT(GPTConfig(**SHAPE, **GELU))
    monkeypatch.setattr(owner, "forward", wrong)
    assert "is off by" in check_model(model, "gelu, none")


def check_updates(theirs: dict, *, clip: float | None = 1.0, **options) -> ArithmeticCheck:
    """Make three AdamW updates of a small model, with batches, under a check."""
    torch.manual_seed(1)
    model = GPT(GPTConfig(**SHAPE, **GELU))
    settings = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1, **options}
    optimizer = torch.optim.AdamW(model.parameters(), **settings)
    optimizer.param_groups[0]["initial_lr"] = 0.01
    constant = Settings(schedule="constant", warmup_steps=0)
    schedule = SimpleNamespace(decay_steps=0)
    module = SimpleNamespace(model=model, settings=constant, schedule=schedule)
    trainer = SimpleNamespace(optimizers=[optimizer], global_step=0)
    check = ArithmeticCheck(theirs)
    check.on_train_start(trainer, module)
    for number in range(5):
        tokens = torch.randint(20, (3, 9))
        batch = tokens[:, :-1], tokens[:, 1:]
        check.on_train_batch_start(trainer, module, batch, number)
        (20 * model(*batch)).backward()  # a norm over 1
        check.on_before_optimizer_step(trainer, module, optimizer)
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        check.on_train_batch_end(trainer, module)
    return check


@pytest.fixture(scope="module")
def published() -> dict:
    """The settings with the batches that check_updates draws."""
    torch.manual_seed(1)
    GPT(GPTConfig(**SHAPE, **GELU))
    crcs = [0]
    for _ in range(3):
        tokens = torch.randint(20, (3, 9))
        rows = torch.stack([tokens[:, :-1], tokens[:, 1:]])
        crcs.append(zlib.crc32(rows.numpy().tobytes(), crcs[-1]))
    return THEIRS | {"batches": crcs[1:]}


def test_published_updates_and_batches_are_as_published(published):
    assert check_updates(published).found == dict.fromkeys(
        ("arithmetic", "batches", "updates"), AS_PUBLISHED
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"eps": 1e-6},
        {"weight_decay": 0.101},
        {"betas": (0.9, 0.95)},
        {"lr": 0.01001},
        {"amsgrad": True, "betas": (0.9, 0.5)},
        {"maximize": True},
        {"clip": 2.0},
        {"clip": None},
    ],
)
def test_another_update_is_seen(wrong, published):
    found = check_updates(published, **wrong).found
    assert found["updates"].endswith("roundings")
    assert found["batches"] == AS_PUBLISHED


def test_another_batch_is_named(published):
    first, second, third = published["batches"]
    found = check_updates(published | {"batches": [first, third, second]}).found
    assert found["batches"] == "others from batch 2 on"
    assert found["updates"] == AS_PUBLISHED


def test_a_run_that_is_continued_is_not_checked(published):
    check = ArithmeticCheck(published)
    trainer = SimpleNamespace(global_step=5)
    check.on_train_start(trainer, None)
    check.on_train_batch_start(trainer, None, None, 0)
    check.on_before_optimizer_step(trainer, None, None)
    check.on_train_batch_end(trainer, None)
    assert check.found == {}


# ---- published batches, computed from the text alone ---------------------------------------------


RUNGS = {rung.name: rung for case in CASES.values() for rung in case.rungs}


def digests(batches) -> list[int]:
    found = [0]
    for x, y in batches:
        found.append(zlib.crc32(np.stack([x, y]).astype(np.int64).tobytes(), found[-1]))
    return found[1:]


@pytest.mark.parametrize(
    "name", ["overfit-one-batch", "sequential-loader", "timed", "bf16", "cpu-fp32"]
)
def test_batches_follow_each_other_in_the_text(name, tinyshakespeare):
    theirs = RUNGS[name].theirs
    tokens = np.array(build_tokenizer("gpt2").encode(tinyshakespeare.read_text()))
    B, T = theirs["batch"]
    at, batches = 0, []
    for _ in theirs["batches"]:
        batches.append([tokens[at + i : at + i + B * T].reshape(B, T) for i in (0, 1)])
        at += 0 if name == "overfit-one-batch" else B * T
        at = at if at + B * T < len(tokens) else 0
    assert digests(batches) == theirs["batches"]


@pytest.mark.parametrize("name", ["small", "cpu"])
def test_random_batches_are_nanogpts(name, tinyshakespeare):
    theirs, text = RUNGS[name].theirs, tinyshakespeare.read_text()
    code = {character: i for i, character in enumerate(sorted({*text}))}
    tokens = np.array([code[c] for c in text[:1_003_854]])
    (B, T), held = theirs["batch"], len(text) - len(tokens)
    torch.manual_seed(1337)
    shape = {key: theirs[key] for key in ("n_layer", "n_head", "n_embd", "block_size")}
    GPT(GPTConfig(**shape, vocab_size=65, bias=False, init="nanogpt"))
    starts = [torch.randint(len(tokens) - T, (B,)).tolist()]
    for n in (len(tokens), held):  # an evaluation comes before the first step
        for _ in range(theirs["eval_batches"]):
            torch.randint(n - T, (B,))
    starts += [torch.randint(len(tokens) - T, (B,)).tolist() for _ in theirs["batches"][1:]]
    rows = [[np.stack([tokens[i + j : i + j + T] for i in s]) for j in (0, 1)] for s in starts]
    assert digests(rows) == theirs["batches"]
