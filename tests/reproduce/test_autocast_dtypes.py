"""`gpt-lightning bench dtypes`: the published table, and what a CPU does."""

import json

import pytest
import torch

from gpt_lightning.cli import main
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.reproduce import autocast_dtypes as dtypes
from gpt_lightning.reproduce.autocast_dtypes import (
    AUTOCAST,
    CUDA_RULES,
    MODELS,
    PUBLISHED,
    measure_dtypes,
    observe,
)
from gpt_lightning.tables import sweep


def test_cuda_has_the_published_table_without_a_gpu():
    row = measure_dtypes(CUDA_RULES, "fp16", "toy")
    asked = {kind: row[kind] for kind in PUBLISHED if kind != "gradients"}
    assert asked == {kind: dtype for kind, dtype in PUBLISHED.items() if kind != "gradients"}
    assert row["published"] == "the same; gradients not asked"
    assert row["status"] == "ok"


def test_a_cpu_keeps_layer_norm_in_16_bits_and_nothing_else_differs():
    row = measure_dtypes("cpu", "fp16", "toy")
    assert {kind for kind in PUBLISHED if row[kind] != PUBLISHED[kind]} == {"layer_norm"}
    assert row["published"] == "layer_norm was float32"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("autocast", AUTOCAST)
@pytest.mark.parametrize("device", ["cpu", CUDA_RULES])
def test_linear_outputs_are_lower_and_parameters_are_not(device, autocast, model):
    row = measure_dtypes(device, autocast, model)
    assert (row["parameters"], row["loss"]) == ("float32", "float32")
    assert (row["linear"], row["logits"]) == (AUTOCAST[autocast], AUTOCAST[autocast])
    if model == "gpt":  # the stream that all branches are added to
        assert (row["residual"], row["layer_norm"]) == ("float32", "float32")
    if device == "cpu":
        assert row["gradients"] == "float32"
    assert not torch.is_autocast_enabled("cuda")


def test_every_tensor_is_seen_once():
    seen = observe("gpt", "bfloat16", "cpu")
    model = GPT(GPTConfig(2, 2, 32, 16, 64))
    names = [name for name, _ in model.named_parameters()]
    assert [name for kind, name, _ in seen if kind == "parameters"] == names
    assert [name for kind, name, _ in seen if kind == "gradients"] == names
    outputs = {name for kind, name, _ in seen if kind not in ("parameters", "gradients")}
    modules = {name for name, module in model.named_modules() if name}
    assert modules - outputs == {"transformer.h"}  # a ModuleList is never called
    assert len(seen) == len(set(seen))


def test_a_table_that_differs_on_cuda_is_a_mismatch(monkeypatch):
    monkeypatch.setitem(dtypes.PUBLISHED, "logits", "float32")
    row = measure_dtypes(CUDA_RULES, "fp16", "toy")
    assert (row["status"], row["published"]) == (
        "mismatch",
        "logits was float32; gradients not asked",
    )


def test_the_report_lists_the_tensors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "isolated", lambda address, values, _: measure_dtypes(**values))
    options = ["--device", f"cpu,{CUDA_RULES}", "--models", "toy", "--autocast", "fp16"]
    assert main(["bench", "dtypes", *options]) == 0
    (path,) = sweep.ROOT.glob("dtypes/*/results.json")
    found = json.loads(path.read_text())
    assert [row["device"] for row in found["rows"]] == ["cpu", CUDA_RULES]
    norms = {row["device"]: row for row in found["tensors"] if row["tensor"] == "ln"}
    assert norms["cpu"]["dtype"] == "float16"
    assert norms["cpu"]["published"] == norms[CUDA_RULES]["dtype"] == "float32"
    assert (path.parent / "tensors.csv").read_text().count("\n") == 1 + len(found["tensors"])
