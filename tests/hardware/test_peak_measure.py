"""Measured peaks: the measurement leaves no trace, and its cache is kept, replaced or reported."""

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch

from gpt_lightning import files
from gpt_lightning.errors import UserError
from gpt_lightning.hardware import peak_measure
from gpt_lightning.hardware.peak_measure import measure_peak
from gpt_lightning.hardware.peaks import device_name, measured_peak, resolve_peak

CPU = torch.device("cpu")


@pytest.fixture
def high_precision() -> Iterator[None]:
    """Setting of a run that differs from PyTorch's default and from the one for measuring fp32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_measuring_leaves_no_trace(dtype: str, high_precision: None) -> None:
    torch.manual_seed(1337)
    state = torch.get_rng_state()
    assert measure_peak(CPU, dtype, seconds=0.05) > 1e9  # any CPU of this century
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("dtype", ["tf32", "int8"])
def test_unmeasurable_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(UserError, match=dtype):
        measure_peak(CPU, dtype)


class Clock:
    """A second passes with each product; reading the clock takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0) -> None:
        self.now, self.products, self.seconds = 0.0, 0, seconds
        monkeypatch.setattr(peak_measure.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "mm", self.multiply)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.products += 1
        self.now += self.seconds


def test_a_rate_is_of_the_fastest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rate = peak_measure._product_rate(8, CPU, torch.float32, 3.5)
    assert rate == 2 * 8**3  # multiplications and additions a second
    assert clock.products == 3  # a fourth one would end after the time is over


def test_short_products_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, seconds=0.001)
    rate = peak_measure._product_rate(8, CPU, torch.float32, 0.05)
    assert rate == pytest.approx(2 * 8**3 / 0.001)
    assert clock.products == 1 + 2 + 4 + 8 + 16 + 16  # until a round takes 10 ms


@pytest.mark.parametrize(
    ("dtype", "multiplied", "precision"),
    [
        ("bf16", torch.bfloat16, "highest"),
        ("fp16", torch.float16, "highest"),
        ("tf32", torch.float32, "high"),
        ("fp32", torch.float32, "highest"),
        ("fp64", torch.float64, "highest"),
    ],
)
def test_only_tf32_rounds_the_factors(
    dtype: str, multiplied: torch.dtype, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()

    def rate(n: int, device: torch.device, kind: torch.dtype, seconds: float) -> float:
        seen.add((kind, torch.get_float32_matmul_precision()))
        return 1e12

    monkeypatch.setattr(peak_measure, "_product_rate", rate)
    measure_peak(torch.device("cuda"), dtype, seconds=0.0)
    assert seen == {(multiplied, precision)}


def test_larger_products_are_tried_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, now = [], [0.0]
    monkeypatch.setattr(peak_measure.time, "perf_counter", lambda: now[0])

    def rate(n: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
        tried.append((n, seconds))
        now[0] += 1.0
        return {size: 1e12 * (i + 1) for i, size in enumerate(sizes)}[n]

    sizes = peak_measure._MEASURED_SIZES
    monkeypatch.setattr(peak_measure, "_product_rate", rate)
    assert measure_peak(CPU, "fp32", seconds=1000.0) == 1e12 * len(sizes)
    share = 1000.0 / len(sizes)
    assert tried == [(sizes[0], 0.0), *((n, share) for n in sizes)]
    tried.clear()
    assert measure_peak(CPU, "fp32", seconds=1.0) == 1e12  # one size is always measured
    assert [n for n, _ in tried] == [sizes[0], sizes[0]]


@pytest.fixture
def cache_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(platformdirs, "user_cache_dir", lambda app: str(tmp_path / app))
    return tmp_path / "gpt-lightning" / "peaks.json"


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Rates that the next measurements return, in order."""
    coming: list[float] = []
    monkeypatch.setattr(peak_measure, "measure_peak", lambda *_, **__: coming.pop(0))
    return coming


def test_measured_peak_is_real(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peak_measure,
        "measure_peak",
        lambda device, dtype, seconds: measure_peak(device, dtype, 0.05),
    )
    peak, line = resolve_peak("measure", CPU, "fp32")
    assert peak is not None
    assert peak.flops > 1e9
    assert peak.label == f"measured fp32 matrix-product peak of {device_name(CPU)}"
    assert peak.label in line


def test_the_best_rate_of_each_dtype_and_thread_count_is_kept(
    cache_file: Path, rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates += [1e12, 9e12, 0.5e12, 2e12]
    found = [measured_peak(CPU, dtype).flops for dtype in ("fp32", "bf16", "fp32", "fp32")]
    assert found == [1e12, 9e12, 1e12, 2e12]  # a busy machine lowers nothing, an idle one raises
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    rates += [3e12]
    assert measured_peak(CPU, "fp32").label.endswith(", 77 threads")
    assert len(json.loads(cache_file.read_text())) == 3
    assert [path.name for path in cache_file.parent.iterdir()] == ["peaks.json"]  # no drafts left


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe", b"[1.0]", b'{"a": -1.0}', b'{"a": NaN}', b'{"a": "1"}']
)
def test_a_corrupt_cache_is_reported_and_replaced(
    cache_file: Path, rates: list[float], content: bytes
) -> None:
    rates += [1e12, 0.5e12]
    cache_file.parent.mkdir()
    cache_file.write_bytes(content)
    with pytest.warns(UserWarning, match="peaks.json is ignored"):
        measured_peak(CPU, "fp32")
    assert measured_peak(CPU, "fp32").flops == 1e12  # now from the file, without a warning


def test_a_full_disk_is_reported_and_keeps_the_old_file(
    cache_file: Path, rates: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates += [1e12, 2e12]
    measured_peak(CPU, "fp32")
    before = cache_file.read_bytes()

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_durable", no_space)
    with pytest.warns(UserWarning, match="not kept: .*No space left"):
        assert measured_peak(CPU, "bf16").flops == 2e12
    assert cache_file.read_bytes() == before
