"""Datasets by address, local or behind a URL: open, verify, and measure their documents."""

import shlex
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from gpt_lightning.data.formats import FORMATS
from gpt_lightning.data.manifest import (
    CHECK_READ,
    MANIFEST,
    Manifest,
    Shard,
    TextOrigin,
    detect_dataset,
    repair_hint,
)
from gpt_lightning.data.shards import (
    SCAN_BYTES,
    OnBytes,
    TokenStream,
    check_shard,
    open_shard,
    shard_errors,
    token_pieces,
    write_stream,
)
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import check_regular, explained
from gpt_lightning.output import progress_bar


class TokenDataset:
    """Shards of tokens with a manifest, local or behind a URL.

    Args:
        address: Folder, its name under data_dir, or a URL for fsspec (s3://, gs://, hf://,
            https://, file://).
        data_dir: Folder of prepared datasets; shards from a URL are kept in its folder cache/.
        patience_s: Time to wait for a shard of a URL in an outage.

    Attributes:
        tokenizer: Value of --tokenizer with which `prepare` makes the same tokens.

    Raises:
        UserError: There is no dataset, or it is damaged.
    """

    def __init__(self, address: str, data_dir: Path, patience_s: float = 600.0):
        self.address = address
        if is_remote(address):
            # a local folder does not need them
            from gpt_lightning.data.streaming import RemoteStream, read_remote_manifest

            url = address.rstrip("/")
            cache = data_dir / "cache"
            self.manifest = read_remote_manifest(url)
            self.tokenizer = str(self.manifest.tokenizer.get("name"))
            self._open: Callable[[str], TokenStream] = partial(
                RemoteStream, url, cache, patience_s, self.manifest
            )
        else:
            path = Path(address.removeprefix("file://"))
            folder = data_dir / path if path.name == address and not path.exists() else path
            self.manifest = load_manifest(folder)
            self.tokenizer = shlex.quote(str(folder))
            self._open = partial(TokenStream, folder, self.manifest)

    def stream(
        self, split: str, block_size: int, option: str = "--data.dataset DIR"
    ) -> TokenStream:
        """Return the tokens of a split; `option` names a dataset in the command, for an error.

        Raises:
            UserError: There is no such split, or it is shorter than a window.
        """
        if split not in self.manifest.splits:
            raise UserError(
                f"{self.address} has no {split} split, only {', '.join(self.manifest.splits)}: "
                "make a dataset with one, `gpt-lightning prepare SOURCE "
                f"--tokenizer {self.tokenizer} --{split}_fraction 0.1 --out DIR`, and give it as "
                f"{option}"
            )
        stream = self._open(split)
        if len(stream) < block_size + 1:
            raise UserError(
                f"the {split} split of {self.address} has {len(stream):,} tokens, fewer than a "
                f"window of block_size + 1 = {block_size + 1:,}: "
                "lower model.config.block_size or take more text"
            )
        return stream


def is_remote(address: str) -> bool:
    """Return whether a dataset's address is a URL to fetch from (file:// is a folder)."""
    return "://" in address and not address.startswith("file://")


def read_manifest(folder: Path) -> Manifest:
    """Return the contents of manifest.json, or a manifest made from another program's files.

    Raises:
        UserError: There is no dataset, or its manifest is broken.
    """
    path = folder / MANIFEST
    if ":/" in str(folder) and not folder.exists():  # Path makes one slash of two
        typed = str(folder).replace(":/", "://", 1)
        raise UserError(f"{typed} is an address: copy the dataset to a folder, and give its path")
    with explained("read", path, "check its permissions"):
        if path.exists():
            check_regular(path, repair_hint(folder))
            return Manifest.parse(path.read_bytes(), str(path))
    return detect_dataset(folder)


def load_manifest(folder: Path) -> Manifest:
    """Read and check a dataset: header, size and count of every shard, and no unlisted shard.

    Up to 1 GiB every token is checked, so that one outside the vocabulary is found here and not in
    the middle of training. In larger datasets `gpt-lightning data verify` finds it.

    Raises:
        UserError: There is no manifest, it is broken, or shards differ from it. The message names
            the file, what was expected, what was found and the command that repairs it.
    """
    manifest = read_manifest(folder)
    is_small = manifest.n_bytes() <= SCAN_BYTES
    check: Callable[[Path, Shard, Manifest], object] = check_shard if is_small else open_shard
    for shard in manifest.shards():
        check(folder, shard, manifest)
    for name in unlisted(folder, manifest):
        raise UserError(
            f"{folder / name}: expected {len(manifest.shards())} shards, found this one, which the "
            f"manifest does not list; remove it, or {repair_hint(folder)}"
        )
    return manifest


