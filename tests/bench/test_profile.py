"""`bench profile`: sums that agree with totals, on a CPU and as a GPU reports them."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gpt_lightning.bench import models, profile
from gpt_lightning.bench.profile import Averages, by_kind
from gpt_lightning.model.attention import naive_attention
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables.worker import call

SETTING = {"device": "cpu", "dtype": "fp32", "model": "gpt2", "size": "4/2/32", "steps": 2}
SETTING |= {"batch": 2, "context": 16, "warmup": 1}
LAYERS = 4


@pytest.mark.parametrize(
    ("model", "mode", "calls"),
    [
        ("gpt2", "inference", (25, 17)),
        ("course", "inference", (37, 29)),
        ("gpt2", "training", (75, 51)),  # the backward has two for each of the forward's
        ("gpt2", "full-step", (75, 51)),
    ],
)
def test_the_parts_of_a_step_add_up(model, mode, calls, tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "TOP", 5)
    setting = SETTING | {"model": model, "mode": mode, "folder": str(tmp_path)}
    row = call(profile.measure_profile, setting)
    assert (row["products_calls"], row["products_outside_calls"]) == calls
    assert row["kernels_ms"] == pytest.approx(row["busy"] * row["span_ms"])
    kinds = [*profile.TABLE["kinds"], "other"]
    assert sum(row[kind] for kind in kinds) == pytest.approx(1.0)
    assert sum(part["share"] for part in row["kernels"]) == pytest.approx(1.0)
    assert sum(part["ms"] for part in row["kernels"]) == pytest.approx(row["kernels_ms"])
    assert sum(part["calls"] for part in row["kernels"]) == pytest.approx(row["kernel_calls"])
    assert len(row["kernels"]) == 5 + 1  # the rest is one row
    for share in ("time_share", "flop_share"):
        assert sum(part[share] for part in row["attention"]) == pytest.approx(1.0)
    ranges = {part["range"]: part for part in row["ranges"]}
    trained = ["backward", "optimizer"]  # without updates the optimizer frees gradients alone
    expected = {"training": trained, "full-step": ["data", *trained]}
    phases = {"step / forward", *(f"step / {name}" for name in expected.get(mode, ()))}
    assert phases == {name for name in ranges if name.startswith("step / ")}
    for part in (*profile.PARTS, "attn", "mlp"):
        assert ranges[part]["calls"] == LAYERS
    assert (tmp_path / row["trace"]).stat().st_size > 1000


def average(name, host=True, annotation=False, count=2, own=0.0, total=0.0, span=0.0):
    """What torch.profiler has of a name: microseconds of two steps."""
    return SimpleNamespace(
        key=name,
        device_type=SimpleNamespace(name="CPU" if host else "CUDA"),
        is_user_annotation=annotation,
        count=count,
        self_device_time_total=own,
        device_time_total=total,
        self_cpu_time_total=1e9,
        cpu_time_total=span,
    )


def test_a_gpus_kernels_count_once_and_the_backward_has_the_rest():
    found = Averages(
        [
            average("ProfilerStep*", annotation=True, span=40_000.0),
            average("ProfilerStep*", host=False, annotation=True, total=20_000.0),
            average("aten::mm", own=16_000.0, count=6),
            average("aten::addmm_", own=4_000.0),
            average("ampere_sgemm", host=False, own=16_000.0, count=6),
            average("void reduce_kernel", host=False, own=4_000.0),
            average("step / forward", annotation=True, total=6_000.0, span=9_000.0),
            average("step / forward", host=False, annotation=True, total=8_000.0),
            average("step / backward", annotation=True, span=11_000.0),
        ],
        steps=2,
        on_gpu=True,
    )
    assert (found.span_ms, found.kernels_ms) == (20.0, 10.0)
    assert [(kernel.name, kernel.calls, kernel.ms) for kernel in found.kernels] == [
        ("ampere_sgemm", 3.0, 8.0),
        ("void reduce_kernel", 1.0, 2.0),
    ]
    assert by_kind(found.ops, "kinds")["products"] == (4.0, 10.0)  # by the ops that launched them
    assert [kernel.kind("kinds") for kernel in found.kernels] == ["products", "reductions"]
    rows = {row["range"]: row for row in profile.ranges_table(found)}
    assert (rows["step / forward"]["kernels_ms"], rows["step / forward"]["span_ms"]) == (3.0, 4.0)
    assert rows["step / backward"]["kernels_ms"] == 7.0
    parts = {row["part"]: row for row in profile.parts_table(found)}
    assert sum(row["ms"] for part, row in parts.items() if part != "step") == 20.0
    assert (parts["products"]["ms"], parts["idle"]["ms"]) == (8.0, 10.0)


def test_attention_in_parts_is_naive_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 8, 4)
    assert torch.equal(profile.attention_in_parts(q, k, v, 0.0), naive_attention(q, k, v, 0.0))


def test_flops_of_the_attention_are_those_that_torch_counts():
    model = GPT(models.make_config(SETTING["size"], SETTING["context"]))
    profile.add_ranges(model)  # torch does not count the fused attention of CPUs
    with FlopCounterMode(display=False) as counter:
        model(torch.randint(100, (2, 16)))
    layers = [counter.get_flop_counts()[f"GPT.transformer.h.{i}.attn"] for i in range(LAYERS)]
    ours = profile.attention_flops(SimpleNamespace(**SETTING))
    assert ours.pop("softmax") == LAYERS * 2 * 2 * 16**2 * 5
    assert sum(ours.values()) == sum(sum(layer.values()) for layer in layers)


def test_the_step_of_fit_is_profiled_by_part(tmp_path):
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 16, "block_size": 32, "vocab_size": 100}
    options = [f"--model.config.{key}={value}" for key, value in sizes.items()]
    options += ["--data.batch_size=2", "--trainer.accumulate_grad_batches=2"]
    options += ["--model.compile=false", "--trainer.val_check_interval=2"]
    options += ["--model.config.attention=auto"]
    row = {"device": "cpu", "size": "124m", "steps": 1, "warmup": 1}
    found = call(profile.measure_fit, row | {"fit_options": options, "folder": str(tmp_path)})
    parts = {part["part"]: part for part in found["parts"]}
    whole = parts.pop("step")
    assert whole["ms"] == found["span_ms"]
    assert sum(part["ms"] for part in parts.values()) == pytest.approx(found["span_ms"])
    for part in ("products", "attention", "norms", "loss", "optimizer"):
        assert parts[part]["ms"] > 0, part
    assert found["step"].startswith("128 tokens = 2 sequences x 32 tokens x 2 accumulated")
    assert found["graphs"] == 0
