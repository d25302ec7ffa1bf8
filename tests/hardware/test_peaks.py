"""Peak table looked up by real device names, the names, and the setting `peak_flops`."""

import hashlib
import json
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.hardware import peaks
from gpt_lightning.hardware.peak_table import A100_BF16_PEAK_FLOPS, APPLE_GPU_MHZ, CHIPS
from gpt_lightning.hardware.peaks import apple_peak, device_name, lookup, resolve_peak

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.0),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200", "tf32", 494.5),
        ("NVIDIA H200", "fp32", 67.0),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "bf16", 2250.0),
        ("NVIDIA B300 SXM6 AC", "bf16", 2250.0),
        ("NVIDIA B300 SXM6 AC", "tf32", 1125.0),
        ("NVIDIA B300 SXM6 AC", "fp32", 75.0),
        ("NVIDIA GB200", "bf16", 2500.0),
        ("NVIDIA GB200", "tf32", 1250.0),
        ("NVIDIA GB200", "fp32", 80.0),
        ("NVIDIA GH200 480GB", "bf16", 990.0),
        ("NVIDIA GH200 120GB", "tf32", 494.0),
        ("NVIDIA GH200 144G HBM3e", "fp32", 67.0),
        ("NVIDIA H800 PCIe", "bf16", 756.5),
        ("NVIDIA H800 PCIe", "tf32", 378.0),
        ("NVIDIA H800 PCIe", "fp32", 51.0),
        ("NVIDIA A800-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A800 80GB PCIe", "tf32", 156.0),
        ("NVIDIA A800 40GB Active", "fp16", 311.9),
        ("NVIDIA A800 40GB Active", "fp32", 19.5),
        ("AMD Instinct MI300X, 304 CUs", "bf16", 1307.4),
        ("AMD Instinct MI300X VF, 304 CUs", "fp32", 163.4),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312.0),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156.0),
        ("NVIDIA A100 80GB PCIe", "fp16", 312.0),
        ("A100-SXM4-40GB", "fp32", 19.5),  # old drivers leave NVIDIA out
        ("NVIDIA A10", "bf16", 125.0),
        ("NVIDIA A10G", "bf16", 70.0),
        ("NVIDIA A40", "bf16", 149.7),
        ("NVIDIA RTX A6000", "bf16", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", "bf16", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bf16", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "bf16", 438.9),
        ("NVIDIA L4", "bf16", 121.0),
        ("NVIDIA L40", "bf16", 181.0),
        ("NVIDIA L40S", "bf16", 362.0),
        ("Tesla T4", "fp16", 65.0),
        ("Tesla V100-SXM2-16GB", "fp16", 125.0),
        ("Tesla V100-PCIE-32GB", "fp16", 112.0),
        ("NVIDIA GeForce RTX 4070 SUPER", "fp32", 35.6),
        ("NVIDIA GeForce RTX 3080 Ti", "fp32", 34.2),
    ],
)
def test_lookup_by_real_names(name: str, dtype: str, tflops: float) -> None:
    peak = lookup(name, dtype)
    assert peak is not None
    assert peak.flops == pytest.approx(tflops * 1e12, rel=2e-3)  # a figure has three digits
    assert peak.source.startswith("https://")


@pytest.mark.parametrize(
    ("name", "fp32", "bf16", "tf32"),
    [
        ("NVIDIA GeForce RTX 3070", 20.3, 40.6, 20.3),
        ("NVIDIA GeForce RTX 3080", 29.8, 59.5, 29.8),
        ("NVIDIA GeForce RTX 3090", 35.6, 71.0, 35.6),
        ("NVIDIA GeForce RTX 4080", 48.7, 97.5, 48.7),
        ("NVIDIA GeForce RTX 4090", 82.6, 165.2, 82.6),
        ("NVIDIA GeForce RTX 5070", 30.9, 61.7, 30.9),
        ("NVIDIA GeForce RTX 5080", 56.3, 112.6, 56.3),
        ("NVIDIA GeForce RTX 5090", 104.8, 209.5, 104.8),
    ],
)
def test_geforce_arithmetic_gives_the_white_papers_rows(
    name: str, fp32: float, bf16: float, tf32: float
) -> None:
    for dtype, tflops in (("fp32", fp32), ("bf16", bf16), ("fp16", bf16), ("tf32", tf32)):
        peak = lookup(name, dtype)
        assert peak is not None
        assert peak.flops == pytest.approx(tflops * 1e12, rel=3e-3)  # printed to three digits


