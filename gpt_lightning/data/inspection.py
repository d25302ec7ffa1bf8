"""Whole reads of a dataset: comparison with its manifest, and lengths of its documents."""

from collections import Counter
from pathlib import Path

import numpy as np

from gpt_lightning.data.dataset import read_manifest
from gpt_lightning.data.formats import ShardError
from gpt_lightning.data.manifest import (
    CHECK_READ,
    Manifest,
    check_tokens,
    checked_shard,
    repair_hint,
    token_pieces,
    unlisted_files,
)
from gpt_lightning.data.progress import Progress
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained

UNREAD = " cannot be read: "
N_BINS = 60


def verify(folder: Path) -> None:
    """Read every byte of a dataset; compare digests with the manifest, tokens with the vocabulary.

    Memory is bounded by one piece of 4 MiB.

    Raises:
        UserError: A shard is damaged, missing or not in the manifest.
    """
    manifest = read_manifest(folder)
    n_shards = len(manifest.shards())
    with Progress(manifest.n_bytes(), done_bytes=0) as progress:
        faults = damage(folder, manifest, progress)
    print(f"read {progress.line()}")
    if faults:
        raise UserError(
            f"{folder}: {len(faults)} fault{'s' * (len(faults) > 1)} in {n_shards} shards: "
            f"{'; '.join(faults)}; {CHECK_READ if UNREAD in faults[0] else repair_hint(folder)}"
        )
    n_tokens = sum(shard.tokens for shard in manifest.shards())
    without = "" if all(shard.sha256 for shard in manifest.shards()) else ", which have no digests"
    print(
        f"{folder} is whole: {n_shards} shards{without}, {n_tokens:,} tokens, "
        f"all below the vocabulary of {manifest.vocab_size:,}"
    )


def damage(folder: Path, manifest: Manifest, progress: Progress) -> list[str]:
    """Return a line for every shard that is unreadable, damaged, missing, or not in the manifest.

    Unreadable shards come first: nothing is known of their content.
    """
    unread, faults = [], []
    for shard in manifest.shards():
        try:
            checked_shard(folder, shard, manifest.dtype, manifest.format)
            check_tokens(folder, shard, manifest, progress)
        except ShardError as fault:
            faults.append(f"{shard.file}: {fault}")
        except OSError as error:
            unread.append(f"{shard.file}{UNREAD}{error.strerror or error}")
    return [*unread, *faults] + [
        f"{name}: found this shard, which the manifest does not list"
        for name in unlisted_files(folder, manifest)
    ]


# ---- lengths -----------------------------------------------------------------------------------


class Lengths:
    """Exact lengths of documents in tokens, in bounded memory.

    Each length that occurs has a counter. n tokens hold at most sqrt(2 n) different lengths: 141
    thousand in ten billion tokens.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()  # length -> documents

    def add(self, lengths: np.ndarray) -> None:
        """Count documents by their lengths, (n,); a length of 0 is no document."""
        found, counts = np.unique(lengths[lengths > 0], return_counts=True)
        self._counts.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the lengths that occur, ascending, and their numbers of documents; int64, (n,)."""
        pairs = np.array(sorted(self._counts.items()), np.int64).reshape(-1, 2)
        return pairs[:, 0], pairs[:, 1]

    def __len__(self) -> int:
        return self._counts.total()

    def quantile(self, q: float) -> int:
        """Return the shortest length that a share q of the documents do not exceed."""
        lengths, counts = self.table()
        return int(lengths[np.searchsorted(np.cumsum(counts), q * len(self))])

    def mean(self) -> float:
        """Return the mean number of tokens a document."""
        lengths, counts = self.table()
        return float(lengths @ counts) / len(self)


def document_lengths(
    folder: Path, manifest: Manifest, split: str, eot_token: int, progress: Progress
) -> Lengths:
    """Count the documents of a split, which end-of-text tokens separate and do not belong to.

    The end-of-text token may come before a document, as in llm.c's and our shards, or after it, as
    in nanoGPT's. Shards and pieces are no borders.

    Raises:
        UserError: A shard cannot be read.
    """
    lengths = Lengths()
    begun = 0  # tokens of the unfinished document
    for shard in manifest.splits[split]:
        path = folder / shard.file
        try:
            with explained("read", path):
                for tokens in token_pieces(path, shard.tokens, manifest.dtype):
                    begun = _add_piece(lengths, tokens, eot_token, begun)
                    progress.add(tokens.nbytes, len(tokens))
        except ShardError as fault:
            raise UserError(f"{path}: {fault}; {repair_hint(folder)}") from fault
    lengths.add(np.array([begun]))
    return lengths


def _add_piece(lengths: Lengths, tokens: np.ndarray, eot_token: int, begun: int) -> int:
    """Count the documents that end in tokens, (n,); return the length of the unfinished one."""
    borders = np.flatnonzero(tokens == eot_token)
    if not len(borders):
        return begun + len(tokens)
    # the document before the first border began in earlier pieces, at -1 - begun
    lengths.add(np.diff(borders, prepend=-1 - begun) - 1)
    return len(tokens) - 1 - int(borders[-1])


def plot_lengths(path: Path, title: str, splits: dict[str, Lengths]) -> None:
    """Draw two histograms over document lengths: share of documents, and share of tokens.

    Args:
        path: Path of a .png file; its folder is made if need be.
        title: Title of the picture.
        splits: Name -> lengths, at least one document each.

    Raises:
        UserError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    longest = max(lengths.quantile(1.0) for lengths in splits.values())
    edges = np.unique(np.geomspace(1, longest + 1, N_BINS + 1).round())
    figure = Figure(figsize=(10.0, 7.0), dpi=120, layout="constrained")
    documents, tokens = figure.subplots(2, 1, sharex=True)
    for index, (split, counted) in enumerate(splits.items()):
        lengths, counts = counted.table()
        for axes, weights in ((documents, counts), (tokens, counts * lengths)):
            binned, _ = np.histogram(lengths, edges, weights=weights)
            share = 100 * binned / weights.sum()
            axes.stairs(share, edges, fill=True, alpha=0.4, color=f"C{index}")
        median = counted.quantile(0.5)
        label = f"{split}: {len(counted):,} documents, median {median:,} tokens"
        documents.axvline(median, color=f"C{index}", lw=1, label=label)
    documents.set(title=title, ylabel="documents (%)", xscale="log")
    documents.legend(fontsize=8)
    tokens.set(xlabel="tokens a document", ylabel="tokens (%)")
    for axes in (documents, tokens):
        axes.grid(alpha=0.3)
    with explained("write", path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png")
