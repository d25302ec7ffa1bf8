"""The step that benches time: the update of `fit`, and facts of its process."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from gpt_lightning.bench import models, step
from gpt_lightning.bench.step import MAX_NORM, Training
from gpt_lightning.hardware.peaks import Peak
from gpt_lightning.hardware.precision import autocast
from gpt_lightning.model import flops
from gpt_lightning.runs.settings import Settings
from gpt_lightning.tables.worker import SkippedError
from gpt_lightning.training import optim

CPU = torch.device("cpu")
BATCH = torch.full((2, 3), 0.01), torch.zeros(1)


class Linear(torch.nn.Module):
    """loss = scale * mean(w x); its gradient is scale * mean(x), whatever w is."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2, 3))
        self.scale = scale

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.w * x).sum()


def trained(scale=1.0, micro_batches=1, **kwargs):
    """The gradient that the optimizer sees, the weights after it, and the phases in order."""
    model, seen, phases = Linear(scale), [], []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.w.grad.clone()))

    @contextmanager
    def phase(name):
        phases.append(name)
        yield

    step = Training(
        model, BATCH, "fp32", micro_batches=micro_batches, optimizer=optimizer, **kwargs
    )
    loss = step(phase)
    assert not loss.requires_grad
    return model, seen, phases, float(loss)


def test_a_step_is_forward_backward_and_an_update():
    model, (gradient,), phases, loss = trained()
    assert phases == ["forward", "backward", "optimizer"]
    assert loss == pytest.approx(0.06)
    torch.testing.assert_close(gradient, torch.full((2, 3), 0.01))
    torch.testing.assert_close(model.w.data, torch.full((2, 3), 1 - 0.1 * 0.01))
    assert model.w.grad is None  # freed


@pytest.mark.parametrize("n", [2, 4])
def test_micro_batches_are_a_mean(n):
    _, (gradient,), phases, loss = trained(micro_batches=n)
    assert phases == [*["forward", "backward"] * n, "optimizer"]
    torch.testing.assert_close(gradient, torch.full((2, 3), 0.01))
    assert loss == pytest.approx(0.06)


@pytest.mark.parametrize("clip", [True, False])
def test_the_norm_is_clipped_where_asked(clip):
    _, (gradient,), _, _ = trained(scale=1000.0, clip=clip)
    length = math.sqrt(6) * 10.0
    assert float(gradient.norm()) == pytest.approx(MAX_NORM if clip else length, rel=1e-4)


def test_a_gradient_that_is_no_number_ends_the_row():
    with pytest.raises(RuntimeError, match="the gradient's norm is nan"):
        trained(scale=math.nan)
    trained(scale=math.nan, clip=False)


def test_without_updates_the_weights_stay():
    model, seen, _, _ = trained(updates=False)
    assert seen == []
    assert torch.equal(model.w.data, torch.ones(2, 3))
    assert model.w.grad is None


def test_the_optimizer_is_that_of_fit(monkeypatch):
    model = models.make_model("gpt2", "1/2/8", 16)
    assert (model.config.n_layer, model.config.n_head, model.config.n_embd) == (1, 2, 8)
    assert (model.config.block_size, model.config.vocab_size) == (16, models.VOCABULARY)
    optimizer = Training(model, BATCH, "fp32").optimizer
    groups = optim.make_adamw(model.named_parameters(), Settings(), True).param_groups
    for ours, expected in zip(optimizer.param_groups, groups, strict=True):
        assert ours["weight_decay"] == expected["weight_decay"]
        assert len(ours["params"]) == len(expected["params"])
        assert (ours["lr"], ours["betas"], ours["fused"]) == (1e-4, (0.9, 0.95), True)
    half = step.fit_optimizer(model, CPU, "fp16")  # GradScaler unscales, unfused
    assert not half.param_groups[0]["fused"]
    monkeypatch.setattr(optim, "FUSED_ADAMW_DEVICES", {"cuda"})
    assert not step.fit_optimizer(model, CPU, "fp32").param_groups[0]["fused"]


@pytest.mark.parametrize(("dtype", "enabled"), [("fp16", True), ("fp32", False), ("bf16", False)])
def test_gradients_of_fp16_alone_are_scaled(dtype, enabled):
    assert Training(Linear(), BATCH, dtype).scaler.is_enabled() is enabled


# ---- dtypes --------------------------------------------------------------------------------------


@pytest.fixture
def matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(
    ("device", "dtype", "operands", "products"),
    [
        ("cpu", "fp32", torch.float32, "highest"),
        ("cpu", "bf16", torch.bfloat16, "highest"),
        ("cuda", "tf32", torch.float32, "high"),
        ("cuda", "fp16", torch.float16, "highest"),
        ("cuda", "bf16", torch.bfloat16, "highest"),
    ],
)
def test_products_are_in_the_dtype_of_the_row(
    device, dtype, operands, products, monkeypatch, matmul_precision
):
    kept = []
    monkeypatch.setattr(step, "keep_freed_memory", lambda: kept.append(True))
    monkeypatch.setattr(step, "cuda_has_bf16", lambda: True)
    assert step.set_products(dtype, torch.device(device)) is operands
    assert torch.get_float32_matmul_precision() == products
    assert len(kept) == (device == "cpu")


def test_what_a_device_would_compute_otherwise_is_skipped(monkeypatch, matmul_precision):
    with pytest.raises(SkippedError, match="tf32 is a mode of NVIDIA GPUs, not of cpu"):
        step.set_products("tf32", CPU)
    with pytest.raises(SkippedError, match="fp16 training needs a GPU"):
        step.prepare(SimpleNamespace(device="cpu", dtype="fp16"))
    monkeypatch.setattr(step, "cuda_has_bf16", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "V100")
    with pytest.raises(SkippedError, match="V100 has no bfloat16"):
        step.set_products("bf16", torch.device("cuda"))
    assert step.prepare(SimpleNamespace(device="cpu", dtype="bf16")) == CPU


@pytest.mark.parametrize(("dtype", "expected"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_forward_pass_is_in_the_dtype_of_the_row(dtype, expected):
    with autocast(dtype, CPU):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is expected


# ---- facts of the process ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compiled", "graphs", "fine"),
    [(True, 1, True), (True, 0, False), (False, 0, True), (False, 2, False)],
)
def test_a_compiled_row_has_graphs_and_no_other(compiled, graphs, fine, monkeypatch):
    monkeypatch.setattr(step, "compiled_graphs", lambda: 5 + graphs)
    if fine:
        assert step.checked_graphs(compiled, 5) == graphs
    else:
        with pytest.raises(
            RuntimeError, match=f"compile is {compiled}, but .* made {graphs} graphs"
        ):
            step.checked_graphs(compiled, 5)


def test_mfu_is_that_of_speed_monitor(monkeypatch):
    peak = Peak(1e12, "a chip", "https://x")
    monkeypatch.setattr(step, "lookup", lambda name, dtype: peak if dtype == "fp32" else None)
    measured = Peak(2e12, "measured", "here")
    monkeypatch.setattr(step, "measured_peak", lambda device, dtype: measured)
    with torch.device("meta"):
        model = models.make_model("gpt2", "2/2/16", 32)
    per_token = flops.flops_per_token(model.num_params(embeddings=False), 2, 16, 32)
    found = step.rates(model, CPU, "fp32", 1e5, 32)
    assert found == {"tokens_per_sec": 1e5, "mfu": flops.mfu(1e5, per_token, 1e12)}
    assert step.rates(model, CPU, "bf16", 1e5, 32)["mfu"] == found["mfu"] / 2
