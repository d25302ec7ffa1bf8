"""`gpt-lightning bench dtypes`: the published table, and what a CPU does."""

import pytest
import torch

from gpt_lightning.bench import dtypes
from gpt_lightning.bench.dtypes import CUDA_RULES, MODELS, PUBLISHED, measure_dtypes, observe
from gpt_lightning.model.gpt import GPT, GPTConfig


def test_cuda_has_the_published_table_without_a_gpu(monkeypatch):
    row = measure_dtypes(CUDA_RULES, "fp16", "toy")
    asked = {kind: dtype for kind, dtype in PUBLISHED.items() if kind != "gradients"}
    assert {kind: row[kind] for kind in asked} == asked
    assert (row["published"], row["status"]) == ("the same", "ok")
    monkeypatch.setitem(dtypes.PUBLISHED, "logits", "float32")
    row = measure_dtypes(CUDA_RULES, "fp16", "toy")
    assert (row["published"], row["status"]) == ("logits was float32", "mismatch")


def test_a_cpu_keeps_layer_norm_in_16_bits_and_nothing_else_differs():
    row = measure_dtypes("cpu", "fp16", "toy")
    assert {kind for kind in PUBLISHED if row[kind] != PUBLISHED[kind]} == {"layer_norm"}
    assert row["published"] == "layer_norm was float32"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", ["cpu", CUDA_RULES])
def test_linear_outputs_are_lower_and_parameters_are_not(device, model):
    row = measure_dtypes(device, "bf16", model)
    assert (row["parameters"], row["loss"]) == ("float32", "float32")
    assert (row["linear"], row["logits"]) == ("bfloat16", "bfloat16")
    if model == "gpt":  # the stream that all branches are added to
        assert (row["residual"], row["layer_norm"]) == ("float32", "float32")
    assert row.get("gradients") == ("float32" if device == "cpu" else None)
    assert not torch.is_autocast_enabled("cuda")


def test_every_tensor_is_seen():
    seen = observe("gpt", torch.bfloat16, "cpu")
    model = GPT(GPTConfig(2, 2, 32, 16, 64))
    names = [name for name, _ in model.named_parameters()]
    assert [name for kind, name in seen if kind == "parameters"] == names
    assert [name for kind, name in seen if kind == "gradients"] == names
    outputs = {name for kind, name in seen if kind not in ("parameters", "gradients")}
    modules = {name for name, module in model.named_modules() if name}
    assert modules - outputs == {"transformer.h"}  # a ModuleList is never called
