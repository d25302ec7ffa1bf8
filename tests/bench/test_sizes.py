"""`gpt-lightning bench sizes` on tiny models."""

import time
from dataclasses import replace

import pytest
import torch

from gpt_lightning.bench import sizes
from gpt_lightning.model.gpt import GPT
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import call

TINY = {
    "device": "cpu",
    "dtype": "fp32",
    "compile": False,
    "model": "gpt2",
    "optimizer": True,
    "size": "1/1/16",
    "batch": 2,
    "context": 16,
    "warmup": 1,
    "steps": 1,
}


@pytest.fixture
def no_rates(monkeypatch):
    """A peak takes a second to measure."""
    monkeypatch.setattr(sizes, "rates", lambda *args: {})


@pytest.mark.parametrize(
    ("phase", "owner", "name"),
    [
        ("forward_ms", GPT, "forward"),
        ("backward_ms", torch.Tensor, "backward"),
        ("optimizer_ms", torch.optim.AdamW, "step"),
    ],
)
def test_time_is_in_the_phase_that_took_it(phase, owner, name, no_rates, monkeypatch):
    function = getattr(owner, name)

    def slow(*args, **kwargs):
        time.sleep(0.2)
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)
    row = call(sizes.measure_size, TINY | {"warmup": 0})  # one step is its own median
    phases = {key: row[key] for key in ("forward_ms", "backward_ms", "optimizer_ms")}
    assert max(phases, key=phases.get) == phase
    assert row[phase] >= 200
    assert sum(phases.values()) == pytest.approx(row["total_ms"], rel=1e-9)
    assert min(phases.values()) > 0
    assert row["peak_memory_gib"] > 0.05


def test_forward_and_backward_have_a_sum_of_each_step(no_rates, monkeypatch):
    times = {"forward": [1.0, 2.0, 30.0], "backward": [9.0, 3.0, 8.0], "optimizer": [1.0] * 3}
    times["total"] = [11.0, 6.0, 39.0]

    def block(self, warmup, steps):
        self.times, self.first = dict(times), {"forward": 7.0, "total": 8.0}

    monkeypatch.setattr(sizes.Training, "block", block)
    rates = []
    monkeypatch.setattr(sizes, "rates", lambda *args: rates.append(args[3]) or {})
    row = call(sizes.measure_size, TINY)
    assert rates == [2 * 16 / row["total_ms"] * 1e3] == [pytest.approx(32 / 11 * 1e3)]
    assert (row["forward_ms"], row["forward_mean_ms"]) == (2.0, 11.0)
    assert (row["backward_ms"], row["backward_mean_ms"]) == (8.0, pytest.approx(20 / 3))
    assert (row["forward_backward_ms"], row["forward_backward_mean_ms"]) == (10.0, 53 / 3)
    assert row["forward_backward_std_ms"] == pytest.approx(17.7858, abs=1e-4)  # 10, 5 and 38
    assert (row["first_forward_ms"], row["first_step_ms"]) == (7.0, 8.0)


@pytest.mark.parametrize("model", ["gpt2", "course"])
def test_without_the_optimizer_no_weight_changes(model, no_rates, monkeypatch):
    models = []
    make = sizes.models.make_model

    def kept(*args):
        models.append(make(*args))
        models.append([p.detach().clone() for p in models[0].parameters()])
        return models[0]

    monkeypatch.setattr(sizes.models, "make_model", kept)
    row = call(sizes.measure_size, TINY | {"optimizer": False, "model": model})
    assert "optimizer_ms" not in row
    assert row["total_ms"] >= row["forward_backward_ms"]
    after = list(models[0].parameters())
    assert all(torch.equal(*pair) for pair in zip(after, models[1], strict=True))
    assert type(models[0]).__name__ == {"gpt2": "GPT", "course": "CourseModel"}[model]


def test_the_speed_up_is_over_the_fp32_row_of_the_same_configuration():
    setting = {"device": "cpu", "dtype": "fp32", "compile": False, "size": "small", "batch": 4}
    setting |= {"context": 256, "model": "gpt2", "optimizer": True, "warmup": 2}
    row = sizes.SizeRow.of(setting | {"total_ms": 12.0})
    assert sizes.over_fp32(row, []).over_fp32 == 1.0
    half = replace(row, dtype="bf16", total_ms=3.0)
    assert sizes.over_fp32(half, [row]).over_fp32 == 4.0
    for other in ("device", "compile", "size", "batch", "context", "model", "optimizer", "warmup"):
        assert sizes.over_fp32(replace(half, **{other: 5}), [row]).over_fp32 is None
    assert sizes.over_fp32(half, []).over_fp32 is None
    assert sizes.over_fp32(half, [replace(row, total_ms=None)]).over_fp32 is None
    assert sizes.over_fp32(replace(half, total_ms=None), [row]).over_fp32 is None


def test_a_row_that_is_not_what_its_column_says_fails(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: None)
    with pytest.raises(RuntimeError, match=r"compile is True, .* made 0 graphs"):
        call(sizes.measure_size, TINY | {"compile": True})


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--sizes small,xl", {"small": (12, 12, 768), "xl": (48, 25, 1600)}),
        # heads of 64, as GPT-2's
        ("--shapes 4x512,16x1024", {"4/8/512": (4, 8, 512), "16/16/1024": (16, 16, 1024)}),
        ("--shapes 3x16", {"3/1/16": (3, 1, 16)}),
    ],
)
def test_sizes_of_ones_own(options, found):
    _, rows = sweep.read_options(sizes.BENCH, options.split())
    shapes = {row["size"]: tuple(sizes.models.shape_of(row["size"])) for row in rows}
    assert shapes == found


# ---- published rows ------------------------------------------------------------------------------


def published(*names: str, batch: int = 4) -> list:
    rows = [sizes.SizeRow.of({"size": name, "batch": batch, "context": 256}) for name in names]
    return list(sizes.published_tables(rows).get("published", []))


def test_published_rows_of_our_configurations_stand_beside_ours():
    rows = published("small", "2.7B")
    assert {(row.size, row.batch, row.context) for row in rows} == {
        ("small", 4, 256),
        ("2.7B", 4, 256),
    }
    assert (len(published(*sizes.models.COURSE_SIZES)), len(rows)) == (32, 12)
    for row in rows:
        # the report's three means are of the same ten steps
        assert row.forward_ms + row.backward_ms == pytest.approx(row.total_ms, rel=1e-4)
        assert row.tokens_per_sec == pytest.approx(1024 / row.total_ms * 1e3)
        assert ("TF32" in row.defects) == (
            row.device == "cuda" and row.dtype_as_called == "float32"
        )
    (negative,) = (row for row in rows if row.backward_ms < 0)
    assert "negative" in negative.defects
    assert "outlier" in negative.defects
    assert published("small", batch=2) == []
