"""Settings of a dataset and of the work, and the borders of its splits."""

import functools
import os
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

from jsonargparse.typing import ClosedUnitInterval, PositiveInt

from gpt_lightning.data import tokenizers
from gpt_lightning.data.dataset import read_manifest
from gpt_lightning.data.formats import Format
from gpt_lightning.data.manifest import MANIFEST
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.parsing import Seed, checked

SplitBy = Literal["hash", "fraction"]
Errors = Literal["strict", "skip", "replace"]

MIN_TOKENS = 2  # one to read and one to predict


@checked("")
@dataclass(frozen=True)
class Settings:
    """Settings of one dataset; `workers` and `executor` decide no byte of it.

    Attributes:
        tokenizer: char, byte, an encoding of tiktoken, a tokenizer.json, the folder of a dataset,
            whose tokens are taken, or bpe:N, N tokens that are trained on the training split.
        val_fraction: Share held out for validation: of one text, the last characters; of documents,
            those that split_by selects.
        test_fraction: Share held out for testing, after the validation share.
        shard_tokens: Maximum number of tokens per file; nanogpt has one file per split.
        text_field: Field of a JSON object, or column of a table, that holds the text.
        split_by: Selection of the held-out documents: hash, by a hash of their text, or fraction,
            the last ones. null: hash.
        errors: Treatment of a damaged document: strict ends with an error, skip omits and counts
            it, replace writes U+FFFD where bytes are not UTF-8.
        format: npy, nanogpt (nanoGPT's train.bin and val.bin) or llmc (llm.c's .bin).
        shuffle: Seed of a random order of the units of documents (some 64 MiB of text each); null:
            their own order.
        workers: Number of processes; null: one per core.
        executor: process, or ray for an existing Ray cluster (RAY_ADDRESS).

    Raises:
        UserError: A value is out of bounds, or two contradict each other.
    """

    tokenizer: str
    val_fraction: ClosedUnitInterval = 0.1
    test_fraction: ClosedUnitInterval = 0.0
    shard_tokens: PositiveInt = 100_000_000
    text_field: str = "text"
    split_by: SplitBy | None = None
    errors: Errors = "strict"
    format: Format = "npy"
    shuffle: Seed | None = None
    workers: PositiveInt | None = None
    executor: Literal["process", "ray"] = "process"

    def __post_init__(self) -> None:
        if self.tokenizer.endswith(".json"):  # workers of Ray have another folder
            object.__setattr__(self, "tokenizer", os.path.abspath(self.tokenizer))
        file = f"{self.tokenizer}/tokenizer.json"
        if os.path.exists(file) and not os.path.exists(f"{self.tokenizer}/{MANIFEST}"):
            raise UserError(f"tokenizer is {self.tokenizer}, a folder: give its file, {file}")
        if self.trains and (self.split_by == "fraction" or self.format == "nanogpt"):
            raise UserError(f"{self.tokenizer}: leave out split_by fraction and format nanogpt")
        if exact(self.val_fraction) + exact(self.test_fraction) >= 1:
            fractions = f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction}"
            raise UserError(f"{fractions} leave nothing to train on: their sum must be below 1")

    @functools.cached_property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, which a tokenizer.json has when it is read first."""
        return tokenizers.tokenizer_name(self.tokenizer)

    @functools.cached_property
    def trains(self) -> bool:
        """True if the tokenizer is bpe:N, which is trained on the training split."""
        return tokenizers.trained_size(self.tokenizer) > 0

    def build_tokenizer(self, text: str | None = None) -> tokenizers.Tokenizer:
        """Return the tokenizer, unless it is trained; `text` is that of char.

        Raises:
            UserError: There is no such tokenizer, or a tokenizer.json changed since the run began.
        """
        if self.tokenizer not in ("char", "byte", "gpt2") and Path(self.tokenizer).is_dir():
            return tokenizers.tokenizer_from_spec(read_manifest(Path(self.tokenizer)).tokenizer)
        found = tokenizers.build_tokenizer(self.tokenizer, text)
        if found.name != self.tokenizer_name:
            raise UserError(
                f"{self.tokenizer} changed while it was used: run the same command again"
            )
        return found

    def of_text(self) -> Fields:
        """Return the settings in the manifest of one text."""
        found: Fields = {
            "tokenizer": self.tokenizer_name,
            "val_fraction": self.val_fraction,
            "test_fraction": self.test_fraction,
            "shard_tokens": self.shard_tokens,
        }
        if self.errors != "strict":
            found["errors"] = self.errors
        return found

    def of_documents(self) -> Fields:
        """Return the settings in the manifest of documents."""
        found = self.of_text()
        found["text_field"] = self.text_field
        found["split_by"] = self.split_by or "hash"
        found["errors"] = self.errors
        if self.shuffle is not None:
            found["shuffle"] = self.shuffle
        return found


def exact(fraction: float) -> Fraction:
    """Return the decimal as it was written, so that no rounding moves a border."""
    return Fraction(str(fraction))


def split_borders(n: int, val_fraction: float, test_fraction: float) -> dict[str, tuple[int, int]]:
    """Return the first and the last + 1 of n characters (of documents: tokens) of each split.

    The fractions are exact decimals, so that no rounding moves a border: the result is nanoGPT's
    int(n * 0.9), and 1 - 0.9 of ten characters is one.
    """
    val, test = exact(val_fraction), exact(test_fraction)
    train_end, val_end = int(n * (1 - val - test)), int(n * (1 - test))
    borders = {"train": (0, train_end)}
    if val:
        borders["val"] = (train_end, val_end)
    if test:
        borders["test"] = (val_end, n)
    return borders
