"""How long the documents of a dataset are."""

from pathlib import Path

import numpy as np

from gpt_lightning.data.formats import ShardError
from gpt_lightning.data.manifest import Manifest, repair_hint
from gpt_lightning.data.progress import Progress
from gpt_lightning.data.scan import token_pieces
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained

COUNTED = 2**20
N_BINS = 60


class Lengths:
    """Lengths of documents in tokens, all of them exactly and in bounded memory.

    Up to 2^20 tokens a counter a length, 8 MiB in all; longer documents one by one, which are at
    most one for each 2^20 tokens read.
    """

    def __init__(self) -> None:
        self._counts = np.zeros(COUNTED, np.int64)  # [n]: documents of n tokens
        self._long: list[int] = []

    def add(self, lengths: np.ndarray) -> None:
        """Counts documents, (n,) of their lengths; those of no token are none."""
        lengths = lengths[lengths > 0]
        short = lengths[lengths < COUNTED]
        counts = np.bincount(short)
        self._counts[: len(counts)] += counts
        self._long += lengths[lengths >= COUNTED].tolist()

    def table(self) -> tuple[np.ndarray, np.ndarray]:
        """The lengths that occur, ascending, and how many documents have each; int64, (n,) both."""
        short = np.flatnonzero(self._counts)
        longer, counts = np.unique(np.array(self._long, np.int64), return_counts=True)
        return np.concatenate([short, longer]), np.concatenate([self._counts[short], counts])

    def __len__(self) -> int:
        return int(self._counts.sum()) + len(self._long)

    def quantile(self, q: float) -> int:
        """The shortest length that at least a share q of the documents do not exceed."""
        lengths, counts = self.table()
        return int(lengths[np.searchsorted(np.cumsum(counts), q * len(self))])

    def mean(self) -> float:
        """Tokens a document."""
        lengths, counts = self.table()
        return float(lengths @ counts) / len(self)


def document_lengths(
    folder: Path, manifest: Manifest, split: str, eot_token: int, progress: Progress
) -> Lengths:
    """The documents of a split: what stands between end-of-text tokens, which do not count.

    It makes no difference whether these stand before the documents, as llm.c's and ours do, or
    after them, as nanoGPT's do. Shards and pieces are no borders.

    Raises:
        UserError: a shard cannot be read.
    """
    lengths = Lengths()
    begun = 0  # tokens of the document that is being read
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
    """Counts the documents that end in tokens, (n,); returns the length of the unfinished one."""
    borders = np.flatnonzero(tokens == eot_token)
    if not len(borders):
        return begun + len(tokens)
    # before the first border lies also what earlier pieces began: its place is at -1 - begun
    lengths.add(np.diff(borders, prepend=-1 - begun) - 1)
    return len(tokens) - 1 - int(borders[-1])


def plot_lengths(path: Path, title: str, splits: dict[str, Lengths]) -> None:
    """A histogram of document lengths: below, what share of the tokens the documents hold.

    Args:
        path: A .png file; its folder is made if need be.
        title: Of the picture.
        splits: Name -> lengths, at least one document each.

    Raises:
        UserError: the file cannot be written.
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
