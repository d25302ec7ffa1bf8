"""`gpt-lightning bench sizes` on tiny models."""

import json
import resource
import sys
import time
from pathlib import Path

import pytest
import torch

from gpt_lightning.bench import sizes, sweep
from gpt_lightning.cli import main
from gpt_lightning.model import GPT
from gpt_lightning.peaks import Peak

TINY = {
    "device": "cpu",
    "dtype": "fp32",
    "compile": False,
    "size": "1/1/16",
    "shape": [1, 1, 16],
    "batch": 2,
    "context": 16,
    "warmup": 1,
    "steps": 1,
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_rates(monkeypatch):
    """A peak takes a second to measure."""
    monkeypatch.setattr(sizes, "rates", lambda *args: {})


@pytest.fixture
def limited_memory():
    """2 GiB of address space more than this process has, for it and those it starts."""
    if sys.platform != "linux":
        pytest.skip("the address space is limited on Linux only")
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + 2 * 2**30
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_phases_add_up_to_the_total(no_rates):
    row = sizes.measure_size(**TINY)  # of one step, whose median is itself
    parts = row["forward_ms"] + row["backward_ms"] + row["optimizer_ms"]
    assert parts == pytest.approx(row["total_ms"], rel=1e-9)
    assert min(row["forward_ms"], row["backward_ms"], row["optimizer_ms"]) > 0
    assert row["inference_ms"] > 0
    assert row["peak_memory_gib"] > 0.05


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
    row = sizes.measure_size(**TINY | {"warmup": 0})
    phases = {key: row[key] for key in ("forward_ms", "backward_ms", "optimizer_ms")}
    assert max(phases, key=phases.get) == phase
    assert row[phase] >= 200


def test_statistics_of_the_total_are_in_order(no_rates):
    row = sizes.measure_size(**TINY | {"steps": 5})
    assert 0 < row["total_min_ms"] <= row["total_ms"] <= row["total_p90_ms"] <= row["total_max_ms"]
    assert row["total_min_ms"] <= row["total_mean_ms"] <= row["total_max_ms"]


def test_eager_and_compiled_differ_in_what_ran(no_rates, monkeypatch):
    compile_module = torch.nn.Module.compile
    # graphs are counted before a backend sees them; the default one calls a C++ compiler
    monkeypatch.setattr(
        torch.nn.Module, "compile", lambda self: compile_module(self, backend="eager")
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert sizes.measure_size(**TINY)["graphs"] == 0
    assert sizes.measure_size(**TINY | {"compile": True})["graphs"] >= 1
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def test_matmul_precision_is_that_of_the_row(no_rates):
    torch.set_float32_matmul_precision("medium")
    try:
        assert sizes.measure_size(**TINY)["matmul_precision"] == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("dtype", ["tf32", "fp16"])
def test_what_a_cpu_cannot_do_is_skipped(dtype):
    from gpt_lightning.bench.worker import failure

    with pytest.raises(Exception, match="GPU") as caught:
        sizes.measure_size(**TINY | {"dtype": dtype})
    assert failure(caught.value)["status"] == "skipped"


def test_too_large_a_batch_is_a_row(limited_memory, capsys):
    # logits of 6,000 x 16 x 10,000 float32 are 3.6 GiB; that a sweep goes on is in test_sweep.py
    argv = "bench sizes --device cpu --n_layer 1 --n_head 1 --d_model 16 --contexts 16 --steps 1"
    assert main([*argv.split(), "--dtypes", "fp32", "--batches", "6000", "--warmup", "0"]) == 0
    (path,) = sweep.ROOT.glob("sizes/*/results.json")
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["batch"], row["status"], row["total_ms"]) == (6000, "out of memory", None)
    assert "memory" in row["note"]
    assert "out of memory" in capsys.readouterr().out


def test_rates_are_those_of_the_total(monkeypatch):
    peak = Peak(1e12, "a peak", "a test", measured=True)
    monkeypatch.setattr("gpt_lightning.peaks.lookup", lambda name, dtype: None)
    monkeypatch.setattr("gpt_lightning.peaks.measured_peak", lambda device, dtype: peak)
    row = sizes.measure_size(**TINY)
    assert row["tokens_per_sec"] == pytest.approx(2 * 16 / row["total_ms"] * 1e3)
    # 6 N + 12 L C T FLOPs a token
    per_token = 6 * (10_000 * 16 + 12 * 16**2 + 13 * 16 + 2 * 16) + 12 * 16 * 16
    assert row["mfu"] == pytest.approx(row["tokens_per_sec"] * per_token / 1e12)


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["--sizes", "smal"], "error: --sizes is 'smal'"),
        (["--dtypes", "fp64"], "error: --dtypes is 'fp64'"),
        (["--compile", "maybe"], "error: --compile is 'maybe'"),
        (["--device", "cuda"], "error: --device cuda: this machine has no such device"),
        (["--contxts", "8"], "error: unknown key 'contxts': did you mean 'contexts'"),
    ],
)
def test_mistakes_take_one_line(args, line, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "sizes", *args]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith(line)
    assert errors.count("\n") == 1
    assert not sweep.ROOT.exists()


@pytest.mark.slow  # the C++ compiler takes half a minute
def test_the_command_tells_compiled_from_eager(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # where the measured peak is kept
    argv = "bench sizes --device cpu --n_layer 1 --n_head 1 --d_model 16 --contexts 16 --steps 2"
    assert main([*argv.split(), "--dtypes", "fp32", "--compile", "false,true"]) == 0
    (path,) = sweep.ROOT.glob("sizes/*/results.json")
    eager, compiled = json.loads(path.read_text())["rows"]
    assert eager["graphs"] == 0
    assert compiled["graphs"] >= 1
