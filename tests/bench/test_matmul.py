"""`gpt-lightning bench matmul`: rates that follow from the times, and the model's own shapes."""

import pytest
import torch

from gpt_lightning.bench import matmul
from gpt_lightning.bench.models import SHAPES, make_model
from gpt_lightning.hardware.peaks import Peak
from gpt_lightning.model import flops
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import call


@pytest.fixture(autouse=True)
def own_peak(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(matmul, "measured_peak", lambda device, dtype: Peak(2e12, "a", "test"))
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_rates_follow_from_times(dtype: str) -> None:
    m, k, n = 32, 48, 64
    product = {"device": "cpu", "dtype": dtype, "m": m, "k": k, "n": n}
    row = call(matmul.measure_matmul, product | {"warmup": 1, "steps": 3})
    product_flops = 2 * m * k * n
    assert row["calls"] > 1  # far below a round's length
    seconds = row["forward_ms"] / 1e3
    assert row["forward_tflops_per_sec"] == pytest.approx(product_flops / seconds / 1e12)
    seconds = row["backward_ms"] / 1e3
    assert row["backward_tflops_per_sec"] == pytest.approx(2 * product_flops / seconds / 1e12)
    assert row["forward_of_measured"] == pytest.approx(row["forward_tflops_per_sec"] / 2)
    assert row["measured_peak_tflops_per_sec"] == 2.0


def test_shapes_of_the_model_add_up_to_its_flops() -> None:
    layers, _, width = SHAPES["small"]
    tokens, context = 4 * 256, 256
    shapes = matmul.model_shapes("small", tokens, width, 10_000)
    times = {name: 1 if name.endswith("head") else layers for name in shapes}
    products = sum(2 * m * k * n * times[name] for name, (m, k, n) in shapes.items())
    with torch.device("meta"):
        n_params = make_model("gpt2", "small", context).num_params(embeddings=False)
    per_token = flops.flops_per_token(n_params, layers, width, context)
    attention = 12 * layers * width * context  # q k^T and weights v are no products with weights
    # biases and norms are 0.1% of the parameters
    assert 3 * products / tokens == pytest.approx(per_token - attention, rel=2e-3)


def test_sizes_of_configs_gpu_have_their_micro_batch_and_vocabulary() -> None:
    _, rows = sweep.read_options(matmul.BENCH, ["--squares=none", "--sizes=124m,1558m,small"])
    shapes = {row["shape"]: (row["m"], row["k"], row["n"]) for row in rows}
    assert shapes["124m qkv"] == (65_536, 768, 2304)
    assert shapes["124m head"] == (65_536, 768, 50_304)
    assert shapes["1558m MLP down"] == (16_384, 6400, 1600)
    assert shapes["small qkv"] == (1024, 768, 2304)
