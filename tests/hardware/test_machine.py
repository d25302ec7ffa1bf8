"""Facts about the machine at the head of a report."""

import re

import torch

from gpt_lightning.hardware.device import memory_gib
from gpt_lightning.hardware.machine import machine_record, version


def test_a_record_says_what_people_ask_for():
    record = machine_record(["bench", "ladder", "--rungs", "a b"], torch.device("cpu"))
    assert record["command"] == "gpt-lightning bench ladder --rungs 'a b'"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", record["date"])
    assert torch.__version__ in record["software"]
    assert f"{memory_gib():.1f} GiB" == record["memory"]
    assert 0.5 < memory_gib() < 100_000


def test_a_checkout_has_a_commit():
    assert re.fullmatch(r"[\d.]+\S*( \(\w+(-dirty)?\))?", version())
