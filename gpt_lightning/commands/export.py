"""The command `gpt-lightning export`: write a trained model in Hugging Face's format."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_lightning.errors import UserError

if TYPE_CHECKING:
    from gpt_lightning.model.gpt import GPTConfig
    from gpt_lightning.model.weights import Pretrained


def export(source: str, to: str | None = None) -> None:
    """Write a trained model as a folder for transformers, and for all that reads its format.

    Rows of the vocabulary beyond the tokenizer's, which are padding, are left out.

    Args:
        source: Checkpoint, run folder, or any other source of `sample`.
        to: Folder to make; it must be named.
    """
    if to is None:
        raise UserError("give --to DIR: the folder to make")
    out = Path(to)
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise UserError(f"--to {out} exists: give the name of a new folder")

    from gpt_lightning.data.huggingface_tokenizer import tokenizer_files
    from gpt_lightning.files import explained, move_into_place, workspace
    from gpt_lightning.model import huggingface
    from gpt_lightning.model.weights import user_errors
    from gpt_lightning.runs.sources import read_source, tokenizer_of

    found = read_source(source, gpt_for="export")
    tokenizer, config = tokenizer_of(found), found.config()
    vocab_size = min(tokenizer.vocab_size, config.vocab_size or 0)
    weights = {name: tensor.float() for name, tensor in found.state_dict(config).items()}
    theirs = huggingface.to_huggingface(weights, config, vocab_size)
    n_params = sum(t.numel() for k, t in theirs.items() if config.bias or not k.endswith(".bias"))
    eot = {"bos_token_id": tokenizer.eot_token, "eos_token_id": tokenizer.eot_token}
    ours = {"tokenizer": tokenizer.spec(), "bias": config.bias, "figures": found.figures}
    settings = huggingface.settings_of(config, vocab_size, tokenizer.eot_token, ours)
    files = tokenizer_files(tokenizer, config.block_size)
    files["config.json"] = json.dumps(settings, indent=2) + "\n"
    files["generation_config.json"] = json.dumps(eot, indent=2) + "\n"
    files["README.md"] = model_card(found, config, n_params, tokenizer.name)
    with explained("write", out), workspace(out) as folder:
        (folder / "new").mkdir()
        for name, text in files.items():
            (folder / "new" / name).write_text(text, encoding="utf-8")
        with user_errors(f"cannot write {out}"):
            from safetensors.torch import save_file

            save_file(theirs, folder / "new" / huggingface.FILES[0], metadata={"format": "pt"})
        if not move_into_place(folder, out, overwrite=False):
            raise UserError(f"--to {out} exists: give the name of a new folder")
    print(f"wrote       {out}: {', '.join(sorted([*files, huggingface.FILES[0]]))}")
    print(f"use         transformers.AutoModelForCausalLM.from_pretrained({str(out)!r})")


def model_card(found: "Pretrained", config: "GPTConfig", n_params: int, tokenizer: str) -> str:
    """Return the README.md of a model: its shape, and the figures of its training."""
    rows: dict[str, Any] = {
        "parameters": f"{n_params:,}",
        "layers, heads, width": f"{config.n_layer}, {config.n_head}, {config.n_embd}",
        "context": f"{config.block_size:,} tokens",
        "tokenizer": tokenizer,
    }
    names = {"step": "optimizer steps", "tokens": "tokens of training"}
    for key, name in {**names, "val_loss": "validation loss"}.items():
        if key in found.figures:
            value = found.figures[key]
            rows[name] = f"{value:.4f} nats per token" if key == "val_loss" else f"{value:,}"
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
tags:
- gpt2
---

# GPT-2

| | |
| --- | --- |
{table}

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")
tokenizer = AutoTokenizer.from_pretrained(".")
```

Exported by gpt-lightning from a model of its own or of another program's training.
"""
