"""Train, evaluate and sample a small GPT with Lightning's own Trainer: python_api.py TEXT."""

import sys

import lightning as L
import torch

from gpt_lightning import GPTConfig, GPTModule, TokenDataModule, generate

if len(sys.argv) != 2:
    sys.exit("usage: python_api.py TEXT")
data = TokenDataModule(text_file=sys.argv[1], tokenizer="char", batch_size=16)
config = GPTConfig(n_layer=2, n_head=2, n_embd=64, block_size=64, vocab_size=None)
module = GPTModule(config, learning_rate=3e-3, compile=False)
trainer = L.Trainer(max_steps=100, gradient_clip_val=1.0, logger=False, enable_checkpointing=False)

trainer.fit(module, data)
(metrics,) = trainer.validate(module, data, verbose=False)
print(f"validation loss {metrics['val/loss']:.4f}")

prompt = torch.tensor([data.tokenizer.encode("the ").tolist()], device=module.device)  # (1, 4)
tokens = generate(module.model, prompt, max_new_tokens=50, temperature=0.8, top_k=20)  # (1, 54)
print(data.tokenizer.decode(tokens[0].tolist()))
