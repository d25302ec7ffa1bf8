"""The command `gpt-lightning data`: print or check the contents of a dataset."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
from jsonargparse.typing import NonNegativeInt

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.lengths import Lengths, document_lengths, plot_lengths
from gpt_lightning.data.manifest import Manifest
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.tokenizers import Tokenizer, tokenizer_from_spec
from gpt_lightning.data.verify import verify
from gpt_lightning.errors import UserError
from gpt_lightning.tables.rows import Console, column

ROOT = Path("lightning_logs") / "inspect"
MAX_SHARD_ROWS = 20


@dataclass(frozen=True)
class SplitRow:
    """Row of a split; lengths of documents are in tokens."""

    split: str = column("split", width=5)
    shards: int = column("shards", ",d")
    tokens: int = column("tokens", ",d", 15)
    documents: int | None = column("documents", ",d", 12)
    mean: float | None = column("mean", ",.1f", 9)
    median: int | None = column("median", ",d", 9)
    longest: int | None = column("longest", ",d", 11)


@dataclass(frozen=True)
class ShardRow:
    """Row of a shard."""

    file: str = column("file", width=24)
    tokens: int = column("tokens", ",d", 13)
    sha256: str = column("SHA-256")


def data(
    action: Literal["inspect", "verify"],
    folder: str,
    offset: int = 0,
    length: NonNegativeInt = 200,
    split: str | None = None,
    out: str | None = None,
) -> None:
    """Print the contents of a dataset, or compare every byte with its digests.

    Memory is bounded for datasets of any size.

    Args:
        action: inspect: print tokens, documents, digests, a decoded peek, lengths of documents.
            verify: compare every file with its SHA-256, every token with the vocabulary.
        folder: Folder of a dataset that `gpt-lightning prepare` or another program made.
        offset: Position in the split, in tokens, at which the peek starts.
        length: Tokens of the peek; 0: none.
        split: Split of the peek; null: the first one.
        out: Path of a .png file for the histogram of document lengths; null:
            lightning_logs/inspect/<folder>/documents.png.
    """
    path = Path(folder)
    if action == "verify":
        if (offset, length, split, out) != (0, 200, None, None):
            options = "--offset, --length, --split and --out"
            raise UserError(f"{options} are for `gpt-lightning data inspect`: leave them out")
        return verify(path)
    manifest = load_manifest(path)
    chosen = split or next(iter(manifest.splits))
    check_peek(path, manifest, chosen, offset, length)
    print_facts(path, manifest)
    tokenizer = _tokenizer(manifest)
    lengths = _lengths(path, manifest, tokenizer)
    print_splits(manifest, lengths)
    print_shards(manifest)
    if length:
        print_peek(TokenStream(path, manifest, chosen), chosen, tokenizer, offset, length)
    if out and not lengths:
        raise UserError("--out: these documents have no lengths to draw: leave it out")
    if lengths:
        name = path.resolve().name
        picture = Path(out) if out else ROOT / name / "documents.png"
        plot_lengths(picture, f"Documents of {name}", lengths)
        print(f"\npicture: {picture}")


def check_peek(folder: Path, manifest: Manifest, split: str, offset: int, length: int) -> None:
    """Check the arguments of the peek.

    Raises:
        UserError: The split is unknown, or the offset is outside of it.
    """
    if split not in manifest.splits:
        raise UserError(
            f"--split is {split!r}, and {folder} has {', '.join(manifest.splits)}: choose one"
        )
    n_tokens = manifest.tokens(split)
    if not 0 <= offset < n_tokens:
        raise UserError(
            f"--offset is {offset:,}, and the {split} split of {folder} has {n_tokens:,} tokens: "
            f"choose one from 0 to {n_tokens - 1:,}"
        )


def print_facts(folder: Path, manifest: Manifest) -> None:
    """Print the facts of the whole dataset."""
    facts = {
        "folder": folder,
        "format": manifest.format,
        "tokenizer": f"{manifest.tokenizer.get('name')}, {manifest.vocab_size:,} tokens",
        "dtype": f"{manifest.dtype}, {manifest.n_bytes():,} bytes of tokens",
        "source": f"{manifest.source.name}, {manifest.source.bytes:,} bytes",
        "settings": ", ".join(f"{key} {value}" for key, value in manifest.settings.items()),
    }
    for name, fact in facts.items():
        print(f"{name:<10} {fact}".rstrip())


def print_splits(manifest: Manifest, lengths: dict[str, Lengths]) -> None:
    """Print a row a split; the columns of its documents are empty if they are unknown."""
    console = Console(SplitRow)
    print(f"\n{console.header()}")
    for split, shards in manifest.splits.items():
        row = SplitRow(split, len(shards), manifest.tokens(split))
        if found := lengths.get(split):
            n, mean, median, longest = len(found), found.mean(), *map(found.quantile, (0.5, 1.0))
            row = replace(row, documents=n, mean=mean, median=median, longest=longest)
        print(console.line(row))


def print_shards(manifest: Manifest) -> None:
    """Print a row for each of the first twenty shards, and the number of the others."""
    console = Console(ShardRow)
    print(f"\n{console.header()}")
    shards = manifest.shards()
    for shard in shards[:MAX_SHARD_ROWS]:
        print(console.line(ShardRow(shard.file, shard.tokens, shard.sha256 or "none")))
    if len(shards) > MAX_SHARD_ROWS:
        print(f"and {len(shards) - MAX_SHARD_ROWS:,} more")


def _tokenizer(manifest: Manifest) -> Tokenizer | None:
    """Return the tokenizer, or None after a line with the reason; tokens can be shown without."""
    try:
        return tokenizer_from_spec(manifest.tokenizer)
    except UserError as error:
        print(f"\nno text and no documents, tokens as numbers only: {error}")
        return None


def _lengths(folder: Path, manifest: Manifest, tokenizer: Tokenizer | None) -> dict[str, Lengths]:
    """Return the document lengths by split; empty without an end-of-text token."""
    if tokenizer is None:
        return {}
    if tokenizer.eot_token is None:
        print(f"\nthe tokenizer {tokenizer.name} has no end-of-text token: documents are unknown")
        return {}
    with Progress(manifest.n_bytes(), done_bytes=0) as progress:
        found = {
            split: document_lengths(folder, manifest, split, tokenizer.eot_token, progress)
            for split in manifest.splits
        }
    return {split: lengths for split, lengths in found.items() if len(lengths)}


def print_peek(
    stream: TokenStream, split: str, tokenizer: Tokenizer | None, offset: int, length: int
) -> None:
    """Print the text of some tokens, or the tokens themselves without a tokenizer."""
    length = min(length, len(stream) - offset)
    tokens = stream.windows(np.array([offset]), length)[0]
    print(f"\n{split}, tokens {offset:,} to {offset + length - 1:,}:")
    print(visible(tokenizer.decode(tokens)) if tokenizer else " ".join(map(str, tokens)))


def visible(text: str) -> str:
    """Return the text with control characters escaped, so that they cannot control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
