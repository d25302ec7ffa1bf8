"""Formulas of the published runs, and breaks of the program that they must see."""

import zlib

import breaks
import numpy as np
import pytest
import tiktoken
import torch
from torch import nn

from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.reproduce.breaks import BREAKS, Break, run_broken, run_selftest
from gpt_lightning.reproduce.cases import CASES
from gpt_lightning.reproduce.formulas import check_model

RUNGS = {rung.name: (case, rung) for case in CASES.values() for rung in case.rungs}
TANH = {"activation": "gelu, tanh", "n_head": 3, "dropout": 0.0}


def gpt(**changes) -> GPT:
    shape = {"n_layer": 1, "n_head": 3, "n_embd": 6, "block_size": 32, "vocab_size": 50}
    return GPT(GPTConfig(**shape | changes))


@pytest.mark.parametrize("changes", [{}, {"bias": False}, {"tie_weights": False}])
def test_a_model_is_as_published(changes):
    assert check_model(gpt(**changes), TANH) == ""


def test_another_gelu_and_a_part_of_ones_own_are_seen():
    assert "is off by" in check_model(gpt(activation="gelu"), TANH)
    model = gpt()
    model.transformer.h[0].mlp.gelu = nn.ReLU()
    assert "is off by" in check_model(model, TANH)


def digests(batches) -> list[int]:
    found = [0]
    for x, y in batches:
        found.append(zlib.crc32(np.stack([x, y]).astype(np.int64).tobytes(), found[-1]))
    return found[1:]


@pytest.mark.parametrize(
    "name", ["overfit-one-batch", "sequential-loader", "timed", "bf16", "cpu-fp32"]
)
def test_batches_are_the_published_ones(name, tinyshakespeare):
    theirs = RUNGS[name][1].theirs
    tokens = np.array(tiktoken.get_encoding("gpt2").encode(tinyshakespeare.read_text()))
    (B, T), at, batches = theirs["batch"], 0, []
    for _ in theirs["batches"]:
        batches.append([tokens[at + i : at + i + B * T].reshape(B, T) for i in (0, 1)])
        at += 0 if theirs["order"] == "repeat" else B * T
        at = at if at + B * T < len(tokens) else 0
    assert digests(batches) == theirs["batches"]


@pytest.mark.parametrize("name", ["small", "cpu"])
def test_random_batches_are_nanogpts(name, tinyshakespeare):
    theirs, text = RUNGS[name][1].theirs, tinyshakespeare.read_text()
    characters = sorted({*text})
    tokens = np.array([characters.index(c) for c in text[:1_003_854]])
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


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(each, id=f"{each.rung}: {each.name}", marks=pytest.mark.slow)
        for each in breaks.BREAKS
    ],
)
def test_a_break_is_seen(wrong, tinyshakespeare, own_folder):
    assert run_broken(*RUNGS[wrong.rung], wrong).verdict == "red"


@pytest.mark.parametrize("name", ["gpt2-init", "small"])
def test_an_unbroken_rung_is_green(name, tinyshakespeare, own_folder):
    assert run_broken(*RUNGS[name], Break("nothing", name)).verdict == "unseen"


def test_the_selftest_fails_if_one_is_unseen(tinyshakespeare, own_folder, monkeypatch, capsys):
    chosen = [each for each in BREAKS if each.rung == "gpt2-init"][:1]
    monkeypatch.setattr("gpt_lightning.reproduce.breaks.BREAKS", chosen)
    assert run_selftest([RUNGS["gpt2-init"]]) == 0
    assert "1 breaks, none unseen" in capsys.readouterr().out
    chosen.append(Break("nothing at all", "gpt2-init"))
    assert run_selftest([RUNGS["gpt2-init"]]) == 1
    assert "2 breaks, 1 unseen" in capsys.readouterr().out
