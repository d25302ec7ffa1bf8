"""GPTModule and TokenDataModule with Lightning's own Trainer: the same numbers as the command's."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

STOCK = """
import json
import sys

import lightning as L
import torch

from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule

ranks = int(sys.argv[1])
L.seed_everything(1)
config = {"n_layer": 1, "n_head": 1, "n_embd": 8, "block_size": 16, "vocab_size": None}
module = GPTModule(config, schedule="constant")
data = TokenDataModule(text_file="text.txt", tokenizer="char", batch_size=8 // ranks)
quiet = ("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing")
trainer = L.Trainer(
    accelerator="cpu", devices=ranks, strategy="ddp" if ranks > 1 else "auto", max_steps=6,
    val_check_interval=3, **dict.fromkeys(quiet, False),
)
read = []
step = module.validation_step
module.validation_step = lambda b, *args: (read.append((b[1] >= 0).sum()), step(b, *args))
trainer.fit(module, data)
read.clear()
(result,) = trainer.validate(module, data, verbose=False)
tokens = trainer.strategy.reduce(torch.stack(read).sum(), reduce_op="sum")
if trainer.is_global_zero:
    print(json.dumps({"tokens": int(tokens), "loss": result["val/loss"]}))
"""


@pytest.mark.slow
def test_two_ranks_of_a_stock_trainer_evaluate_the_whole_split_once(tmp_path, text_file):
    (tmp_path / "stock.py").write_text(STOCK)

    def run(ranks: int) -> dict:
        command = [sys.executable, "stock.py", str(ranks)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    one, two = run(1), run(2)
    (manifest,) = Path(tmp_path).rglob("manifest.json")
    shards = json.loads(manifest.read_text())["splits"]["val"]
    targets = sum(shard["tokens"] for shard in shards) - 1
    assert one["tokens"] == two["tokens"] == targets
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
