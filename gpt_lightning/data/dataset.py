"""Datasets by address: a local folder or a URL."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gpt_lightning.data.formats import ShardError
from gpt_lightning.data.manifest import (
    CHECK_READ,
    MANIFEST,
    SCAN_BYTES,
    Manifest,
    TextOrigin,
    check_tokens,
    open_shard,
    repair_hint,
    unlisted_files,
)
from gpt_lightning.data.shards import TokenStream, write_shard
from gpt_lightning.data.tokenizers import token_dtype
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained

if TYPE_CHECKING:
    from gpt_lightning.data.streaming import RemoteShards


class TokenDataset:
    """Shards of tokens with a manifest, local or behind a URL.

    Args:
        address: Folder, its name under data_dir, or a URL for fsspec (s3://, gs://, hf://,
            https://, file://).
        data_dir: Folder of prepared datasets; shards from a URL are kept in its folder cache/.
        cache_limit_gb: Size limit of the shards kept from URLs, in 1e9 bytes.
        streams: Number of URLs that are read together.

    Raises:
        UserError: There is no dataset, or it is damaged.
    """

    def __init__(
        self, address: str, data_dir: Path, cache_limit_gb: float, streams: int = 1
    ) -> None:
        self.address = address
        self._remote: RemoteShards | None = None
        if is_remote(address):
            from gpt_lightning.data import streaming  # needs fsspec, a local folder does not

            limit = int(cache_limit_gb * 1e9)
            self._remote = streaming.RemoteShards(address, data_dir / "cache", limit, streams)
            self.manifest = self._remote.manifest
        else:
            self.folder = local_folder(address, data_dir)
            self.manifest = load_manifest(self.folder)

    def stream(self, split: str, block_size: int) -> TokenStream:
        """Return the tokens of a split.

        Raises:
            UserError: There is no such split, or it is shorter than a window.
        """
        if split not in self.manifest.splits:
            raise UserError(
                f"{self.address} has no {split} split, only {', '.join(self.manifest.splits)}: "
                "make a dataset with one, "
                f"`gpt-lightning prepare SOURCE --{split}_fraction 0.1 --out DIR`, and give it as "
                "--data.dataset DIR"
            )
        if self._remote is None:
            stream = TokenStream(self.folder, self.manifest, split)
        else:
            stream = self._remote.stream(split)
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


def local_folder(address: str, data_dir: Path) -> Path:
    """Return the folder of an address that is no URL."""
    path = Path(address.removeprefix("file://"))
    return data_dir / path if path.name == address and not path.exists() else path


def read_manifest(folder: Path) -> Manifest:
    """Return the contents of manifest.json, or a manifest made from another program's files.

    Raises:
        UserError: There is no dataset, or its manifest is broken.
    """
    path = folder / MANIFEST
    if ":/" in str(folder) and not folder.exists():  # Path makes one slash of two
        raise UserError(f"{folder} is an address: copy the dataset to a folder, and give its path")
    with explained("read", path, "check its permissions"):
        if path.exists():
            return Manifest.parse(path.read_bytes(), str(path))
    from gpt_lightning.data.external import detect_dataset  # not for our own folders

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
    for shard in manifest.shards():
        open_shard(folder, shard, manifest.dtype, manifest.format)
    unlisted = unlisted_files(folder, manifest)
    if unlisted:
        raise UserError(
            f"{folder / unlisted[0]}: expected {len(manifest.shards())} shards, found this one, "
            f"which the manifest does not list; remove it, or {repair_hint(folder)}"
        )
    for shard in manifest.shards() if manifest.n_bytes() <= SCAN_BYTES else []:
        path = folder / shard.file
        try:
            with explained("read", path, CHECK_READ):
                check_tokens(folder, shard, manifest)
        except ShardError as fault:
            raise UserError(f"{path}: {fault}; {repair_hint(folder)}") from fault
    return manifest


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
