"""Ranks over gloo that share weights (fsdp2) train as ranks that copy them (ddp), and as one."""

from pathlib import Path

import pytest
import torch
from ranks import run_commands, run_ranks
from tiny_fit import rows

from gpt_lightning.cli import main

CONFIG = """
trainer:
  accelerator: cpu
  precision: 32-true
  max_steps: 10
  val_check_interval: 10
  check_val_every_n_epoch: null
  log_every_n_steps: 1
  gradient_clip_val: 1.0
model:
  config: {n_layer: 2, n_head: 2, n_embd: 18, block_size: 16, vocab_size: null}
  learning_rate: 1.0e-3
  decay_steps: 10
data: {text_file: text.txt, tokenizer: char}
samples: {max_new_tokens: 4}
speed: {warmup_steps: 0}
"""
# 18 and 54 rows among 4 ranks: shards of two sizes
MUON = ("--model.optimizer=muon",)
CHECK = "--trainer.num_sanity_val_steps=1"  # leaves weights gathered
AGAIN = ("--model.config.checkpointing=true", "--trainer.accumulate_grad_batches=2")


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


@pytest.fixture
def folder(text_file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG)


@pytest.mark.slow
def test_two_ranks_train_in_shards_as_copies_and_as_one(folder):
    for name, options in (("adamw", ()), ("muon", MUON), ("again", AGAIN)):
        assert main(fit(name, 1, *options)) == 0
    fit_ranks(
        2,
        fit("ddp", 2, "--trainer.strategy=ddp"),
        *(
            fit(f"fsdp2_{name}", 2, "--trainer.strategy=fsdp2", CHECK, *options)
            for name, options in (("adamw", ()), ("muon", MUON), ("again", AGAIN))
        ),
    )
    # the order of sums of float32
    assert_equal_runs("adamw", "ddp", 1e-6)
    assert_equal_runs("adamw", "fsdp2_adamw", 1e-6)
    # Muon iterates in bfloat16, which amplifies that order
    assert_equal_runs("muon", "fsdp2_muon", 2e-3)
    assert_equal_runs("again", "fsdp2_again", 1e-6)
    ours, theirs = checkpoint("fsdp2_adamw"), checkpoint("ddp")
    assert ours.keys() == theirs.keys()
    assert shapes(ours["state_dict"]) == shapes(theirs["state_dict"])
    state, expected = (c["optimizer_states"][0]["state"] for c in (ours, theirs))
    assert {i: shapes(s) for i, s in state.items()} == {i: shapes(s) for i, s in expected.items()}
    tied = [ours["state_dict"][f"model.{name}.weight"] for name in ("transformer.wte", "lm_head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()  # written once


@pytest.mark.slow
def test_four_ranks_train_in_shards_as_one(folder):
    assert main(fit("muon", 1, *MUON)) == 0
    fit_ranks(4, fit("fsdp2_muon", 4, "--trainer.strategy=fsdp2", *MUON))
    assert_equal_runs("muon", "fsdp2_muon", 1e-3)


def shapes(tensors):
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.long  # eight runs; the test of two ranks above is a slow one
def test_a_run_continues_under_other_strategies_and_ranks(folder):
    """1 -> 2 in shards -> 2 copies -> 1, and 2 -> 2 in shards bit for bit."""
    sharded, ddp = "--trainer.strategy=fsdp2", "--trainer.strategy=ddp"
    resume, save = "--resume=auto", "--checkpoint.every_n_steps=1"
    assert main(fit("whole", 1, save)) == 0
    assert main(fit("changing", 1, save, "--trainer.max_steps=2")) == 0
    printed = fit_ranks(
        2,
        fit("changing", 2, save, sharded, resume, "--trainer.max_steps=5"),
        fit("changing", 2, save, ddp, resume, "--trainer.max_steps=8"),
        fit("shards", 2, save, sharded),
        fit("resumed", 2, save, sharded, "--trainer.max_steps=4"),
        fit("resumed", 2, save, sharded, resume, "--checkpoint.asynchronous=true"),
        ["validate", *fit("resumed", 2, sharded)[1:], "--ckpt_path=lightning_logs/resumed"],
    )
    for change in ("ranks 1 -> 2", "sharded False -> True", "sharded True -> False"):
        assert f"changed     {change}: equal to rounding errors" in printed
    assert main(fit("changing", 1, save, resume)) == 0
    assert_equal_runs("whole", "changing", 1e-6)
    assert_equal_runs("shards", "resumed", 0.0)
    one, other = checkpoint("shards"), checkpoint("resumed")
    for name, weight in one["state_dict"].items():
        assert torch.equal(weight, other["state_dict"][name]), name
    for i, state in one["optimizer_states"][0]["state"].items():
        for key, value in state.items():
            assert torch.equal(value, other["optimizer_states"][0]["state"][i][key])
    assert printed.count("validation loss ") == 3  # and of validate


def assert_equal_checkpoints(a, b):
    for x, y in ((a["state_dict"], b["state_dict"]), *states(a, b)):
        assert x.keys() == y.keys()
        for key, value in x.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(y[key])), key


def states(one, other):
    a, b = (c["optimizer_states"][0]["state"] for c in (one, other))
    assert a.keys() == b.keys()
    return [(a[i], b[i]) for i in a]


@pytest.mark.long  # a dozen processes; tests/runs/test_sharded_saves.py has the files
@pytest.mark.timeout(300)
def test_checkpoints_in_shards(folder, capsys):
    """Each rank writes its own; every strategy, number of ranks and command reads them."""
    shards = ("--trainer.strategy=fsdp2", "--checkpoint.sharded=true")
    save, resume, half = "--checkpoint.every_n_steps=1", "--resume=auto", "--trainer.max_steps=4"
    fit_ranks(
        2,
        fit("full", 2, save, shards[0]),
        fit("resumed", 2, save, *shards, half),
        fit("resumed", 2, save, *shards, resume),  # reads and writes shards
        fit("ddp", 2, save, *shards, half),
        fit("ddp", 2, save, "--trainer.strategy=ddp", resume),
        fit("one", 2, save, *shards, half),
        fit("four", 2, save, *shards, half),
        fit("muon", 2, *shards, *MUON),
    )
    folder = Path("lightning_logs/resumed/version_0/checkpoints")
    (last,) = folder.glob("step-0000010*.ckpt")
    assert len(list(folder.glob("shards/*"))) == len(list(folder.glob("*.ckpt"))) == 2
    (shards_of_last,) = folder.glob("shards/step-0000010*")
    files = sorted(shards_of_last.iterdir())
    assert [file.name[:11] for file in files] == ["shard-00001", "shard-00002"]
    assert last.stat().st_size < 60_000 < sum(file.stat().st_size for file in files)
    fit_ranks(4, fit("four", 4, save, *shards, resume))
    assert main(fit("one", 1, save, resume)) == 0
    assert_equal_runs("full", "resumed", 0.0)
    for name in ("ddp", "one", "four"):
        assert_equal_runs("full", name, 1e-6)
    # converted, both ways
    for source, out, *options in (
        (str(last), "whole.ckpt"),
        ("whole.ckpt", "again.ckpt", "--sharded=true"),
        ("again.ckpt", "back.ckpt"),
    ):
        assert main(["checkpoint", "convert", source, "--out", out, *options]) == 0
        assert main(["checkpoint", "verify", out]) == 0
    assert len(list(Path("shards").iterdir())) == 1
    whole, back = (torch.load(name, weights_only=True) for name in ("whole.ckpt", "back.ckpt"))
    assert_equal_checkpoints(checkpoint("full"), whole)
    assert_equal_checkpoints(checkpoint("full"), back)
    # other commands
    assert main(["checkpoint", "inspect", str(last)]) == 0
    texts = set()
    for source in ("lightning_logs/full", str(last), "whole.ckpt", "again.ckpt"):
        capsys.readouterr()
        assert main(["sample", source, "--max_new_tokens=8", "--seed=1"]) == 0
        texts.add(capsys.readouterr().out.partition("\n")[2])
    assert len(texts) == 1
    # a file that has another name, a damaged shard, a lost one, and a save that was killed
    Path(f"{last}.sha256").rename(folder / "kept.ckpt.sha256")
    kept = last.rename(folder / "kept.ckpt")
    killed = folder / "shards/step-0000011-0123abcd"
    killed.mkdir()
    own = folder / "shards/mine-0123abcd/shard-1.txt"
    own.parent.mkdir()
    own.touch()
    assert main(fit("resumed", 1, save, resume)) == 0
    assert not killed.exists()
    assert own.exists()
    assert main(["sample", str(kept), "--max_new_tokens=8", "--seed=1"]) == 0
    content = bytearray(files[1].read_bytes())
    content[-1] ^= 1
    files[1].write_bytes(content)
    capsys.readouterr()
    assert main(["checkpoint", "verify", str(kept)]) == 2
    assert f"{files[1].resolve()} is damaged" in capsys.readouterr().err
    assert main(["validate", "lightning_logs/resumed", "--ckpt_path", str(kept)]) == 2
    Path(f"{kept}.sha256").unlink()
    files[1].unlink()
    for command in (["sample"], ["checkpoint", "convert", "--out", "x.ckpt"]):
        assert main([*command, str(kept)]) == 2
        assert f"{files[1].resolve()} is missing" in capsys.readouterr().err
    assert not Path("x.ckpt").exists()


@pytest.mark.slow
def test_mixed_precision_in_shards(folder):
    """Blocks compute with bfloat16 weights; samples and checkpoints are those of whole models."""
    mixed = ("--trainer.precision=bf16-mixed", "--model.compile=false")
    assert main(fit("one", 1, *mixed)) == 0
    printed = fit_ranks(2, fit("two", 2, *mixed, "--trainer.strategy=fsdp2"))
    assert "step 10/10 | validation loss" in printed
    assert_equal_runs("one", "two", 4e-3)  # one rounding to bfloat16
    assert {w.dtype for w in checkpoint("two")["state_dict"].values()} == {torch.float32}
