"""Facts about the machine at the head of a report."""

import os
import re
from types import SimpleNamespace

import torch

from gpt_lightning import __version__
from gpt_lightning.hardware import machine
from gpt_lightning.hardware.device import memory_gib
from gpt_lightning.hardware.machine import machine_record, version


def test_a_record_says_what_people_ask_for():
    record = machine_record(["bench", "ladder", "--rungs", "a b"], torch.device("cpu"))
    assert record["command"] == "gpt-lightning bench ladder --rungs 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", record["date"])
    assert torch.__version__ in record["software"]
    assert f"{memory_gib():.1f} GiB" == record["memory"]
    assert 0.5 < memory_gib() < 100_000


def test_the_commit_is_that_of_the_repository_with_the_package(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    file = tmp_path / "gpt_lightning" / "hardware" / "machine.py"
    monkeypatch.setattr(machine, "__file__", str(file))
    asked = []
    monkeypatch.setattr(machine, "output_of", lambda *words: asked.append(words) or "abc1234")
    assert version() == f"{__version__} (abc1234)"
    assert asked[0][:3] == ("git", "-C", str(tmp_path / "gpt_lightning"))
    monkeypatch.setattr(machine, "output_of", lambda *words: "")  # no git
    assert version() == __version__
    (tmp_path / ".git").rmdir()
    monkeypatch.setattr(machine, "output_of", lambda *words: "of a repository around it")
    assert version() == __version__


def test_a_gpu_is_named_with_its_memory_and_driver(monkeypatch):
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(machine, "device_name", lambda device: f"chip {device.type}")
    monkeypatch.setattr(machine, "output_of", lambda *words: "550.54\n550.54")
    record = machine_record([], torch.device("cuda"))
    assert record["device"] == f"chip cuda, 80 GiB, CUDA {torch.version.cuda}, driver 550.54"
    assert record["CPU"] == f"chip cpu of {os.cpu_count()}"
    monkeypatch.setattr(machine, "output_of", lambda *words: "")
    assert machine_record([], torch.device("cuda"))["device"].endswith("driver unknown")
