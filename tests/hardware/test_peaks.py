"""Peaks: the table by real device names, `peak_flops`, the measurement, and its cache."""

import errno
import hashlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import platformdirs
import pytest
import torch

from gpt_lightning import files
from gpt_lightning.errors import UserError
from gpt_lightning.hardware import peaks
from gpt_lightning.hardware.peaks import (
    A100_BF16_PEAK_FLOPS,
    APPLE_GPU_MHZ,
    CHIPS,
    apple_peak,
    device_name,
    lookup,
    measure_peak,
    measured_peak,
    resolve_peak,
)

CPU = torch.device("cpu")
TABLE = Path(__file__).with_name("peaks.tsv").read_text(encoding="utf-8")
ROWS = [tuple(line.split("\t")) for line in TABLE.splitlines() if line[:1] != "#"]


@pytest.mark.parametrize(("name", "dtype", "tflops", "tolerance"), ROWS)
def test_lookup_by_real_names(name: str, dtype: str, tflops: str, tolerance: str) -> None:
    if tflops == "-":
        dtypes = ("bf16", "fp16", "tf32", "fp32") if dtype == "any" else (dtype,)
        assert all(lookup(name, dtype) is None for dtype in dtypes)
        return
    peak = lookup(name, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(float(tflops) * 1e12, rel=float(tolerance))
    assert peak.source.startswith("https://")


def test_no_published_figure_has_changed() -> None:
    """The digest is of the tables as they were compared with their sources, row by row."""
    rows = [tuple(chip) for chip in CHIPS]
    geforce = [row for row in rows if row[0].startswith("GeForce")]
    stated = [row for row in rows if row not in geforce]
    rounded = [tuple(f"{x:.6f}" if isinstance(x, float) else x for x in row) for row in geforce]
    text = json.dumps([stated, rounded, APPLE_GPU_MHZ, A100_BF16_PEAK_FLOPS])
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == "258d909f3389490f0e527f6bdd937adb00b2fc47cea6bb3a583efd119ec188e3"


def test_rows_obey_the_tensor_cores_ratios() -> None:
    for chip in CHIPS:
        if chip.bf16 is None or chip.tf32 is None:
            continue
        assert chip.fp16 == chip.bf16, chip.label
        assert chip.bf16 == pytest.approx(2 * chip.tf32, rel=0.02), (
            chip.label
        )  # figures are rounded


def test_apple_peaks() -> None:
    # 38 cores x 128 x 2 x 1.398 GHz, as its owners read it: applegpuinfo issue 10
    peak = lookup("Apple M2 Max, 38 GPU cores", "fp32")
    assert peak is not None
    assert peak.flops == pytest.approx(13.6e12, rel=1e-3)
    assert apple_peak("M2 Max", 38, "bf16") is not None
    assert apple_peak("M2 Max", 38, "tf32") is None
    assert apple_peak("M5", 10, "fp32") is not None
    assert apple_peak("M5", 10, "fp16") is None  # matrix units of unpublished rate
    assert apple_peak("M9", 10, "fp32") is None
    for chip, mhz in (("M3 Pro", 1380), ("M3 Ultra", 1380), ("M4 Max", 1578)):
        for dtype in ("fp32", "fp16", "bf16"):
            peak = apple_peak(chip, 40, dtype)
            assert peak is not None
            assert peak.flops == 40 * 128 * 2 * mhz * 1e6
            assert peak.label == f"Apple {chip}, 40 GPU cores, {dtype} at {mhz} MHz"
    assert all(source.startswith("https://") for _, source in APPLE_GPU_MHZ.values())


def test_mps_name_from_the_systems_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus: list[dict[str, str]] = [{"sppci_model": "Apple M2 Max", "sppci_cores": "38"}]

    def run(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        answers = {
            "sysctl": "Apple M2 Max\n",
            "system_profiler": json.dumps({"SPDisplaysDataType": gpus}),
        }
        return subprocess.CompletedProcess(command, 0, stdout=answers[command[0]])

    monkeypatch.setattr(subprocess, "run", run)
    peaks._apple_gpu_name.cache_clear()
    assert device_name(torch.device("mps")) == "Apple M2 Max, 38 GPU cores"
    peaks._apple_gpu_name.cache_clear()
    gpus[0].pop("sppci_cores")  # as in a virtual machine
    assert device_name(torch.device("mps")) == "Apple M2 Max"

    def hangs(command: tuple[str, ...], **_: Any) -> subprocess.CompletedProcess[str]:
        raise subprocess.TimeoutExpired(command, 10)

    peaks._apple_gpu_name.cache_clear()
    monkeypatch.setattr(subprocess, "run", hangs)
    assert device_name(torch.device("mps")) == "Apple"
    peaks._apple_gpu_name.cache_clear()
    sentence = "system_profiler: unable to read the displays"
    monkeypatch.setattr(peaks, "output_of", lambda *command: sentence)  # no JSON
    assert device_name(torch.device("mps")) == sentence
    peaks._apple_gpu_name.cache_clear()


def test_the_name_of_an_amd_chip_has_its_compute_units(monkeypatch: pytest.MonkeyPatch) -> None:
    units = SimpleNamespace(multi_processor_count=304)
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: units)
    peak, line = resolve_peak("auto", torch.device("cuda"), "bf16")
    assert peak is not None
    assert "1307 TFLOP/s: MI300X bf16 (dense)" in line
    units.multi_processor_count = 38
    peak, line = resolve_peak("auto", torch.device("cuda"), "bf16")
    assert peak is None
    assert line.startswith("no MFU: no published peak for 'AMD Instinct MI300X, 38 CUs' in bf16")


def test_auto_says_why_there_is_no_peak() -> None:
    peak, line = resolve_peak("auto", CPU, "fp32")
    assert peak is None
    assert device_name(CPU) in line
    assert device_name(CPU).endswith(f", {torch.get_num_threads()} threads")


@pytest.mark.parametrize(
    ("setting", "flops"),
    [("a100", 312e12), (67e12, 67e12), ("67e12", 67e12), (5, 5.0)],
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


@pytest.mark.parametrize("dtype", ["tf32", "int8"])
def test_unmeasurable_dtypes_are_refused(dtype: str) -> None:
    with pytest.raises(UserError, match=dtype):
        measure_peak(CPU, dtype)


class Clock:
    """A second passes with each product; reading the clock takes no time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: float = 1.0) -> None:
        self.now, self.products, self.seconds = 0.0, 0, seconds
        monkeypatch.setattr(peaks.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "mm", self.multiply)

    def multiply(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        self.products += 1
        self.now += self.seconds


def test_a_rate_is_of_the_fastest_round(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    rate = peaks._product_rate(8, CPU, torch.float32, 3.5)
    assert rate == 2 * 8**3  # multiplications and additions a second
    assert clock.products == 3  # a fourth one would end after the time is over


def test_short_products_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, seconds=0.001)
    rate = peaks._product_rate(8, CPU, torch.float32, 0.05)
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

    monkeypatch.setattr(peaks, "_product_rate", rate)
    measure_peak(torch.device("cuda"), dtype, seconds=0.0)
    assert seen == {(multiplied, precision)}


def test_larger_products_are_tried_while_there_is_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, now = [], [0.0]
    monkeypatch.setattr(peaks.time, "perf_counter", lambda: now[0])

    def rate(n: int, device: torch.device, dtype: torch.dtype, seconds: float) -> float:
        tried.append((n, seconds))
        now[0] += 1.0
        return {size: 1e12 * (i + 1) for i, size in enumerate(sizes)}[n]

    sizes = peaks._MEASURED_SIZES
    monkeypatch.setattr(peaks, "_product_rate", rate)
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
        peaks,
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
