"""Devices: their memory, what each kind spells differently, their names, and a machine's record."""

import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt_lightning import __version__
from gpt_lightning.hardware import device as devices
from gpt_lightning.hardware.device import keep_freed_memory
from gpt_lightning.hardware.peaks import resolve_peak


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept():
    """After its first steps, training takes no new pages, which the system would clear."""
    code = (
        "import resource, torch\n"
        "from gpt_lightning.hardware.device import keep_freed_memory\n"
        "def faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "held = torch.ones(4096, 4096)\n"  # 64 MiB
        "for kept in (False, keep_freed_memory):\n"
        "    print(kept and kept())\n"
        "    for step in range(8):\n"
        "        before = before if step > 4 else faults()\n"
        "        (held + 1).mul_(2)\n"
        "    print(faults() - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    _, left, accepted, kept = done.stdout.split()
    if accepted == "False":
        pytest.skip("another C library")
    assert int(left) > 4 * 16_000  # pages of 4 KiB in a block
    assert int(kept) < int(left) / 4  # a few blocks more, now and then
    assert keep_freed_memory()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize(("share", "returned"), [(1.05, 0), (0.95, 1)])
def test_a_process_with_nearly_all_memory_returns_what_it_has_freed(share, returned, monkeypatch):
    calls = []
    monkeypatch.setattr(devices, "hand_back_freed_memory", lambda: calls.append(True))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**30
    monkeypatch.setattr(devices, "memory_gib", lambda: share * resident / devices.KEPT_SHARE)
    devices.limit_kept_memory()
    assert len(calls) == returned


# ---- what each kind of device spells differently -------------------------------------------------


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps"])
def test_waiting_is_the_devices_own(kind, monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append(device.type))
    monkeypatch.setattr(torch.mps, "synchronize", lambda: waited.append("mps"))
    devices.synchronize(torch.device(kind))
    assert waited == ([] if kind == "cpu" else [kind])


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_seed_is_for_the_cpu_and_the_device(kind, monkeypatch):
    seeded = []
    backend = SimpleNamespace(manual_seed=seeded.append)
    monkeypatch.setattr(torch, "get_device_module", lambda device: backend)
    torch.manual_seed(7)
    expected = torch.rand(3)
    devices.seed_device(torch.device(kind), 7)
    assert torch.equal(torch.rand(3), expected)
    assert seeded == ([] if kind == "cpu" else [7])


def test_timestamps_are_seconds_on_a_cpu_and_events_elsewhere(monkeypatch):
    monkeypatch.setattr(devices, "time", SimpleNamespace(perf_counter=lambda: 12.5))
    assert devices.record_event(torch.device("cpu")) == 12.5
    assert devices.elapsed_s(12.5, 14.0) == 1.5
    recorded = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(self)

        def elapsed_time(self, end: "Event") -> float:
            assert (recorded[0], recorded[1]) == (self, end)
            return 1500.0

    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event))
    marks = [devices.record_event(torch.device("cuda")) for _ in range(2)]
    assert recorded == marks
    assert devices.elapsed_s(*marks) == 1.5  # events count milliseconds


