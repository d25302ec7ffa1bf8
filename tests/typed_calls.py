"""Calls that type checkers read and no program runs: ten right ones, then ten wrong ones."""

from pathlib import Path
from typing import Any

from gpt_lightning import GPTConfig, GPTModule, TokenDataModule, fit, load_model

config = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=None, dropout=0.1)


class Own(GPTModule):
    def __init__(self, config: GPTConfig, aux: float = 0.1, **settings: Any) -> None:
        super().__init__(config, **settings)


GPTModule()
GPTModule(config, learning_rate=1e-3, betas=(0.9, 0.99), schedule="constant", warmup_steps=5)
GPTModule(config, "gpt2", betas=[0.9, 0.95], freeze=["*.bias"], compile=False, fused="auto")
GPTModule(config, network=None, learning_rate_factors={"*.bias": 1}, lora_rank=None)
Own(config, aux=0.7, learning_rate=1e-3)
TokenDataModule(text_file=Path("my.txt"), tokenizer="char", batch_size=4, val_fraction=0)
TokenDataModule(dataset="a", data_dir="data", order="nanogpt", seed=None)
TokenDataModule(dataset="s3://bucket/data", num_workers=2, allow_changes=True)
fit("quickstart", Path("my.yaml"), {"data.batch_size": 8}, run_name="short").steps.bit_count()
load_model(Path("a.ckpt"))[1].encode("text")

GPTModule(config, learning_rte=1e-3)  # wrong
GPTModule(config, learning_rate="fast")  # wrong
GPTModule(config, schedule="step")  # wrong
GPTModule(config, betas=(0.9,))  # wrong
GPTModule(config, n_layer=2)  # wrong
TokenDataModule(batch_size="4")  # wrong
TokenDataModule(bach_size=4)  # wrong
TokenDataModule(text_file=["my.txt"])  # wrong
GPTConfig(n_layers=2)  # wrong
load_model("run", device="cuda")  # wrong
