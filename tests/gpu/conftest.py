"""The device of the GPU tests."""

import os

import pytest
import torch

from gpt_lightning.hardware.device import device_kind

# before torch 2.13, cuBLAS raises without it where PyTorch is to be deterministic; it is read once
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.fixture
def device(tmp_path, monkeypatch) -> str:
    """cuda or mps, in a folder of the test's own; GPU_TESTS_ON=cpu tries the tests out."""
    kind = os.environ.get("GPU_TESTS_ON", device_kind())
    if kind == "cpu" and "GPU_TESTS_ON" not in os.environ:
        pytest.skip("this machine has no CUDA or MPS device")
    monkeypatch.chdir(tmp_path)
    return kind


@pytest.fixture
def cuda(device) -> torch.device:
    if device != "cuda":
        pytest.skip("this machine has no CUDA device")
    return torch.device(device)
