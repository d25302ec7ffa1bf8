"""Folder in which the wrong inputs of wrong_inputs.tsv are typed: files, datasets, a run."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from gpt_lightning.cli import main

TINY = """\
trainer: {accelerator: cpu, devices: 1, max_steps: 20, limit_val_batches: 4,
  val_check_interval: 20, check_val_every_n_epoch: null}
model:
  config: {n_layer: 1, n_head: 2, n_embd: 32, block_size: 32, vocab_size: null}
  learning_rate: 1.0e-2
data: {text_file: text.txt, tokenizer: char, batch_size: 4}
samples: {max_new_tokens: 0}
"""
FILES = {
    "latin1.txt": "caf\xe9 au lait\n".encode("latin-1") * 100,
    "latin1.yaml": b"run_name: caf\xe9\n",
    "utf16.yaml": TINY.encode("utf-16"),
    "binary.yaml": bytes(range(256)) * 4,
    "short.txt": b"ab",
    "empty.txt": b"",
    "empty.ckpt": b"",
    "text.ckpt": b"this is no checkpoint\n",
    "file": b"x",
    "x.parquet": b"no parquet",
    "x.jsonl.zst": b"no zst",
    "x.jsonl.gz": b"no gz",
    "x.pdf": b"%PDF-1.4\x00\xff\xfe" * 50,
    "weights.safetensors": b"\x00" * 40,
    "weights.gguf": b"GGUF" + b"\x00" * 40,
}


def make_folder(folder: Path, words: str) -> str:
    """Write all files, train a run of 20 steps there, and return the path of its checkpoint.

    The working directory is `folder`.
    """
    (folder / "text.txt").write_text(words)
    (folder / "my.txt").write_text("to be or not to be that is the question\n" * 200)
    (folder / "two words.txt").write_text("to be or not to be\n" * 100)
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "corpus.yaml").write_text(TINY.replace("text_file: text.txt", "corpus: shakespear"))
    bad = folder / "bad"
    for name in ("empty", "hf", "broken_hf", "nano"):
        (bad / name).mkdir(parents=True)
    for name, data in FILES.items():
        (bad / name).write_bytes(data)
    (bad / "broken_hf" / "config.json").write_text("{")
    (bad / "broken_hf" / "model.safetensors").write_bytes(b"garbage" * 10)
    (bad / "nano" / "train.bin").write_bytes(b"\x01")
    (bad / "nano" / "val.bin").write_bytes(b"\x01\x00")
    assert main(["fit", "--config", "tiny.yaml"]) == 0
    run = Path("lightning_logs") / "tiny" / "version_0"
    make_datasets(Path("data") / "text-char", bad)
    make_runs(run, bad)
    make_checkpoints(run, bad)
    return str(next((run / "checkpoints").glob("*.ckpt")))


def make_datasets(whole: Path, bad: Path) -> None:
    """Copy a dataset, with one fault each."""

    def manifest(content: str) -> Callable[[Path], object]:
        return lambda folder: (folder / "manifest.json").write_text(content)

    def changed(**keys: object) -> Callable[[Path], object]:
        facts = json.loads((whole / "manifest.json").read_text()) | keys
        return manifest(json.dumps(facts))

    shard = min(path.name for path in whole.glob("train*"))
    faults = {
        "not_json": manifest("{"),
        "empty_manifest": manifest(""),
        "list_manifest": manifest("[]"),
        "null_manifest": manifest("null"),
        "no_keys": manifest("{}"),
        "dtype": changed(dtype="float32"),
        "small_vocabulary": changed(vocab_size=3),
        "text_vocabulary": changed(vocab_size="many"),
        "no_splits": changed(splits={}),
        "future": changed(version=99),
        "unknown_tokenizer": changed(tokenizer={"name": "nope"}),
        "no_tokenizer": changed(tokenizer=None),
        "missing_shard": lambda folder: (folder / shard).unlink(),
        "short_shard": lambda folder: os.truncate(folder / shard, 100),
        "empty_shard": lambda folder: os.truncate(folder / shard, 0),
        "flipped_shard": lambda folder: flip(folder / shard, 2000),
    }
    for name, fault in faults.items():
        shutil.copytree(whole, bad / name)
        fault(bad / name)


def make_runs(whole: Path, bad: Path) -> None:
    """Copy a run folder, with one fault each."""
    faults: dict[str, Callable[[Path, Path], object]] = {
        "run_short": lambda run, ckpt: os.truncate(ckpt, 1000),
        "run_empty_file": lambda run, ckpt: os.truncate(ckpt, 0),
        "run_flipped": lambda run, ckpt: flip(ckpt, ckpt.stat().st_size // 2),
        "run_no_digest": lambda run, ckpt: digest(ckpt).unlink(),
        "run_odd_digest": lambda run, ckpt: digest(ckpt).write_text("xyz"),
        "run_no_folder": lambda run, ckpt: shutil.rmtree(run / "checkpoints"),
        "run_no_checkpoint": lambda run, ckpt: ckpt.unlink(),
        "run_no_config": lambda run, ckpt: (run / "config.yaml").unlink(),
    }
    for name, fault in faults.items():
        shutil.copytree(whole, bad / name)
        fault(bad / name, next((bad / name / "checkpoints").glob("*.ckpt")))


def digest(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.sha256")


def flip(path: Path, at: int) -> None:
    """Change one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 255
    path.write_bytes(content)


def make_checkpoints(run: Path, bad: Path) -> None:
    """Write files that torch.load reads and that are no checkpoints of ours."""
    ours = torch.load(next((run / "checkpoints").glob("*.ckpt")), weights_only=True)
    arguments = ours["hyper_parameters"]
    contents = {
        "random.pt": {"a": torch.ones(3)},
        "pytorch_model.bin": {"transformer.wte.weight": torch.ones(3, 2)},
        "other.ckpt": {
            "state_dict": {"x": torch.ones(2)},
            "hyper_parameters": {"lr": 1},
            "global_step": 3,
            "pytorch-lightning_version": "2.0",
        },
        "no_weights.ckpt": {key: value for key, value in ours.items() if key != "state_dict"},
        "empty_weights.ckpt": ours | {"state_dict": {}},
        "future.ckpt": ours | {"gpt_lightning": {"schema": 99}},
        "bad_config.ckpt": ours | {"hyper_parameters": {"config": {"n_layer": "x"}}},
        "instantiator.ckpt": ours | {"hyper_parameters": arguments | {"_instantiator": "os.x"}},
        "list.ckpt": [1, 2],
        "module.pt": torch.nn.Linear(2, 2),
        "state_dict.pt": torch.nn.Linear(2, 2).state_dict(),
    }
    for name, content in contents.items():
        torch.save(content, bad / name)
