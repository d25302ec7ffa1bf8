"""A process keeps the memory that it has freed."""

import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt_lightning.hardware import device as devices
from gpt_lightning.hardware.device import keep_freed_memory


def printed(code: str, *args: str) -> list[str]:
    """Return the words that a process prints."""
    command = [sys.executable, "-c", code, *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's")
def test_freed_memory_is_kept():
    """After its first steps, training takes no new pages, which the system would clear."""
    code = (
        "import resource, sys, torch\n"
        "from gpt_lightning.hardware.device import keep_freed_memory\n"
        "kept = sys.argv[1] == 'keep' and keep_freed_memory()\n"
        "layer, x = torch.nn.Linear(8, 4096), torch.rand(4096, 8)\n"
        "for step in range(8):\n"
        "    if step == 4: before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.nn.functional.gelu(layer(x)).sum().backward()\n"  # blocks of 64 MiB
        "print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)"
    )
    faults = {}
    for how in ("keep", "leave"):
        kept, count = printed(code, how)
        faults[how] = int(count)
        if how == "keep" and kept == "False":
            pytest.skip("another C library")
    assert faults["leave"] > 4 * 16_384  # pages of 4 KiB in a block
    assert faults["keep"] < faults["leave"] / 4  # a few blocks more, now and then
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
    monkeypatch.setattr(devices, "_libc", lambda name: None)  # another C library
    assert keep_freed_memory() is False
    devices.hand_back_freed_memory()


def test_all_freed_memory_is_handed_back(monkeypatch):
    kept = []
    monkeypatch.setattr(devices, "_libc", lambda name: kept.append if name == "malloc_trim" else 0)
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


def test_the_peak_on_a_mac_is_what_metal_has_allocated(monkeypatch):
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 5 * 2**29)
    assert devices.peak_memory_gib(torch.device("mps")) == 2.5


@pytest.mark.parametrize(("platform", "unit"), [("darwin", 1), ("freebsd", 1024)])
def test_the_peak_elsewhere_is_the_systems(platform, unit, monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "STATUS", tmp_path / "status")
    monkeypatch.setattr(devices.sys, "platform", platform)
    usage = SimpleNamespace(ru_maxrss=2**30 // unit)
    monkeypatch.setattr(resource, "getrusage", lambda who: usage)
    assert devices.peak_memory_gib(torch.device("cpu")) == 1.0
