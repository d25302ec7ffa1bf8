"""Runs on a CUDA or MPS device: `pytest -m gpu`. Without one, every test is skipped."""

import json
from pathlib import Path

import pytest
import torch
from test_gpu_runs import losses, train

from gpt_lightning.bench.memory_meter import MIB, measure_memory
from gpt_lightning.cli import main

pytestmark = pytest.mark.gpu


def first_losses(accelerator: str, precision: str) -> list[float]:
    options = ["--model.compile=auto", "--model.schedule=cosine", "--trainer.max_steps=5"]
    options += [f"--trainer.precision={precision}"]
    return losses(train(accelerator, *options, name=f"{accelerator}-{precision}"))


def test_float32_losses_are_those_of_a_cpu(device, text_file):
    # the same weights and batches; sums in another order, through five updates
    found = first_losses(device, "32-true")
    assert found == pytest.approx(first_losses("cpu", "32-true"), rel=1e-3)


def test_bfloat16_losses_are_near_those_of_a_cpu(device, text_file):
    # products of 8 significant bits
    found = first_losses(device, "bf16-mixed")
    assert found == pytest.approx(first_losses("cpu", "32-true"), rel=2e-2)


def test_the_allocator_sees_every_byte(cuda):
    def work(phase) -> None:
        with phase("first"):
            kept = torch.ones(MIB // 4, device=cuda)  # 1 MiB
            torch.ones(MIB, device=cuda)  # 4 MiB, freed at once
        with phase("second"):
            torch.ones(MIB // 2, device=cuda)  # 2 MiB
        del kept

    first, second = measure_memory(work, cuda)[1].values()
    assert (first.peak - first.begin, first.end - first.begin) == (5 * MIB, MIB)
    assert (second.peak - second.begin, second.end - second.begin) == (2 * MIB, 0)


def test_the_kernels_of_a_profile_add_up(cuda):
    size = ["--shapes=2x2x32", "--contexts=16", "--batches=2"]
    assert main(["bench", "profile", "--device=cuda", *size, "--modes=full-step"]) == 0
    (path,) = Path("lightning_logs/bench/profile").glob("*/results.json")
    data = json.loads(path.read_text())
    (row,) = data["rows"]
    assert 0 < row["busy"] <= 1
    phases = [part for part in data["ranges"] if part["range"].startswith("step / ")]
    assert sum(part["kernels_ms"] for part in phases) == pytest.approx(row["kernels_ms"])
    names = {part["range"] for part in phases}
    assert {"step / forward", "step / backward", "step / optimizer"} <= names
    assert row["products"] > 0
