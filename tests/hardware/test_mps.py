"""Programs on a Mac's GPU, emulated: each branch for MPS runs on a machine without one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt_lightning.cli import main
from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.hardware import device as devices
from gpt_lightning.hardware.precision import autocast
from gpt_lightning.model.loss import autocast_dtype
from gpt_lightning.tables import sweep
from gpt_lightning.tables.worker import measured
from gpt_lightning.training import optim
from gpt_lightning.training.behaviours import process
from gpt_lightning.training.module import GPTModule
from tests.emulated_mac import emulated_mac
from tests.tiny_fit import TINY_RUN, rows

MPS = torch.device("mps")
RUN = [option for option in TINY_RUN if "accelerator" not in option]
DROPOUT_AGAIN = ["--model.config.dropout=0.1", "--model.config.checkpointing=true"]


@pytest.fixture
def mac(tmp_path, monkeypatch):
    """A machine with a Mac's GPU; the names of the functions of torch.mps that are called."""
    monkeypatch.chdir(tmp_path)
    with emulated_mac() as called:
        yield called


# ---- runs ----------------------------------------------------------------------------------------


def fit(*settings: str) -> dict:
    """Train, and return the last line of metrics that has a validation loss."""
    assert main(["fit", *RUN, "--trainer.max_steps=6", *settings]) == 0
    folder = max(Path("lightning_logs/run").iterdir())
    return [line for line in rows(folder) if "val/loss" in line][-1]


def test_fit_takes_the_gpu_of_a_mac(mac, text_file, capsys, monkeypatch):
    pinned, fused, kept = [], [], []
    loader, adamw = TrainLoader.__init__, optim.AdamW.__init__
    monkeypatch.setattr(
        TrainLoader, "__init__", lambda *a, **k: pinned.append(k["pin_memory"]) or loader(*a, **k)
    )
    monkeypatch.setattr(
        optim.AdamW, "__init__", lambda *a, **k: fused.append(k["fused"]) or adamw(*a, **k)
    )
    monkeypatch.setattr(process, "keep_freed_memory", lambda: kept.append(True))
    loss = fit("--trainer.precision=auto")["val/loss"]
    assert not kept  # the CPU's blocks
    assert (set(pinned), set(fused)) == ({False}, {True})
    banner = capsys.readouterr().out
    assert "device      Apple" in banner
    assert "precision   32-true, " in banner
    assert "compile     off (auto: off for mps, " in banner
    assert {"synchronize", "event", "manual_seed"} <= set(mac)
    assert fit("--trainer.accelerator=cpu")["val/loss"] == loss
    sample = ["sample", "lightning_logs/run/version_0", "--device=mps", "--max_new_tokens=4"]
    assert main(sample) == 0
    assert "in fp32: nothing faster is known to be safe on mps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (DROPOUT_AGAIN, "dropout is 0.1, and mps would recompute another"),
        (["--trainer.precision=64-true"], "MPS has no float64; use 32-true"),
    ],
)
def test_errors_of_a_mac_come_before_a_run_folder(settings, line, mac, text_file, capsys):
    assert main(["fit", *RUN, "--trainer.max_steps=2", *settings]) == 2
    assert line in capsys.readouterr().err
    assert not Path("lightning_logs").exists()


def test_an_exhausted_mac_is_proposed_less_memory(mac, text_file, monkeypatch, capsys):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("MPS backend out of memory (MPS allocated: 17.1 GB, max allowed: 18.1")

    monkeypatch.setattr(GPTModule, "training_step", training_step)
    settings = ["--model.config.dropout=0.1", "--data.batch_size=1", "--trainer.max_steps=2"]
    assert main(["fit", *RUN, *settings]) == 2
    line = capsys.readouterr().err
    assert "out of memory in step 1" in line
    assert "--model.config.loss_chunk 256" in line


# ---- functions -----------------------------------------------------------------------------------


def test_memory_of_a_mac_is_its_drivers(mac, monkeypatch):
    # the row is measured in this process
    monkeypatch.setattr(sweep, "isolated", lambda address, row, timeout_s: measured(address, row))
    size = ["--shapes=1x64", "--contexts=16", "--batches=1", "--dtypes=fp32"]
    assert main(["bench", "memory", *size, "--modes=training", "--checkpointing=false"]) == 0
    (results,) = Path("lightning_logs/bench/memory").glob("*/results.json")
    (row,) = json.loads(results.read_text())["rows"]
    assert (row["memory_by"], row["start_mib"], row["peak_mib"]) == ("driver", 1024.0, 3072.0)
    assert row["resident_gib"] is None


def test_seeds_events_and_memory_are_metals(mac):
    devices.seed_device(MPS, 3)
    start, end = devices.record_event(MPS), devices.record_event(MPS)
    assert devices.elapsed_s(start, end) == 2e-3
    devices.free_memory()
    devices.synchronize(MPS)
    assert mac == ["manual_seed", "event", "event", "empty_cache", "synchronize"]


def test_the_chunks_of_the_loss_take_the_dtype_of_autocast():
    weight = SimpleNamespace(device=MPS, dtype=torch.float32)
    assert autocast_dtype(weight) == torch.float32
    with autocast("bf16", MPS):
        assert autocast_dtype(weight) == torch.bfloat16


def test_the_fused_optimizer_of_a_mac_is_pytorchs():
    supported = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    assert "mps" in optim.FUSED_ADAMW_DEVICES
    assert set(supported) >= optim.FUSED_ADAMW_DEVICES
