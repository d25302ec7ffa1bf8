"""Datasets of random tokens, for measurements without a corpus."""

from pathlib import Path

import numpy as np

from gpt_lightning.data.manifest import Manifest, TextOrigin
from gpt_lightning.data.shards import write_shard
from gpt_lightning.data.tokenizers import token_dtype


def random_dataset(data_dir: Path, vocab_size: int, n_tokens: int = 2_000_000) -> Path:
    """Write a dataset of uniformly random tokens once; it has a train split and no tokenizer.

    Args:
        data_dir: Folder of datasets.
        vocab_size: Number of token ids.
        n_tokens: Tokens of the one shard.

    Returns:
        Folder of the dataset, data_dir/random-VOCAB_SIZE-N_TOKENS.
    """
    folder = data_dir / f"random-{vocab_size}-{n_tokens}"
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
