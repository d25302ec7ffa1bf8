"""Random tokens, for measurements that any machine can make."""

from pathlib import Path

import numpy as np

from gpt_lightning.data.shards import Manifest, TextOrigin, write_shard
from gpt_lightning.data.tokenizers import token_dtype


def random_dataset(data_dir: Path, vocab_size: int, n_tokens: int = 2_000_000) -> Path:
    """A dataset of uniformly random tokens, written once; it has a training split and no tokenizer.

    Args:
        data_dir: Where datasets lie.
        vocab_size: Tokens are below it.
        n_tokens: Of the one shard.

    Returns:
        Its folder, data_dir/random-VOCAB_SIZE.
    """
    folder = data_dir / f"random-{vocab_size}"
    if (folder / "manifest.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(vocab_size, size=n_tokens)
    shard = write_shard(folder / "train_00000.npy", tokens.astype(token_dtype(vocab_size)))
    manifest = Manifest(
        tokenizer={"name": "none"},
        vocab_size=vocab_size,
        dtype=token_dtype(vocab_size).name,
        source=TextOrigin("random tokens", 0, ""),
        settings={"n_tokens": n_tokens},
        splits={"train": (shard,)},
    )
    manifest.save(folder)
    return folder
