"""What decides the bytes of a dataset beside its text, and where the splits begin and end."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from gpt_lightning.errors import UserError

SplitBy = Literal["hash", "fraction"]
Errors = Literal["strict", "skip", "replace"]
Format = Literal["npy", "nanogpt", "llmc"]

SPLITS = ("train", "val", "test")
MIN_TOKENS = 2  # one to read and one to predict


@dataclass(frozen=True)
class Settings:
    """The settings of one dataset.

    Attributes:
        tokenizer: char, byte, or an encoding of tiktoken.
        val_fraction: share of the text that is held out for validation.
        test_fraction: share of the text that is held out for testing.
        shard_tokens: most tokens that a file holds; nanogpt has one file a split.
        text_field: field of a JSON object or column of a Parquet file that holds the text.
        split_by: hash or fraction; None: hash for documents. One text has no documents to hash.
        errors: strict, skip or replace: what to do about text that is none.
        format: of the shards: npy, nanogpt or llmc.

    Raises:
        UserError: fractions that leave no training text, or shards of no token.
    """

    tokenizer: str
    val_fraction: float = 0.1
    test_fraction: float = 0.0
    shard_tokens: int = 100_000_000
    text_field: str = "text"
    split_by: SplitBy | None = None
    errors: Errors = "strict"
    format: Format = "npy"

    def __post_init__(self) -> None:
        for key in ("val_fraction", "test_fraction"):
            if not 0 <= getattr(self, key) < 1:  # also refuses nan
                raise UserError(f"{key} is {getattr(self, key)}: it must be at least 0 and below 1")
        if exact(self.val_fraction) + exact(self.test_fraction) >= 1:
            raise UserError(
                f"val_fraction {self.val_fraction} and test_fraction {self.test_fraction} leave "
                "nothing to train on: their sum must be below 1"
            )
        if self.shard_tokens < 1:
            raise UserError(f"shard_tokens is {self.shard_tokens}: it must be at least 1")

    def of_text(self) -> dict[str, Any]:
        """What the manifest of one text records."""
        keys = ("tokenizer", "val_fraction", "test_fraction", "shard_tokens")
        strict = self.errors == "strict"  # the key is younger than the first datasets
        return {key: getattr(self, key) for key in (keys if strict else (*keys, "errors"))}

    def of_documents(self) -> dict[str, Any]:
        """What the manifest of documents records."""
        return {
            "tokenizer": self.tokenizer,
            "val_fraction": self.val_fraction,
            "test_fraction": self.test_fraction,
            "shard_tokens": self.shard_tokens,
            "text_field": self.text_field,
            "split_by": self.split_by or "hash",
            "errors": self.errors,
        }

    def of_parts(self) -> dict[str, Any]:
        """What decides the bytes of the parts: all but how they are put together."""
        return {
            "tokenizer": self.tokenizer,
            "text_field": self.text_field,
            "errors": self.errors,
        }

    def wanted_splits(self) -> list[str]:
        """train, and those of val and test that have a share."""
        return list(split_borders(1, self.val_fraction, self.test_fraction))


def exact(fraction: float) -> Fraction:
    """The decimal that was written, so that no rounding moves a border."""
    return Fraction(str(fraction))


def split_borders(n: int, val_fraction: float, test_fraction: float) -> dict[str, tuple[int, int]]:
    """First and last + 1 character (of documents: token) of each split that n of them fall into.

    The fractions are taken as the decimals that were written, so that no rounding moves a border:
    nanoGPT's int(n * 0.9) comes out, and 1 - 0.9 of ten characters is one.
    """
    val, test = exact(val_fraction), exact(test_fraction)
    train_end, val_end = int(n * (1 - val - test)), int(n * (1 - test))
    borders = {"train": (0, train_end), "val": (train_end, val_end), "test": (val_end, n)}
    wanted = {"train": True, "val": val > 0, "test": test > 0}
    return {split: border for split, border in borders.items() if wanted[split]}


def hash_borders(val_fraction: float, test_fraction: float) -> tuple[int, int]:
    """A document whose hash, below 2**64, is below the first is val, below the second test."""
    val, test = exact(val_fraction), exact(test_fraction)
    return int(val * 2**64), int((val + test) * 2**64)
