"""The command `gpt-lightning data`: contents of a dataset, or a check of every byte."""

from pathlib import Path
from typing import Literal

import numpy as np
from jsonargparse.typing import NonNegativeInt

from gpt_lightning.commands.runs import print_table
from gpt_lightning.data.dataset import Lengths, document_lengths, load_manifest, verify
from gpt_lightning.data.manifest import Manifest
from gpt_lightning.data.shards import TokenStream
from gpt_lightning.data.tokenizers import Tokenizer, tokenizer_from_spec
from gpt_lightning.errors import UserError
from gpt_lightning.output import progress_bar
from gpt_lightning.parsing import pick

MAX_SHARD_ROWS = 20
# lengths are in tokens
SPLIT_ROW = ["split", "shards", "tokens", "documents", "mean", "median", "longest"]


def data(
    action: Literal["inspect", "verify"],
    folder: str,
    offset: int = 0,
    length: NonNegativeInt = 200,
    split: str | None = None,
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
    """
    path = Path(folder)
    if action == "verify":
        return verify(path)
    manifest = load_manifest(path)
    chosen = pick(split or next(iter(manifest.splits)), manifest.splits, f"{folder}: --split")
    n_tokens = manifest.tokens(chosen)
    if not 0 <= offset < n_tokens:
        raise UserError(
            f"--offset is {offset:,}, and the {chosen} split of {folder} has {n_tokens:,} tokens: "
            f"choose one from 0 to {n_tokens - 1:,}"
        )
    facts = {
        "folder": folder,
        "format": manifest.format,
        "tokenizer": f"{manifest.tokenizer.get('name')}, {manifest.vocab_size:,} tokens",
        "dtype": f"{manifest.dtype}, {manifest.n_bytes():,} bytes of tokens",
        "source": f"{manifest.source.name}, {manifest.source.bytes:,} bytes",
        "settings": ", ".join(f"{key} {value}" for key, value in manifest.settings.items()),
    }
    print("\n".join(f"{name:<10} {fact}".rstrip() for name, fact in facts.items()))
    try:
        tokenizer = tokenizer_from_spec(manifest.tokenizer)
    except UserError as error:
        tokenizer = None
        print(f"\nno text and no documents, tokens as numbers only: {error}")
    print_tables(manifest, lengths_of(path, manifest, tokenizer))
    if length:
        length = min(length, n_tokens - offset)
        tokens = TokenStream(path, manifest, chosen).windows(np.array([offset]), length)[0]
        print(f"\n{chosen}, tokens {offset:,} to {offset + length - 1:,}:")
        print(visible(tokenizer.decode(tokens)) if tokenizer else " ".join(map(str, tokens)))


def lengths_of(folder: Path, manifest: Manifest, tokenizer: Tokenizer | None) -> dict[str, Lengths]:
    """Return the document lengths by split; empty without an end-of-text token."""
    if not tokenizer:
        return {}
    if tokenizer.eot_token is None:
        print(f"\nthe tokenizer {tokenizer.name} has no end-of-text token: documents are unknown")
        return {}
    with progress_bar(manifest.n_bytes()) as bar:
        found = {
            split: document_lengths(folder, manifest, split, tokenizer.eot_token, bar.update)
            for split in manifest.splits
        }
    return {split: lengths for split, lengths in found.items() if lengths}


def print_tables(manifest: Manifest, lengths: dict[str, Lengths]) -> None:
    """Print a row for each split, with its documents if they are known, and for twenty shards."""
    rows = [SPLIT_ROW]
    for split, shards in manifest.splits.items():
        documents = [""] * 4
        if found := lengths.get(split):
            documents = [f"{found.total():,}", f"{found.mean():,.1f}", f"{found.median():,}"]
            documents.append(f"{max(found):,}")
        rows.append([split, f"{len(shards):,}", f"{manifest.tokens(split):,}", *documents])
    print()
    print_table(rows)
    files = [(each.file, f"{each.tokens:,}", each.sha256 or "none") for each in manifest.shards()]
    print()
    print_table([("file", "tokens", "SHA-256"), *files[:MAX_SHARD_ROWS]])
    if (rest := len(files) - MAX_SHARD_ROWS) > 0:
        print(f"and {rest:,} more")


def visible(text: str) -> str:
    """Return the text with control characters escaped, so that they cannot control a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)
