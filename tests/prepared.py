"""Datasets for tests, made without the command line."""

from pathlib import Path

from gpt_lightning.data.manifest import Manifest
from gpt_lightning.prepare.settings import Settings
from gpt_lightning.prepare.text import prepare_one_text


def prepare_text(
    source: Path,
    out: Path,
    tokenizer: str,
    val_fraction: float = 0.1,
    test_fraction: float = 0.0,
    shard_tokens: int = 100_000_000,
    overwrite: bool = False,
) -> Manifest:
    """Prepare one text in `out`, as `gpt-lightning prepare` does, and return the manifest."""
    settings = Settings(tokenizer, val_fraction, test_fraction, shard_tokens)
    return prepare_one_text(source, source.name, out, settings, overwrite)[0]
