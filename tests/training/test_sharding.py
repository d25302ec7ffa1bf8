"""Ranks over gloo that share weights (fsdp2) train as ranks that copy them (ddp), and as one."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks import run_commands, run_ranks
from tiny_fit import rows

from gpt_lightning.cli import main
from gpt_lightning.training import sharding

CONFIG = """
trainer:
  accelerator: cpu
  precision: 32-true
  max_steps: 10
  val_check_interval: 10
  check_val_every_n_epoch: null
  log_every_n_steps: 1
model:
  config: {n_layer: 2, n_head: 2, n_embd: 18, block_size: 16, vocab_size: null}
  learning_rate: 1.0e-3
  decay_steps: 10
data: {text_file: text.txt, tokenizer: char}
samples: {max_new_tokens: 4}
speed: {warmup_steps: 0}
"""
# 18 and 54 rows among 4 ranks: shards of two sizes
SHARDED, COPIES = "--trainer.strategy=fsdp2", "--trainer.strategy=ddp"
# at a width of 18 one number in 324 was another in its last bit
WIDE = ("--model.config.n_embd=32",)
CLIP = "--trainer.gradient_clip_val=1.0"
MUON = ("--model.optimizer=muon", CLIP)
CHECK = "--trainer.num_sanity_val_steps=1"  # leaves weights gathered
AGAIN = ("--model.config.checkpointing=true", "--trainer.accumulate_grad_batches=2", CLIP)


def fit(name, ranks, *options):
    """Return the command of a run whose steps have 8 sequences."""
    k = 2 if AGAIN[1] in options else 1
    shape = [f"--trainer.devices={ranks}", f"--data.batch_size={8 // ranks // k}"]
    steps = [f"--trainer.val_check_interval={10 * k}"]
    return ["fit", "--config", "run.yaml", f"--run_name={name}", *shape, *steps, *options]


def fit_ranks(ranks, *commands):
    out, err = run_ranks(ranks, run_commands, *commands)
    assert "warning" not in err.lower(), err
    assert "falling back" not in err, err  # torch's logger has no word for it
    return out


def checkpoint(name, step=10):
    (path,) = Path("lightning_logs", name).glob(f"*/checkpoints/step-{step:07}*.ckpt")
    return torch.load(path, weights_only=True)


def assert_equal_runs(one, other, rel):
    a, b = rows(one), rows(other)
    assert [row["step"] for row in a] == [row["step"] for row in b]
    assert sum("train/loss" in row for row in a) == 10
    for x, y in zip(a, b, strict=True):
        for key in {"train/loss", "val/loss", "optim/grad_norm"} & x.keys():
            assert y[key] == pytest.approx(x[key], rel=rel), (key, x["step"])


def assert_equal_states(one, other, atol):
    """Compare keys, types and shapes, and the numbers, of weights and of the optimizer."""
    ours, theirs = checkpoint(one), checkpoint(other)
    assert ours.keys() == theirs.keys()
    states = [c["optimizer_states"][0]["state"] for c in (ours, theirs)]
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=atol)
    weights = [dict(c["state_dict"]) for c in (ours, theirs)]
    assert list(weights[0]) == list(weights[1])
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=atol)
    tied = [ours["state_dict"][f"model.{name}.weight"] for name in ("transformer.wte", "lm_head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()  # written once


@pytest.fixture
def folder(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)


@pytest.mark.slow
def test_two_ranks_train_in_shards_as_copies_and_as_one(folder):
    runs = {"adamw": (CLIP,), "muon": MUON, "again": AGAIN}
    for name, options in runs.items():
        assert main(fit(name, 1, *options)) == 0
    fit_ranks(
        2,
        fit("plain", 2, COPIES, *WIDE),
        fit("fsdp2_plain", 2, SHARDED, *WIDE),
        fit("ddp", 2, COPIES, CLIP),
        *(fit(f"fsdp2_{name}", 2, SHARDED, CHECK, *options) for name, options in runs.items()),
    )
    assert_equal_states("plain", "fsdp2_plain", 0.0)
    assert_equal_states("ddp", "fsdp2_adamw", 2e-6)
    # the order of sums of float32
    assert_equal_runs("adamw", "ddp", 1e-6)
    assert_equal_runs("adamw", "fsdp2_adamw", 1e-6)
    # Muon iterates in bfloat16, which amplifies that order
    assert_equal_runs("muon", "fsdp2_muon", 2e-3)
    assert_equal_runs("again", "fsdp2_again", 1e-6)


@pytest.mark.slow
def test_four_ranks_train_in_shards_as_one(folder):
    assert main(fit("muon", 1, *MUON)) == 0
    fit_ranks(4, fit("fsdp2_muon", 4, SHARDED, *MUON))
    assert_equal_runs("muon", "fsdp2_muon", 1e-3)


@pytest.mark.long  # eight runs; the test of two ranks above is a slow one
def test_a_run_continues_under_other_strategies_and_ranks(folder):
    """1 -> 2 in shards -> 2 copies -> 1, and 2 -> 2 in shards bit for bit."""
    resume, save = "--resume=auto", ("--checkpoint.every_n_steps=1", CLIP)
    assert main(fit("whole", 1, *save)) == 0
    assert main(fit("changing", 1, *save, "--trainer.max_steps=2")) == 0
    printed = fit_ranks(
        2,
        fit("changing", 2, *save, SHARDED, resume, "--trainer.max_steps=5"),
        fit("changing", 2, *save, COPIES, resume, "--trainer.max_steps=8"),
        fit("shards", 2, *save, SHARDED),
        fit("resumed", 2, *save, SHARDED, "--trainer.max_steps=4"),
        fit("resumed", 2, *save, SHARDED, resume),
        ["validate", *fit("resumed", 2, SHARDED)[1:], "--ckpt_path=lightning_logs/resumed"],
    )
    for change in ("ranks 1 -> 2", "sharded False -> True", "sharded True -> False"):
        assert f"changed     {change}: equal to rounding errors" in printed
    assert main(fit("changing", 1, *save, resume)) == 0
    assert_equal_runs("whole", "changing", 1e-6)
    assert_equal_runs("shards", "resumed", 0.0)
    assert_equal_states("shards", "resumed", 0.0)
    assert printed.count("validation loss ") == 3  # and of validate


@pytest.mark.slow
def test_mixed_precision_in_shards(folder):
    """Samples and checkpoints are those of whole models, in float32."""
    mixed = ("--trainer.precision=bf16-mixed", "--model.compile=false", *WIDE)
    fit_ranks(2, fit("copies", 2, COPIES, *mixed), fit("shards", 2, SHARDED, *mixed))
    assert_equal_states("copies", "shards", 0.0)
    assert {w.dtype for w in checkpoint("shards")["state_dict"].values()} == {torch.float32}


def test_each_rank_has_its_share_of_the_cores(monkeypatch):
    """Another number of threads sums in another order, so that weights would not equal ddp's."""
    found = []
    monkeypatch.setattr(ModelParallelStrategy, "setup_environment", lambda strategy: None)
    monkeypatch.setattr(sharding, "cores", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    strategy = sharding.ShardedStrategy()
    strategy.parallel_devices = 2 * [torch.device("cpu")]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    strategy.setup_environment()
    monkeypatch.delenv("OMP_NUM_THREADS")
    strategy.setup_environment()
    assert found == [4]
