"""Peaks: the table by real device names, `peak_flops`, the measurement, and its cache."""

import errno
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import platformdirs
import pytest
import torch

from gpt_lightning import files
from gpt_lightning.errors import UserError
from gpt_lightning.hardware import peaks
from gpt_lightning.hardware.peaks import (
    A100_BF16_PEAK_FLOPS,
    CHIPS,
    device_name,
    lookup,
    measure_peak,
    measured_peak,
    resolve_peak,
)

CPU = torch.device("cpu")
TABLE = Path(__file__).with_name("peaks.tsv").read_text(encoding="utf-8")
ROWS = [tuple(line.split("\t")) for line in TABLE.splitlines() if line[:1] != "#"]


def test_lookup_by_real_names() -> None:
    for name, dtype, tflops, tolerance in ROWS:
        for one in ("bf16", "fp16", "tf32", "fp32") if dtype == "any" else (dtype,):
            peak = lookup(name, one)
            expected = None if tflops == "-" else pytest.approx(float(tflops), float(tolerance))
            assert (peak and peak.flops / 1e12) == expected, (name, one)
            assert peak is None or peak.source.startswith("https://")


def test_no_published_figure_has_changed() -> None:
    """The digest is of the tables as they were compared with their sources, row by row."""
    found = hashlib.sha256(json.dumps([CHIPS, A100_BF16_PEAK_FLOPS]).encode()).hexdigest()
    assert found == "1bfa318b92aa94d6f7697e9ea94d4499d86c9b3a4d9e9c069fb99c67ba65f237"


def test_rows_obey_the_chips_ratios_and_clocks() -> None:
    for _, label, bf16, fp16, tf32, _, _ in CHIPS:
        if bf16 is not None and tf32 is not None:  # figures are rounded
            assert bf16 == fp16 == pytest.approx(2 * tf32, rel=0.02), label
    text = Path(peaks.__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    clocks = re.findall(r"([\d.]+), (?!null)\S+\]  # ([\d,]+) at ([\d,]+) MHz", text)
    assert len(clocks) == 24
    for fp32, *facts in clocks:  # a multiply-add of each core at each clock
        cores, mhz = (int(fact.replace(",", "")) for fact in facts)
        assert float(fp32) == pytest.approx(cores * 2 * mhz / 1e6)


def test_auto_says_why_there_is_no_peak() -> None:
    peak, line = resolve_peak("auto", CPU, "fp32")
    assert peak is None
    assert device_name(CPU) in line
    assert device_name(CPU).endswith(f", {torch.get_num_threads()} threads")


@pytest.mark.parametrize(
    ("setting", "flops"), [("a100", 312e12), (67e12, 67e12), ("67e12", 67e12), (5, 5.0)]
)
def test_conventions_and_numbers(setting: str | float, flops: float) -> None:
    peak, line = resolve_peak(setting, CPU, "fp32")
    assert peak is not None
    assert peak.flops == flops
    assert line.startswith("MFU relative to ")


@pytest.mark.parametrize(
    "setting", ["A100", "", "auto ", "0", -1.0, 0, float("nan"), float("inf"), "nan", True]
)
def test_bad_settings_are_refused(setting: str | float) -> None:
    with pytest.raises(UserError, match=r"^peak_flops is .*; use auto, measure, a100 or") as error:
        resolve_peak(setting, CPU, "fp32")
    assert "\n" not in str(error.value)


# ---- measured ------------------------------------------------------------------------------------


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
def test_only_tf32_rounds_the_factors(dtype, multiplied, precision, monkeypatch):
    seen = set()

    def rate(n: int, device: torch.device, kind: torch.dtype, seconds: float) -> float:
        seen.add((kind, torch.get_float32_matmul_precision()))
        return 1e12

    monkeypatch.setattr(peaks, "product_rate", rate)
    measure_peak(torch.device("cuda"), dtype, seconds=0.0)
    assert seen == {(multiplied, precision)}


def test_larger_products_are_tried_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, now = [], [0.0]
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: now[0])

    def rate(n: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
        tried.append((n, seconds))
        now[0] += 1.0
        return {size: 1e12 * (i + 1) for i, size in enumerate(sizes)}[n]

    sizes = peaks.SIZES
    monkeypatch.setattr(peaks, "product_rate", rate)
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
    monkeypatch.setattr(peaks, "measure_peak", lambda *_, **__: coming.pop(0))
    return coming


def test_measured_peak_is_real(cache_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peaks, "measure_peak", lambda device, dtype, seconds: measure_peak(device, dtype, 0.05)
    )
    peak, line = resolve_peak("measure", CPU, "fp32")
    assert peak is not None
    assert peak.flops > 1e9
    assert peak.label == f"measured fp32 matrix-product peak of {device_name(CPU)}"
    assert peak.label in line


def test_the_best_rate_of_each_dtype_and_thread_count_is_kept(cache_file, rates, monkeypatch):
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
def test_a_corrupt_cache_is_replaced(cache_file: Path, rates: list[float], content: bytes) -> None:
    rates += [1e12, 0.5e12]
    cache_file.parent.mkdir()
    cache_file.write_bytes(content)
    assert measured_peak(CPU, "fp32").flops == 1e12
    assert measured_peak(CPU, "fp32").flops == 1e12  # now from the file


def test_a_full_disk_keeps_the_old_file(cache_file, rates, monkeypatch):
    rates += [1e12, 2e12]
    measured_peak(CPU, "fp32")
    before = cache_file.read_bytes()

    def no_space(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_durable", no_space)
    assert measured_peak(CPU, "bf16").flops == 2e12
    assert cache_file.read_bytes() == before