def test_no_published_figure_has_changed() -> None:
    """The digest is of the tables as they were compared with their sources, row by row."""
    rows = [tuple(chip) for chip in CHIPS]
    geforce = [row for row in rows if row[0].startswith("GeForce")]
    stated = [row for row in rows if row not in geforce]
    rounded = [tuple(f"{x:.6f}" if isinstance(x, float) else x for x in row) for row in geforce]
    text = json.dumps([stated, rounded, APPLE_GPU_MHZ, A100_BF16_PEAK_FLOPS])
    found = hashlib.sha256(text.encode()).hexdigest()
    assert found == "258d909f3389490f0e527f6bdd937adb00b2fc47cea6bb3a583efd119ec188e3"


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA RTX A4000",  # contains A40
        "NVIDIA RTX 4000 Ada Generation",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA A100X",
        "NVIDIA L400",
        "NVIDIA H20",
        "NVIDIA H800",  # with SXM5; not an H100 either
        "NVIDIA H800 80GB HBM3",
        "NVIDIA H800 PCIe MIG 1g.10gb",
        "NVIDIA A800-SXM4-40GB",
        "NVIDIA A800-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GH200 480GB MIG 1g.12gb",
        "NVIDIA GH200",
        "NVIDIA GB200 MIG 1g.23gb",
        "NVIDIA GB300",
        "NVIDIA B300",
        "NVIDIA B300 SXM6 AC MIG 1g.34gb",
        "AMD Instinct MI300X",  # without its compute units
        "AMD Instinct MI300X, 38 CUs",  # one of eight partitions
        "AMD Instinct MI300X HF, 304 CUs",
        "AMD Instinct MI325X, 304 CUs",
        "AMD Radeon Graphics, 304 CUs",
        "GRID A100-40C",
        "AMD EPYC, 2 threads",
        "Apple M1 (Virtual)",
        "Apple M5 Pro, 20 GPU cores",  # nobody has published its clock
        "Apple M9, 10 GPU cores",
        "",
    ],
)
def test_other_devices_do_not_match(name: str) -> None:
    assert all(lookup(name, dtype) is None for dtype in ("bf16", "fp16", "tf32", "fp32"))


@pytest.mark.parametrize(
    ("name", "sparse_tflops"),  # bf16 as the vendor advertises it
    [
        ("NVIDIA A100-SXM4-80GB", 624),
        ("NVIDIA H100 80GB HBM3", 1979),
        ("NVIDIA H100 PCIe", 1513),
        ("NVIDIA H100 NVL", 1671),
        ("NVIDIA H200", 1979),
        ("NVIDIA H200 NVL", 1671),
        ("NVIDIA B200", 4500),
        ("NVIDIA B300 SXM6 AC", 36_000 / 8),
        ("NVIDIA GB200", 10_000 / 2),
        ("NVIDIA GH200 480GB", 1979),
        ("NVIDIA H800 PCIe", 1513),
        ("NVIDIA A800-SXM4-80GB", 624),
        ("NVIDIA A800 40GB Active", 623.8),
        ("AMD Instinct MI300X, 304 CUs", 2614.9),
        ("NVIDIA L4", 242),
        ("NVIDIA L40", 362.1),
        ("NVIDIA L40S", 733),
        ("NVIDIA A10", 250),
        ("NVIDIA A10G", 140),
        ("NVIDIA A40", 299.4),
        ("NVIDIA RTX A6000", 309.7),
        ("NVIDIA RTX 6000 Ada Generation", 728.5),
    ],
)
def test_peaks_are_dense(name: str, sparse_tflops: float) -> None:
    peak = lookup(name, "bf16")
    assert peak is not None
    # 2%: the L40S's dense figure is not exactly half of its sparse one
    assert peak.flops == pytest.approx(sparse_tflops * 1e12 / 2, rel=0.02)


def test_rows_obey_the_tensor_cores_ratios() -> None:
    for chip in CHIPS:
        if chip.bf16 is None or chip.tf32 is None:
            continue
        assert chip.fp16 == chip.bf16, chip.label
        assert chip.bf16 == pytest.approx(2 * chip.tf32, rel=0.02), (
            chip.label
        )  # figures are rounded


@pytest.mark.parametrize("name", ["Tesla T4", "Tesla V100-SXM2-16GB"])
def test_missing_units_have_no_peak(name: str) -> None:
    assert lookup(name, "bf16") is None
    assert lookup(name, "tf32") is None
    assert lookup(name, "fp64") is None  # no column
    assert lookup(name, "label") is None


@pytest.mark.parametrize("name", ["AMD Instinct MI300X, 304 CUs", "NVIDIA A800 40GB Active"])
def test_a_number_that_no_document_states_is_no_peak(name: str) -> None:
    assert lookup(name, "bf16") is not None
    assert lookup(name, "tf32") is None


def test_nanogpts_a100_is_the_tables_a100() -> None:
    peak = lookup("NVIDIA A100-SXM4-40GB", "bf16")
    assert peak is not None
    assert peak.flops == A100_BF16_PEAK_FLOPS


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


def test_cuda_name_is_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    peak, line = resolve_peak("auto", torch.device("cuda"), "bf16")
    assert peak is not None
    assert peak.label == "H200 SXM bf16 (dense)"
    assert "989.5 TFLOP/s" in line


def test_cpu_name_tells_the_threads() -> None:
    assert device_name(CPU).endswith(f", {torch.get_num_threads()} threads")


def test_auto_says_why_there_is_no_peak() -> None:
    peak, line = resolve_peak("auto", CPU, "fp32")
    assert peak is None
    assert line == (
        f"no MFU: no published peak for '{device_name(CPU)}' in fp32 "
        "(peak_flops: measure measures one)"
    )


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