def unlisted(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names of files that look like shards of a dataset and are not in its manifest."""
    suffix = Path(FORMATS[manifest.format].name).suffix
    listed = {shard.file for shard in manifest.shards()}
    return sorted({path.name for path in folder.glob(f"*{suffix}")} - listed)


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
    dtype = token_dtype(vocab_size)
    if not (folder / MANIFEST).exists():
        folder.mkdir(parents=True, exist_ok=True)
        tokens = np.random.default_rng(0).integers(vocab_size, size=n_tokens)
        shard = write_stream(folder / "train_00000.npy", [tokens], dtype)
        source, settings = TextOrigin("random tokens", 0, ""), {"n_tokens": n_tokens}
        tokenizer, splits = {"name": "none"}, {"train": (shard,)}
        Manifest(tokenizer, vocab_size, dtype.name, source, settings, {**splits}).save(folder)
    return folder


# ---- every byte --------------------------------------------------------------------------------


def verify(folder: Path) -> None:
    """Print that every byte of a dataset is what was prepared; errors as `check_whole`."""
    manifest = check_whole(folder)
    without = "" if all(shard.sha256 for shard in manifest.shards()) else ", which have no digests"
    print(
        f"{folder} is whole: {len(manifest.shards())} shards{without}, "
        f"{sum(map(manifest.tokens, manifest.splits)):,} tokens, "
        f"all below the vocabulary of {manifest.vocab_size:,}"
    )


def check_whole(folder: Path) -> Manifest:
    """Read every byte of a dataset; compare digests with the manifest, tokens with the vocabulary.

    Memory is bounded by one piece of 4 MiB.

    Raises:
        UserError: A shard is unreadable, damaged, missing or not in the manifest.
    """
    manifest, faults, fix = read_manifest(folder), [], repair_hint(folder)
    shards = manifest.shards()
    with progress_bar(manifest.n_bytes()) as bar:
        for shard in shards:
            try:
                check_shard(folder, shard, manifest, bar.update)
            except UserError as error:
                faults.append(f"{shard.file}: {error.__cause__}")
                if isinstance(error.__cause__, OSError):  # nothing is known of its content
                    fix = CHECK_READ
    faults += [
        f"{name}: the manifest does not list this shard" for name in unlisted(folder, manifest)
    ]
    if faults:
        raise UserError(
            f"{folder}: {len(faults)} fault{'s' * (len(faults) > 1)} in {len(shards)} shards: "
            f"{'; '.join(faults)}; {fix}"
        )
    return manifest


# ---- lengths of documents ------------------------------------------------------------------------


class Lengths(Counter[int]):
    """Number of documents of each length in tokens, in bounded memory.

    n tokens hold at most sqrt(2 n) different lengths: 141 thousand in ten billion tokens.
    """

    def mean(self) -> float:
        """Return the mean number of tokens a document."""
        return sum(length * count for length, count in self.items()) / self.total()

    def median(self) -> int:
        """Return the shortest length that half of the documents do not exceed."""
        lengths = sorted(self)
        ends = np.cumsum([self[length] for length in lengths])
        return lengths[np.searchsorted(ends, self.total() / 2)]


def document_lengths(
    folder: Path, manifest: Manifest, split: str, eot_token: int, on_bytes: OnBytes
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
        with shard_errors(folder, shard):
            for tokens in token_pieces(folder, shard, manifest.dtype):
                borders = np.flatnonzero(tokens == eot_token)
                if len(borders):
                    # the document before the first border began in earlier pieces, at -1 - begun
                    found = np.diff(borders, prepend=-1 - begun) - 1
                    lengths.update(found[found > 0].tolist())
                    begun = -1 - int(borders[-1])
                begun += len(tokens)
                on_bytes(tokens.nbytes)
    lengths.update([begun] if begun else [])
    return lengths
