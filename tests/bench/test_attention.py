"""`gpt-lightning bench attention`: kernels agree, and memory obeys arithmetic."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch

from gpt_lightning.bench import attention, memory_meter, step
from gpt_lightning.bench.memory_meter import MIB
from gpt_lightning.bench.models import RoPE
from gpt_lightning.cli import main
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import SkippedError, call, failure

BATCH, D = 2, 16


def in_this_process(address: str, configuration: dict, timeout_s: float) -> dict:
    module, function = address.split(":")
    try:
        measured = call(getattr(importlib.import_module(module), function), configuration)
        return {"status": "ok", "note": "", **measured}
    except Exception as error:
        return failure(error)


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(memory_meter, "limit_memory", lambda *args: None)  # not of pytest
    monkeypatch.setattr(sweep, "isolated", in_this_process)


def measured(kernel: str, context: int, **changes: object) -> dict:
    row = {"device": "cpu", "dtype": "fp32", "model": "gpt2", "kernel": kernel, "causal": True}
    row |= {"batch": BATCH, "d": D, "context": context, "heads": 1, "warmup": 1, "steps": 3}
    return call(attention.measure_attention, row | {"memory_gib": None} | changes)


def qkv(context: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(BATCH, 1, context, D) for _ in range(3)]


@pytest.mark.parametrize("causal", [True, False])
def test_all_kernels_are_the_same_function(causal: bool) -> None:
    naive, math, flash = (
        attention.make_attention(kernel, causal)(*qkv(32))
        for kernel in ("naive", "sdpa-math", "sdpa-flash")
    )
    torch.testing.assert_close(math, naive)
    torch.testing.assert_close(flash, naive)
    other = attention.make_attention("naive", not causal)(*qkv(32))
    assert not torch.allclose(other, naive)


def test_memory_held_grows_with_the_square_of_the_context_unless_it_is_fused() -> None:
    for kernel, at_least, at_most in (("naive", 10.0, 16.1), ("sdpa-flash", 3.9, 4.1)):
        short, long = (measured(kernel, context)["held_mib"] for context in (128, 512))
        assert at_least < long / short < at_most, kernel
    # the weights, float32, are what the definition cannot do without
    weights = BATCH * 512 * 512 * 4 / MIB
    assert weights <= measured("naive", 512)["held_mib"] < 1.5 * weights


@pytest.mark.parametrize(("gib", "note"), [(0.03, ""), (0.02, "freed memory is not kept")])
def test_freed_memory_is_kept_while_twelve_matrices_of_scores_fit(gib, note, monkeypatch) -> None:
    kept = []
    monkeypatch.setattr(memory_meter, "limit_memory", lambda *args: gib)
    monkeypatch.setattr(step, "keep_freed_memory", lambda: kept.append(True))
    assert measured("naive", 512)["note"] == note  # a matrix has 2 MiB, twelve 0.023 GiB
    assert bool(kept) == (not note)


def test_heads_are_the_models_and_the_rates_follow_from_the_times(monkeypatch) -> None:
    seen = []
    run_step = attention.run_step
    monkeypatch.setattr(
        attention, "run_step", lambda f, qkv, phase: (seen.append(qkv[0]), run_step(f, qkv, phase))
    )
    for causal, scores in ((True, 32 * 32 / 2), (False, 32 * 32)):
        found = measured("sdpa-flash", 32, causal=causal, heads=3)
        tflop = 4 * BATCH * 3 * scores * D / 1e12
        assert found["forward_tflops_per_sec"] == pytest.approx(tflop / found["forward_ms"] * 1e3)
        rate = 2.5 * tflop / found["backward_ms"] * 1e3
        assert found["backward_tflops_per_sec"] == pytest.approx(rate)
    assert {q.shape for q in seen} == {(BATCH, 3, 32, D)}
    # as the model's: the channels of all heads of a token are neighbours
    assert {q.stride() for q in seen} == {(32 * 3 * D, D, 3 * D, 1)}


def test_what_the_device_lacks_is_skipped_with_a_reason() -> None:
    with pytest.raises(SkippedError, match=r"(?i)kernel|backend"):
        measured("sdpa-cudnn", 16)
    with pytest.raises(SkippedError, match="tf32"):
        measured("naive", 16, dtype="tf32")
    with pytest.raises(SkippedError, match="d 5 is odd"):
        measured("naive", 16, model="course", d=5)


def test_another_kernel_than_asked_for_is_not_measured() -> None:
    def make() -> torch.Tensor:
        return torch.randn(1, 1, 8, D, requires_grad=True)

    math = attention.make_attention("sdpa-math", True)
    attention.check_kernel("sdpa-math", math, make)
    with pytest.raises(SkippedError, match=r"another kernel: .*Softmax"):
        attention.check_kernel("sdpa-flash", math, make)
    flash = attention.make_attention("sdpa-flash", True)
    with pytest.raises(SkippedError, match=r"another kernel: .*FlashAttention"):
        attention.check_kernel("sdpa-math", flash, make)


@pytest.mark.slow
def test_the_grid_is_rows_and_a_picture(capsys) -> None:
    options = "--d 8,16 --contexts 64 --kernels naive,sdpa-cudnn --steps 2 --batch 1"
    assert main(["bench", "attention", "--device=cpu", *options.split(), "--memory-gib=1"]) == 0
    (folder,) = (sweep.ROOT / "attention").iterdir()
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert len(rows) == 2 * 2
    assert {(row["d"], row["context"]) for row in rows} == {(8, 64), (16, 64)}
    for row in rows:
        assert row["status"] == ("skipped" if row["kernel"] == "sdpa-cudnn" else "ok")
    assert (folder / "attention.png").stat().st_size > 20_000
    assert "attention.png" in (folder / "results.md").read_text()
    assert "sdpa-cudnn" in capsys.readouterr().out


@pytest.mark.parametrize("causal", [True, False])
def test_the_courses_attention_rotates_queries_and_keys(causal: bool) -> None:
    q, k, v = qkv(32)
    rope = RoPE(D, 32)
    expected = attention.make_attention("naive", causal)(rope(q), rope(k), v)
    torch.testing.assert_close(attention.make_attention("naive", causal, rope)(q, k, v), expected)
    assert not torch.allclose(attention.make_attention("naive", causal)(q, k, v), expected)


# ---- a kernel of the user ------------------------------------------------------------------------

OWN = """
import torch

