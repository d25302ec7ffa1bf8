"""Programs on a Mac's GPU, emulated: each branch for MPS runs on a machine without one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpt_lightning.bench import ladder, memory_meter, sizes, step
from gpt_lightning.cli import main
from gpt_lightning.data.loader import TrainLoader
from gpt_lightning.errors import UserError
from gpt_lightning.hardware import device as devices
from gpt_lightning.hardware.precision import autocast, check_accelerator
from gpt_lightning.model.loss import autocast_dtype
from gpt_lightning.tables import options, sweep
from gpt_lightning.tables.worker import SkippedError, measured
from gpt_lightning.training import module, optim
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
    monkeypatch.setattr(module, "keep_freed_memory", lambda: kept.append(True))
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


# ---- benchmarks ----------------------------------------------------------------------------------

SMALL = "--shapes 1x64 --contexts 16 --batches 1"
BENCHES = {
    "sizes": f"{SMALL} --steps 1 --dtypes fp32,bf16,fp16,tf32",
    "memory": f"{SMALL} --dtypes fp32 --modes training --checkpointing false",
    "attention": "--contexts 16 --d 8 --batch 1 --steps 1 --warmup 1 --kernels naive",
    "data": "--orders shuffled --block_sizes 16 --batch_sizes 2 --workers 0 --n_tokens 999",
    "profile": f"{SMALL} --modes training",
}


@pytest.fixture
def in_process(monkeypatch):
    """Rows are measured in this process, without the second that a peak takes."""
    monkeypatch.setattr(sweep, "isolated", lambda address, row, timeout_s: measured(address, row))
    monkeypatch.setattr(sizes, "rates", lambda *args: {})


def bench(name: str, *words: str) -> list[dict]:
    assert main(["bench", name, *words]) == 0
    (results,) = Path("lightning_logs/bench", name).glob("*/results.json")
    return json.loads(results.read_text())["rows"]


def rows_of(name: str) -> list[dict]:
    return bench(name, *BENCHES[name].split())


def test_sizes_are_measured_on_a_mac(mac, in_process, monkeypatch):
    monkeypatch.setattr(step, "keep_freed_memory", lambda: pytest.fail("a CPU's"))
    rows = rows_of("sizes")
    assert [row["device"] for row in rows] == ["mps"] * 4
    assert [row["status"] for row in rows] == ["ok", "ok", "ok", "skipped"]
    assert rows[-1]["note"] == "tf32 is a mode of NVIDIA GPUs, not of mps"
    assert {row["peak_memory_gib"] for row in rows[:3]} == {3.0}
    assert all(row["over_fp32"] > 0 for row in rows[:3])


def test_memory_of_a_mac_is_its_drivers(mac, in_process):
    (row,) = rows_of("memory")
    assert (row["memory_by"], row["start_mib"], row["peak_mib"]) == ("driver", 1024.0, 3072.0)
    assert row["resident_gib"] is None


def test_the_largest_batch_of_a_mac_has_no_limit(mac, in_process, monkeypatch):
    monkeypatch.setattr(memory_meter.resource, "setrlimit", lambda *args: pytest.fail("a CPU's"))
    Path("run.yaml").write_text(
        "model: {config: {n_layer: 1, n_head: 1, n_embd: 8, block_size: 16, vocab_size: 9}}\n"
        "data: {dataset: nowhere, batch_size: 1}\n"
        "trainer: {max_steps: 9, accelerator: auto}\n"
    )
    (row,) = bench("fit-batch", "--config", "run.yaml", "--max_batch", "1", "--steps", "1")
    assert (row["device"], row["precision"], row["limit_gib"]) == ("mps", "32-true", None)
    assert row["peak_memory_gib"] == 3.0


def test_the_ladder_has_a_batch_for_a_mac_and_skips_tf32(mac, monkeypatch):
    device, arguments = ladder.arguments_of("bf16", None, 1, [])
    assert device == "mps"
    assert {"--data.batch_size=4", "--data.block_size=1024"} <= set(arguments)
    assert "--model.matmul_precision=high" not in arguments
    monkeypatch.setattr(ladder.fits, "timed_fit", lambda *args: pytest.fail("no such rung"))
    with pytest.raises(SkippedError, match="no effect on mps"):
        ladder.measure_rung(SimpleNamespace(device="mps", rung="tf32"))


# ---- functions -----------------------------------------------------------------------------------


def test_the_best_device_is_the_gpu_of_a_mac(mac):
    assert options.DEVICE.read(SimpleNamespace(device="auto")) == [{"device": "mps"}]
    both = SimpleNamespace(device="mps,auto,cpu")
    assert options.DEVICE.read(both) == [{"device": "mps"}, {"device": "cpu"}]
    both = sweep.machine_of([{"device": "cpu"}, {"device": "mps"}], [])
    assert both["device"].endswith("; Apple")
    for accelerator in ("auto", "mps", "gpu", "cpu"):
        check_accelerator(accelerator, "--device")
    with pytest.raises(UserError, match=r"--device cuda: .* \(it has: cpu, mps, gpu\)"):
        check_accelerator("cuda", "--device")


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
