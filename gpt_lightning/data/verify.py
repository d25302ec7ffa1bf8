"""Comparison of every byte of a dataset with its manifest: `gpt-lightning data verify`."""

from pathlib import Path

from gpt_lightning.data.dataset import read_manifest
from gpt_lightning.data.formats import ShardError
from gpt_lightning.data.manifest import (
    CHECK_READ,
    Manifest,
    check_tokens,
    checked_shard,
    repair_hint,
    unlisted_files,
)
from gpt_lightning.data.progress import Progress
from gpt_lightning.errors import UserError

UNREAD = " cannot be read: "


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
