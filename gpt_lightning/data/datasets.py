"""Datasets by address: a folder of this machine, or a URL."""

import hashlib
from pathlib import Path

from gpt_lightning.data.remote import RemoteStream, ShardCache, is_remote
from gpt_lightning.data.shards import Manifest, TokenStream
from gpt_lightning.errors import UserError


class TokenDataset:
    """Shards of tokens with a manifest, wherever they lie.

    Args:
        address: A folder, its name under data_dir, or a URL that fsspec knows (s3://, gs://, hf://,
            https://, file://).
        data_dir: Where prepared datasets lie; shards from a URL are kept in its folder cache/.
        cache_limit_gb: Of the shards kept from a URL, in 1e9 bytes.

    Raises:
        UserError: there is no dataset, or a damaged one.
    """

    def __init__(self, address: str, data_dir: Path, cache_limit_gb: float) -> None:
        self.address = address
        self._cache: ShardCache | None = None
        if is_remote(address):
            name = f"{hashlib.sha256(address.encode()).hexdigest()[:12]}"
            limit = int(cache_limit_gb * 1e9)
            self._cache = ShardCache(address, data_dir / "cache" / name, limit)
            self.manifest = self._cache.manifest()
        else:
            self.folder = local_folder(address, data_dir)
            self.manifest = Manifest.load(self.folder)

    def stream(self, split: str, block_size: int) -> TokenStream:
        """The tokens of a split.

        Raises:
            UserError: there is no such split, or it is shorter than a window.
        """
        if split not in self.manifest.splits:
            raise UserError(
                f"{self.address} has no {split} split, only {', '.join(self.manifest.splits)}: "
                f"prepare it again with --{split}_fraction 0.1"
            )
        stream = (
            TokenStream(self.folder, self.manifest, split)
            if self._cache is None
            else RemoteStream(self._cache, self.manifest, split)
        )
        if len(stream) < block_size + 1:
            raise UserError(
                f"the {split} split of {self.address} has {len(stream):,} tokens, fewer than a "
                f"window of block_size + 1 = {block_size + 1:,}: "
                "lower model.config.block_size or take more text"
            )
        return stream


def local_folder(address: str, data_dir: Path) -> Path:
    """The folder of an address that is no URL."""
    path = Path(address.removeprefix("file://"))
    return data_dir / path if path.name == address and not path.exists() else path
