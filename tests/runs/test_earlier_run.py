"""A run of commit 2632cfa (earlier/) resumes, validates, samples and is loaded.

Its settings are in earlier/run/config.yaml: 4 of 8 steps on the CPU in float32, with dropout, an
accumulation of 2 and AdamW. That commit's uninterrupted run has the losses of LATER_LOSSES.
"""

import shutil
from pathlib import Path

import pytest
import torch

from gpt_lightning import GPTModule
from gpt_lightning.cli import main
from gpt_lightning.runs.checkpoint import read_checkpoint
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.history import read_rows, summarize

EARLIER = Path(__file__).with_name("earlier")
LATER_LOSSES = {5: 3.303696632385254, 6: 3.282336711883545}
LOSS = 3.3040168285369873  # loss of the validation after step 4
ROUNDING = 1e-6  # kernels of another CPU; a lost moment of AdamW or another batch changes 1e-3


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    shutil.copytree(EARLIER / "data", tmp_path / "data")
    shutil.copy(EARLIER / "text.txt", tmp_path)
    run = tmp_path / "lightning_logs" / "old" / "version_0"
    shutil.copytree(EARLIER / "run", run)
    monkeypatch.chdir(tmp_path)
    return RunPaths(run)


def test_it_resumes_with_the_losses_of_the_uninterrupted_run(run, capfd):
    assert main(["resume", "lightning_logs/old", "--trainer.max_steps", "6"]) == 0
    rows = read_rows(run.metrics)
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert list(losses) == [1, 2, 3, 4, 5, 6]
    assert {step: losses[step] for step in LATER_LOSSES} == pytest.approx(LATER_LOSSES, ROUNDING)
    assert [saved.step for saved in run.saved()] == [6, 4]
    assert read_checkpoint(run.saved()[0].path).record.micro_batches == 0
    assert summarize(run.run, run.run)["state"] == "finished"


def test_it_is_validated_and_sampled(run: RunPaths, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "lightning_logs/old"]) == 0
    assert f"validation loss {LOSS:.4f}" in capfd.readouterr().out
    for path in "lightning_logs/old", str(run.saved()[0].path):
        assert main(["sample", path, "--device", "cpu", "--max_new_tokens", "8"]) == 0
    assert summarize(run.run, run.run)["state"] == "finished"


def test_the_module_is_loaded_from_its_checkpoint(run: RunPaths) -> None:
    path = run.saved()[0].path
    module = GPTModule.load_from_checkpoint(path, map_location="cpu", weights_only=True)
    weights = read_checkpoint(path).weights
    assert weights.keys() == module.model.state_dict().keys()
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(tensor, weights[name])