@pytest.mark.parametrize(
    ("cuda", "mps", "best"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_the_best_device_is_taken_unless_one_is_named(cuda, mps, best, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert [devices.device_kind(name) for name in ("auto", "gpu")] == [best, best]
    assert [devices.device_kind(name) for name in ("cpu", "mps", "cuda")] == ["cpu", "mps", "cuda"]
    assert devices.device_kind() == best


def test_memory_is_freed_everywhere(monkeypatch):
    calls = []
    monkeypatch.setattr(devices.gc, "collect", lambda: calls.append("collected"))
    monkeypatch.setattr(devices, "hand_back_freed_memory", lambda: calls.append("handed back"))
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("forgotten"))
    for backend, module in ((torch.cuda, torch.cuda), (torch.backends.mps, torch.mps)):
        monkeypatch.setattr(backend, "is_available", lambda here=module: here in available)
        monkeypatch.setattr(module, "empty_cache", lambda here=module: calls.append(here))
    always = ["collected", "handed back", "forgotten"]
    for available in ([], [torch.cuda], [torch.mps]):
        calls.clear()
        devices.free_memory()
        assert calls == always + available


@pytest.mark.parametrize("accepted", [(1, 1), (1, 0), (0, 1)])
def test_memory_is_kept_if_glibc_accepts_both_settings(accepted, monkeypatch):
    asked = {}

    def mallopt(setting: int, value: int) -> int:
        asked[setting] = value
        return accepted[setting == -1]

    monkeypatch.setattr(devices, "_libc", lambda name: mallopt if name == "mallopt" else None)
    assert keep_freed_memory() is (accepted == (1, 1))
    assert asked.items() <= {-4: 0, -1: -1}.items()  # map no block; never shrink
    kept = []
    monkeypatch.setattr(
        devices, "_libc", lambda name: kept.append if name == "malloc_trim" else None
    )
    assert keep_freed_memory() is False  # another C library
    devices.hand_back_freed_memory()
    assert kept == [0]  # bytes to keep


def test_the_memory_of_the_machine_is_the_kernels():
    if not os.path.exists("/proc/meminfo"):
        pytest.skip("Linux's")
    with open("/proc/meminfo") as file:
        kib = int(file.readline().split()[1])  # MemTotal
    assert devices.memory_gib() == pytest.approx(kib / 2**20, rel=1e-3)


def test_the_peak_of_memory_grows_with_what_is_held():
    before = devices.peak_memory_gib(torch.device("cpu"))
    assert 0.05 < before < 64  # torch itself
    held = torch.ones(2**26)  # 256 MiB
    assert devices.peak_memory_gib(torch.device("cpu")) >= before
    resident = devices.peak_memory_gib(torch.device("cpu"))
    del held
    # a peak stays; Linux counts pages per core, and is exact only while they are in use
    assert devices.peak_memory_gib(torch.device("cpu")) == pytest.approx(resident, abs=1e-2)


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd", 1024)])
def test_the_peak_elsewhere_is_the_systems(platform, unit, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "STATUS", tmp_path / "status")
    monkeypatch.setattr(devices.sys, "platform", platform)
    usage = SimpleNamespace(ru_maxrss=2**30 // unit)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert devices.peak_memory_gib(torch.device("cpu")) == 1.0


# ---- names and the machine's record --------------------------------------------------------------


@pytest.mark.parametrize(
    ("displays", "name"),
    [
        ('{"SPDisplaysDataType": [{"sppci_cores": "38"}]}', "Apple M2 Max, 38 GPU cores"),
        ('{"SPDisplaysDataType": [{}]}', "Apple M2 Max"),  # as in a virtual machine
        ("system_profiler: unable to read the displays", "Apple M2 Max"),
        (None, "Apple"),  # the tools hang
    ],
)
def test_a_macs_gpu_is_named_by_the_systems_tools(displays, name, monkeypatch):
    def run(command, **_):
        if displays is None:
            raise subprocess.TimeoutExpired(command, 10)
        text = "Apple M2 Max\n" if command[0] == "sysctl" else displays
        return subprocess.CompletedProcess(command, 0, stdout=text)

    monkeypatch.setattr(subprocess, "run", run)
    devices._apple_gpu_name.cache_clear()
    assert devices.device_name(torch.device("mps")) == name
    devices._apple_gpu_name.cache_clear()


def test_the_name_of_an_amd_chip_has_its_compute_units(monkeypatch):
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


def test_a_record_says_what_people_ask_for():
    record = devices.machine_record(["bench", "matmul", "--sizes", "a b"], torch.device("cpu"))
    assert record["command"] == "gpt-lightning bench matmul --sizes 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", record["date"])
    assert torch.__version__ in record["software"]
    assert f"{devices.memory_gib():.1f} GiB" == record["memory"]


def test_the_commit_is_that_of_the_repository_with_the_package(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    file = tmp_path / "gpt_lightning" / "hardware" / "device.py"
    monkeypatch.setattr(devices, "__file__", str(file))
    asked = []
    monkeypatch.setattr(devices, "output_of", lambda *words: asked.append(words) or "abc1234")
    assert devices.version() == f"{__version__} (abc1234)"
    assert asked[0][:3] == ("git", "-C", str(tmp_path / "gpt_lightning"))
    monkeypatch.setattr(devices, "output_of", lambda *words: "")  # no git
    assert devices.version() == __version__
    (tmp_path / ".git").rmdir()
    monkeypatch.setattr(devices, "output_of", lambda *words: "of a repository around it")
    assert devices.version() == __version__


def test_a_gpu_is_named_with_its_memory_and_driver(monkeypatch):
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(devices, "device_name", lambda device: f"chip {device.type}")
    monkeypatch.setattr(devices, "output_of", lambda *words: "550.54\n550.54")
    record = devices.machine_record([], torch.device("cuda"))
    assert record["device"] == f"chip cuda, 80 GiB, CUDA {torch.version.cuda}, driver 550.54"
    assert record["CPU"] == f"chip cpu of {os.cpu_count()}"
    monkeypatch.setattr(devices, "output_of", lambda *words: "")
    assert devices.machine_record([], torch.device("cuda"))["device"].endswith("driver unknown")


def test_versions_that_were_not_tried_are_named(monkeypatch):
    assert devices.untried_versions() == []
    monkeypatch.setattr(devices.metadata, "version", {"torch": "2.9.1", "lightning": "2.7.0"}.get)
    monkeypatch.setattr(devices.platform, "python_version_tuple", lambda: ("3", "99", "1"))
    names = [line.partition(" (tried: ")[0] for line in devices.untried_versions()]
    assert sorted(names) == ["Python 3.99", "lightning 2.7.0", "torch 2.9.1"]
