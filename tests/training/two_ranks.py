"""Trains on two ranks over gloo, and prints reads and weights of rank 0 as a line of JSON.

    python tests/training/two_ranks.py TEXT_FILE [copied|shards|stop]

With `copied`, DDP copies gradients from its buckets; without, they are views of the buckets. With
`shards`, the strategy is fsdp2, and the line has no weights. With `stop`, rank 1 alone sets
trainer.should_stop in the fourth step. A CPU stands for a GPU, as in
test_stalls.py: each read would wait for all work of the device.
"""

import hashlib
import json
import sys
import traceback
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.training import optim
from gpt_lightning.training.callbacks.checkpoint import RunCheckpoint
from gpt_lightning.training.callbacks.signals import StopSignals
from gpt_lightning.training.callbacks.speed import SpeedMonitor
from gpt_lightning.training.datamodule import TokenDataModule
from gpt_lightning.training.module import GPTModule
from gpt_lightning.training.sharding import ShardedStrategy

TINY = GPTConfig(n_layer=1, n_head=1, n_embd=16, block_size=16, vocab_size=None)
ACCUMULATE, STEPS = 2, 9


class Reads(TorchDispatchMode, L.Callback):
    """Notes the step and the innermost line outside PyTorch of every read."""

    def __init__(self):
        super().__init__()
        self.step, self.found = 0, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.step = trainer.global_step + 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            frames = [f for f in traceback.extract_stack()[:-1] if "/torch/" not in f.filename]
            self.found.append((self.step, f"{Path(frames[-1].filename).name} {frames[-1].name}"))
        return func(*args, **(kwargs or {}))


class Stop(L.Callback):
    """Sets trainer.should_stop in the fourth step of rank 1 alone."""

    def on_train_batch_start(self, trainer, *args):
        trainer.should_stop |= trainer.global_rank == 1 and trainer.global_step == 3


def main(text_file: str, views: bool, shards: bool, stop: bool) -> None:
    optim.DEFERRED_ON = {"cpu"}
    L.seed_everything(1337, verbose=False)
    reads, folder = Reads(), str(Path(text_file).parent)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ShardedStrategy() if shards else DDPStrategy(gradient_as_bucket_view=views),
        max_steps=STEPS,
        accumulate_grad_batches=ACCUMULATE,
        gradient_clip_val=1.0,
        log_every_n_steps=STEPS + 1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        default_root_dir=folder,
        callbacks=[
            SpeedMonitor(warmup_steps=1),
            StopSignals(),
            RunCheckpoint(),
            reads,
            *[Stop()] * stop,
        ],
    )
    data = TokenDataModule(
        text_file=text_file, data_dir=folder, batch_size=2, block_size=16, tokenizer="char"
    )
    with reads:
        module = GPTModule(TINY, schedule="constant", compile=False)
        trainer.fit(module, data)
    if trainer.is_global_zero:
        digest = ""
        if not shards:
            weights = torch.nn.utils.parameters_to_vector(module.parameters()).detach().numpy()
            digest = hashlib.sha256(weights.tobytes()).hexdigest()
        line = {"reads": reads.found, "weights": digest, "step": trainer.global_step}
        print(json.dumps(line))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], "copied" not in sys.argv, "shards" in sys.argv, "stop" in sys.argv)
