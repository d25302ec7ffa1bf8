"""A training step on an emulated device: the host never waits, and no tensor changes its device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "emulated_device.py"
TRANSFER = "aten._to_copy.default at no line of ours"  # of a micro-batch: tokens, and targets


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("optimizer", "precision", "products"),
    [("adamw", "bf16-mixed", "bfloat16"), ("muon", "32-true", "float32")],
)
def test_a_step_moves_its_batches_and_nothing_else(found, optimizer, precision, products):
    case = found[f"{optimizer} {precision}"]
    assert case["products"] == [f"torch.{products}"]
    # a step's first batch is moved before the step starts
    assert case["steps"] == [[TRANSFER] * 4, [TRANSFER] * 4, [TRANSFER] * 2]


def test_a_read_is_seen(found):
    for step in found["read"]["steps"]:
        assert any("_local_scalar_dense" in operation for operation in step)
