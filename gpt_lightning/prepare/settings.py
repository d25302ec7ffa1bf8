"""Settings of a dataset and of the work, and the borders of its splits."""

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

MIN_TOKENS = 2  # one to read and one to predict


@checked("")
@dataclass(frozen=True)
class Settings:
    """Settings of one dataset; `workers` and `executor` decide no byte of it.

    Attributes:
        tokenizer: char, byte, an encoding of tiktoken, a tokenizer.json, the folder of a dataset,
            whose tokens are taken, or bpe:N, N tokens that are trained on the training split.
        val_fraction: Share held out for validation: of one text, the last characters; of documents,
            those that a hash of their text selects.
        test_fraction: Share held out for testing, after the validation share.
        shard_tokens: Maximum number of tokens per file; nanogpt has one file per split.
        text_field: Field of a JSON object, or column of a table, that holds the text.
        errors: Treatment of a damaged document: strict ends with an error, skip omits and counts
            it.
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
    errors: Literal["strict", "skip"] = "strict"
    format: Format = "npy"
    shuffle: Seed | None = None
    workers: PositiveInt | None = None
    executor: Literal["process", "ray"] = "process"

    def __post_init__(self) -> None:
        folder = Path(self.tokenizer)
        file = folder / "tokenizer.json"
        if (folder / "vocab.json").exists() and not file.exists():
            write = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
            fix = f"make {file} with {write} of transformers, and give that file"
            raise UserError(f"tokenizer is {folder}, a folder without tokenizer.json: {fix}")
        if file.exists() and not (folder / MANIFEST).exists():
            raise UserError(f"tokenizer is {folder}, a folder: give its file, {file}")
        if self.trains and self.format == "nanogpt":
            fix = "give another format"
            raise UserError(f"{self.tokenizer}: nanoGPT has the tokenizers char and gpt2: {fix}")
        if exact(self.val_fraction) + exact(self.test_fraction) >= 1:
            fractions = f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction}"
            raise UserError(f"{fractions} leave nothing to train on: their sum must be below 1")

    @property
    def trains(self) -> bool:
        """True if the tokenizer is bpe:N, which is trained on the training split."""
        return tokenizers.trained_size(self.tokenizer) > 0

    def build_tokenizer(self, text: str | None = None) -> tokenizers.Tokenizer:
        """Return the tokenizer, unless it is trained; `text` is that of char.

        Raises:
            UserError: There is no such tokenizer.
        """
        if self.tokenizer not in ("char", "byte", "gpt2") and Path(self.tokenizer).is_dir():
            return tokenizers.tokenizer_from_spec(read_manifest(Path(self.tokenizer)).tokenizer)
        return tokenizers.build_tokenizer(self.tokenizer, text)

    def of_text(self) -> Fields:
        """Return the settings in the manifest of one text."""
        return {
            "tokenizer": tokenizers.tokenizer_name(self.tokenizer),
            "val_fraction": self.val_fraction,
            "test_fraction": self.test_fraction,
            "shard_tokens": self.shard_tokens,
        }

    def of_documents(self) -> Fields:
        """Return the settings in the manifest of documents."""
        chosen = {
            "text_field": self.text_field,
            "errors": self.errors,
            "shuffle": self.shuffle,
        }
        return self.of_text() | chosen


def exact(fraction: float) -> Fraction:
    """Return the decimal as it was written, so that no rounding moves a border."""
    return Fraction(str(fraction))


def split_borders(n: int, val_fraction: float, test_fraction: float) -> dict[str, tuple[int, int]]:
    """Return the first and the last + 1 of n characters of each split.

    The fractions are exact decimals, so that no rounding moves a border: the result is nanoGPT's
    int(n * 0.9), and 1 - 0.9 of ten characters is one.
    """
    val = exact(val_fraction)
    test = exact(test_fraction)
    train_end = int(n * (1 - val - test))
    val_end = int(n * (1 - test))
    borders = {"train": (0, train_end)}
    if val:
        borders["val"] = (train_end, val_end)
    if test:
        borders["test"] = (val_end, n)
    return borders
