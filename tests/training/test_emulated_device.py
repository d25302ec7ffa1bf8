"""A training step on an emulated device: the host never waits, and no tensor changes its device."""

import json
import runpy
from pathlib import Path

import pytest
from ranks import run_ranks

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[1] / "emulated_device.py"
TRANSFER = "aten._to_copy.default at no line of ours"  # moves of a micro-batch: tokens, and targets


@pytest.fixture(scope="module")
def found():
    out, _ = run_ranks(1, runpy.run_path, str(PROGRAM), None, "__main__")
    return json.loads(out.splitlines()[-1])


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
