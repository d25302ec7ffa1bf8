"""RunProbe: it looks once, before the first step, and keeps the first two micro-batches."""

import pytest
import torch
from tiny_fit import TINY_RUN

from gpt_lightning.training import fit
from gpt_lightning.training.callbacks.recorder import ProbedError, RunProbe

pytestmark = pytest.mark.usefixtures("own_folder")


def run(stop: bool, max_steps: int = 3) -> tuple[list[dict], RunProbe]:
    """Train; return the state at each look, and the probe."""
    looks = []

    def look(module):
        (optimizer,) = module.trainer.optimizers
        weight = module.model.transformer.wte.weight.detach().clone()
        looks.append({"weight": weight, "state": len(optimizer.state), "module": module})

    probe = RunProbe(look, stop)
    options = [
        f"--trainer.max_steps={max_steps}",
        "--trainer.num_sanity_val_steps=-1",
        "--trainer.enable_checkpointing=false",
    ]
    fit.run_cli(["fit", *TINY_RUN, *options], callbacks=[probe])
    return looks, probe


def test_it_looks_once_before_the_first_step(capsys):
    (look,), probe = run(stop=False)
    assert look["state"] == 0  # AdamW has made no update
    trained = look["module"].model.transformer.wte.weight
    assert look["module"].trainer.global_step == 3
    assert not torch.equal(trained, look["weight"])
    assert len(probe.batches) == 2
    for x, y in probe.batches:
        assert torch.equal(x[:, 1:], y[:, :-1])


def test_a_run_that_is_stopped_reads_the_same_batches(tmp_path, capsys):
    _, whole = run(stop=False)
    stopped = RunProbe(lambda module: None, stop=True)
    with pytest.raises(ProbedError):
        fit.run_cli(["fit", *TINY_RUN, "--trainer.enable_checkpointing=false"], [stopped])
    for mine, theirs in zip(stopped.batches, whole.batches, strict=True):
        assert torch.equal(mine[0], theirs[0])
        assert torch.equal(mine[1], theirs[1])
    assert [folder.name for folder in (tmp_path / "lightning_logs" / "run").iterdir()] == [
        "version_0"
    ]