def plain(q, k, v, causal):
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    if causal:
        future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    return scores.softmax(-1) @ v

def forgets_the_mask(q, k, v, causal):
    return plain(q, k, v, False)

def slightly_off(q, k, v, causal):
    return plain(q, k, v, causal) * 1.0001

def a_tenth_off(q, k, v, causal):
    return plain(q, k, v, causal) * 1.1

def transposed(q, k, v, causal):
    return plain(q, k, v, causal).transpose(1, 2)

class Right:
    apply = plain

def wrong_gradient(q, k, v, causal):
    return plain(q, k, 1.01 * v - 0.01 * v.detach(), causal)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # as the working directory is in a row's process
    Path("own_kernel.py").write_text(OWN)
    yield
    sys.modules.pop("own_kernel", None)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("causal", [True, False])
def test_a_right_kernel_is_measured(own, causal, dtype) -> None:
    for name in ("plain", "Right.apply"):
        row = measured(f"own_kernel:{name}", 16, causal=causal, dtype=dtype, heads=2)
        assert row["total_ms"] > 0
        assert row["graphs"] == 0


def test_a_wrong_kernel_is_not_measured(own) -> None:
    with pytest.raises(RuntimeError, match=r"wrong output: .* off the definition in float64"):
        measured("own_kernel:forgets_the_mask", 16)
    assert measured("own_kernel:forgets_the_mask", 16, causal=False)["total_ms"] > 0
    with pytest.raises(RuntimeError, match=r"wrong output: .* the limit is"):
        measured("own_kernel:slightly_off", 16)
    with pytest.raises(RuntimeError, match=r"wrong output: .* the limit is"):
        measured("own_kernel:a_tenth_off", 16, dtype="bf16")  # whose own error is a hundredth
    with pytest.raises(RuntimeError, match="Mismatch in shape"):
        measured("own_kernel:transposed", 16 + 1)
    with pytest.raises(RuntimeError, match="wrong gradient of v"):
        measured("own_kernel:wrong_gradient", 16)
