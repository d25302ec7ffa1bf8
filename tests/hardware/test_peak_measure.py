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
