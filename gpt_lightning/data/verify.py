"""`gpt-lightning verify`: every byte of a dataset against its manifest."""

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_lightning.data.dataset import read_manifest
from gpt_lightning.errors import UserError

if TYPE_CHECKING:
    from gpt_lightning.data.manifest import Manifest, Shard
    from gpt_lightning.data.progress import Progress


def verify(folder: str) -> None:
    """Read every byte of a dataset: digests against the manifest, tokens against the vocabulary.

    Memory is bounded by one piece of 4 MiB, whatever the size of the dataset.

    Args:
        folder: A dataset that `gpt-lightning prepare` or another program made.
    """
    from gpt_lightning.data.manifest import repair_hint
    from gpt_lightning.data.progress import Progress

    path = Path(folder)
    manifest = read_manifest(path)
    n_shards = len(manifest.shards())
    with Progress(manifest.n_bytes(), done_bytes=0) as progress:
        faults = damage(path, manifest, progress)
    print(f"read {progress.line()}")
    if faults:
        raise UserError(
            f"{folder}: {len(faults)} fault{'s' * (len(faults) > 1)} in {n_shards} shards: "
            f"{'; '.join(faults)}; {repair_hint(path)}"
        )
    without = "" if all(shard.sha256 for shard in manifest.shards()) else ", which have no digests"
    print(
        f"{folder} is whole: {n_shards} shards{without}, {tokens_of(manifest):,} tokens, "
        f"all below the vocabulary of {manifest.vocab_size:,}"
    )


def tokens_of(manifest: "Manifest") -> int:
    """Tokens of all splits."""
    return sum(shard.tokens for shard in manifest.shards())


def damage(folder: Path, manifest: "Manifest", progress: "Progress") -> list[str]:
    """A line for every shard that is damaged, missing, or not listed in the manifest."""
    from gpt_lightning.data.formats import ShardError
    from gpt_lightning.data.manifest import unlisted_files

    faults = []
    for shard in manifest.shards():
        try:
            check_shard(folder, shard, manifest, progress)
        except ShardError as fault:
            faults.append(f"{shard.file}: {fault}")
        except OSError as error:
            faults.append(f"{shard.file}: {error.strerror or error}")
    return faults + [
        f"{name}: expected only shards that the manifest lists, found this one besides"
        for name in unlisted_files(folder, manifest)
    ]


def check_shard(folder: Path, shard: "Shard", manifest: "Manifest", progress: "Progress") -> None:
    """Reads a shard once: its header, digest and tokens.

    Raises:
        OSError: it cannot be read.
        ShardError: what was expected and what was found.
    """
    import numpy as np

    from gpt_lightning.data.formats import ShardError
    from gpt_lightning.data.manifest import checked_shard
    from gpt_lightning.data.scan import out_of_vocab, pieces

    tokens = checked_shard(folder, shard, manifest.dtype, manifest.format)
    stream = pieces(folder / shard.file, tokens.nbytes)
    digest = hashlib.sha256(next(stream))
    position, wrong = 0, None
    for piece in stream:
        digest.update(piece)
        part = np.frombuffer(piece, tokens.dtype)
        wrong = wrong or out_of_vocab(part, manifest.vocab_size, position)
        position += len(part)
        progress.add(len(piece), len(part))
    if wrong:
        raise ShardError(wrong)
    if shard.sha256 and digest.hexdigest() != shard.sha256:
        raise ShardError(f"expected SHA-256 {shard.sha256}, found {digest.hexdigest()}")
