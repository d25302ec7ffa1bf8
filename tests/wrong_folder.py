"""Folder in which the wrong inputs of wrong_inputs.py are typed: configurations, data, a run."""

import json
import os
import random
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
CONFIGS = {
    "anchor": "model:\n  learning_rate: *lr\n",
    "betas3": "model: {betas: [0.9, 0.95, 0.99]}\n",
    "betas_text": "model:\n  betas: 0.9, 0.95\n",
    "bool_batch": "data: {batch_size: true}\n",
    "callback_arguments": "trainer:\n  callbacks:\n    - class_path: EarlyStopping\n"
    "      init_args: {monitr: val/loss, monitor: val/loss}\n",
    "callback_function": "trainer:\n  callbacks:\n    - class_path: os.system\n",
    "callback_name": "trainer: {callbacks: EarlyStopping}\n",
    "callback_nowhere": "trainer:\n  callbacks:\n    - class_path: nope.Nope\n",
    "classpath": "model:\n  class_path: GPTModule\n  init_args:\n    lr: 1\n",
    "colons": "model: learning_rate: 0.001\n",
    "comma": "model:\n  learning_rate: 0,001\n",
    "control": "run_name: a\x07b\n",
    "documents": "trainer:\n  max_steps: 3\n---\nmodel:\n  learning_rate: 1.0e-3\n",
    "dup": "trainer:\n  max_steps: 3\n  max_steps: 4\n",
    "dup_section": "model:\n  learning_rate: 1.0e-3\nmodel:\n  warmup_steps: 3\n",
    "empty": "",
    "equals": "trainer.max_steps=3\n",
    "fit_section": "fit:\n  trainer:\n    max_steps: 3\n",
    "float_batch": "data: {batch_size: 2.0}\n",
    "float_layers": "model: {config: {n_layer: 2.0}}\n",
    "float_warmup": "model: {warmup_steps: 2.0}\n",
    "hf": "per_device_train_batch_size: 4\nnum_train_epochs: 3\n",
    "include": "config: tiny.yaml\n",
    "indent": "trainer:\n  max_steps: 3\n   devices: 1\n",
    "infinite": "model: {learning_rate: .inf}\n",
    "infinite_decay": "model: {weight_decay: .inf}\n",
    "kilo": "data: {tokens_per_step: 512k}\n",
    "list": "- a\n- b\n",
    "list_rate": "model: {learning_rate: [1.0e-3]}\n",
    "list_trainer": "trainer: [1, 2]\n",
    "litgpt": "model_name: pythia-14m\ntrain:\n  max_tokens: 1000\n",
    "logger_list": "trainer: {logger: [tensorboard, csv]}\n",
    "logger_name": "trainer: {logger: tensorboard}\n",
    "mapping_batch": "data: {batch_size: {train: 4}}\n",
    "merge": "base: &b\n  max_steps: 3\ntrainer:\n  <<: *b\n",
    "nan": "model: {learning_rate: .nan}\n",
    "nan_clip": "trainer: {gradient_clip_val: .nan}\n",
    "nano": "n_layer: 6\nbatch_size: 12\n",
    "nested": "trainer:\n  max_steps:\n    value: 3\n",
    "no_colon": "trainer max_steps 3\n",
    "none_section": "trainer:\nmodel:\n  learning_rate: 1.0e-3\n",
    "null_batch": "data: {batch_size: null}\n",
    "null_config": "model: {config: null}\n",
    "null_data": "data:\n",
    "null_devices": "trainer: {devices: null}\n",
    "null_keep": "checkpoint: {keep_last: null}\n",
    "null_layers": "model: {config: {n_layer: null}}\n",
    "null_order": "data:\n  order:\n",
    "null_rate": "model: {learning_rate: null}\n",
    "null_samples": "samples:\n",
    "null_seed": "seed_everything: null\n",
    "null_tokens": "samples: {max_new_tokens: null}\n",
    "null_warmup": "speed: {warmup_steps: null}\n",
    "number_key": "1: 2\n",
    "object": "model:\n  learning_rate: !!python/object/apply:os.system ['touch hacked']\n",
    "optimizer": "optimizer:\n  class_path: torch.optim.AdamW\n  init_args:\n    lr: 0.1\n",
    "percent": "data: {val_fraction: 10%}\n",
    "scalar_data": "data: tinyshakespeare\n",
    "scalar_model": "model: gpt2\n",
    "schedule": "lr_scheduler: cosine\n",
    "syntax": "trainer: {max_steps: 3\nmodel: [\n",
    "tabs": "trainer:\n\tmax_steps: 3\n",
    "tag": "model:\n  learning_rate: !foo 3\n",
    "unclosed": 'data:\n  text_file: "my.txt\n',
    "yes": "trainer:\n  max_steps: yes\n",
}
FILES = {
    "latin1.txt": "caf\xe9 au lait\n".encode("latin-1") * 100,
    "latin1.yaml": b"run_name: caf\xe9\n",
    "utf16.yaml": TINY.encode("utf-16"),
    "binary.yaml": bytes(range(256)) * 4,
    "nano.py": b"# train a miniature model\nout_dir = 'out'\nbatch_size = 12\n",
    "table.toml": b"[trainer]\nmax_steps = 3\n",
    "comma.json": b'{"trainer": {"max_steps": 3,}',
    "short.txt": b"ab",
    "empty.txt": b"",
    "empty.ckpt": b"",
    "text.ckpt": b"this is no checkpoint\n",
    "file": b"x",
    "no_text.jsonl": b'{"body": "x"}\n',
    "broken.jsonl": b'{"text": "abc"}\n{"text": \n',
    "number.jsonl": b'{"text": 3}\n',
    "null.jsonl": b'{"text": null}\n',
    "list.jsonl": b"[1,2]\n",
    "x.parquet": b"no parquet",
    "x.jsonl.zst": b"no zst",
    "x.jsonl.gz": b"no gz",
    "x.csv": b"a,b\n1,2\n",
    "x.pdf": b"%PDF-1.4\x00\xff\xfe" * 50,
    "weights.safetensors": b"\x00" * 40,
    "weights.gguf": b"GGUF" + b"\x00" * 40,
}


def make_folder(folder: Path) -> str:
    """Write all files, train a run of 20 steps there, and return the path of its checkpoint.

    The working directory is `folder`.
    """
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept"]
    text = "".join(rng.choice(words) + rng.choice(" \n") for _ in range(4000))
    (folder / "text.txt").write_text(text)
    (folder / "my.txt").write_text("to be or not to be that is the question\n" * 200)
    (folder / "two words.txt").write_text("to be or not to be\n" * 100)
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "corpus.yaml").write_text(TINY.replace("text_file: text.txt", "corpus: shakespear"))
    bad = folder / "bad"
    for name in ("empty", "hf", "broken_hf", "nano"):
        (bad / name).mkdir(parents=True)
    for name, content in CONFIGS.items():
        (bad / f"{name}.yaml").write_text(content)
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
