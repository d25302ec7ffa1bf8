"""`gpt-lightning bench dtypes`: the published table, and what a CPU does."""

import pytest
import torch

from gpt_lightning.bench.dtypes import CUDA_RULES, MODELS, layer_norms, measure_dtypes, observe
from gpt_lightning.files import reference_rows
from gpt_lightning.model.gpt import GPT, GPTConfig
from gpt_lightning.tables.worker import call

PUBLISHED = {
    row["field"]: row["published"]
    for row in reference_rows("figures.csv", "profile-report")
    if row["command"].startswith("dtypes ")
}


def measured(device, autocast, model):
    return call(measure_dtypes, {"device": device, "autocast": autocast, "model": model})


def test_cuda_has_the_published_table_without_a_gpu():
    row = measured(CUDA_RULES, "fp16", "toy")
    asked = {kind: dtype for kind, dtype in PUBLISHED.items() if kind != "gradients"}
    assert len(asked) == 6
    assert {kind: row[kind] for kind in asked} == asked


def test_a_cpu_keeps_layer_norm_in_16_bits_and_nothing_else_differs():
    row = measured("cpu", "fp16", "toy")
    assert {kind for kind in PUBLISHED if row[kind] != PUBLISHED[kind]} == {"layer_norm"}


def test_layer_norm_loses_bits_in_16_bits_and_everything_in_float16_written_out():
    rows = {(row.dtype, row.arithmetic): row for row in layer_norms([])["norms"]}
    whole, bf16, fp16 = (rows[d, "kernel"] for d in ("float32", "bfloat16", "float16"))
    for name in ("normal_error", "mean_8_error", "channel_1000_error"):
        # float32 has 24 bits, float16 11, bfloat16 8; a factor of 2^13 and of 2^3 between them
        assert 500 * getattr(whole, name) < getattr(fp16, name) < getattr(bf16, name) / 4, name
    assert bf16.mean_8_error > 2 * bf16.normal_error  # the mean takes bits
    # every output is 0: the error is the output of the large channel, sqrt(768 - 1)
    infinite = rows["float16", "written out"].channel_1000_error
    assert infinite == pytest.approx(767**0.5, rel=1e-3)
    assert rows["bfloat16", "written out"].channel_1000_error < 0.1  # its squares are finite


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("device", ["cpu", CUDA_RULES])
def test_linear_outputs_are_lower_and_parameters_are_not(device, model):
    row = measured(device, "bf16", model)
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
