"""SHA-256 of a file in a second file, `NAME.sha256`, and checks before a file is read.

The lines of a sharded checkpoint's files (shards.py) follow its own line.
"""

import contextlib
import functools
import os
import re
import stat
import sys
from collections.abc import Mapping
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, file_sha256, replacement, write_durable

SIDECAR = ".sha256"
SHARDS = "shards"  # folder beside checkpoints, with a folder for each sharded one
FIX = "check its permissions, or take another checkpoint"


def write_sidecar(path: Path, digest: str, shards: Mapping[str, str] | None = None) -> None:
    """Write the digests of a new file, of its shards, and of the file that it replaces.

    Args:
        path: File that is about to get its name.
        digest: SHA-256 of the new file.
        shards: SHA-256 of each file of its shards, by the path from the checkpoint's folder.

    Raises:
        OSError: The digests cannot be written.
    """
    known = [(digest, dict(shards or {}))]
    if path.exists():
        with contextlib.suppress(UserError):  # the list is damaged
            known += read_sidecar(path)[:1]
    with replacement(sidecar(path)) as temporary:
        lines = []
        for whole, parts in known:
            lines += [f"{whole}  {path.name}\n"]
            lines += [f"{part}  {name}\n" for name, part in parts.items()]
        write_durable(temporary, "".join(lines).encode())


def sidecar(path: Path) -> Path:
    """Return the path of a file's digest."""
    return path.with_name(path.name + SIDECAR)


def read_sidecar(path: Path) -> list[tuple[str, dict[str, str]]]:
    """Return the digests that a file may have, the newest first, each with those of its shards.

    The list is empty if there is no sidecar.

    Raises:
        UserError: The list cannot be read, is empty, or contains something else.
    """
    try:
        lines = sidecar(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise damaged_sidecar(path) from error
    found: list[tuple[str, dict[str, str]]] = []
    for line in lines:
        digest, _, name = line.partition(" ")
        part = re.fullmatch(rf" ({SHARDS}/[^/]+/[^/]+)", name)
        if not re.fullmatch("[0-9a-f]{64}", digest) or (part and not found):
            raise damaged_sidecar(path)
        if part:
            found[-1][1][part[1]] = digest
        else:
            found.append((digest, {}))
    if not found:
        raise damaged_sidecar(path)
    return found


def damaged_sidecar(path: Path) -> UserError:
    """Return the error for a damaged list of digests."""
    return UserError(
        f"{sidecar(path)} is empty, damaged or unreadable, so {path.name} cannot be checked: copy "
        "both files again, or take another checkpoint"
    )


def check_digest(path: Path, required: bool = True) -> bool:
    """Check that a file and its shards are, byte for byte, what was written.

    Args:
        path: File, with its digest in another file beside it.
        required: False accepts a file whose digest is missing.

    Returns:
        False if the digest is missing.

    Raises:
        UserError: A file differs from its digest, a file cannot be read, or the digest is missing
            or damaged.
    """
    check_regular(path)
    known = read_sidecar(path)
    if not known and not required:
        return False
    if not known:
        raise UserError(
            f"{path} has no digest in {sidecar(path).name}, so it cannot be checked: "
            "copy that file too, or take another checkpoint"
        )
    with explained("read", path, FIX):
        whole = file_sha256(path)
    expected = next((shards for digest, shards in known if digest == whole), None)
    if expected is None:
        raise damaged(path, known[0][0], whole)
    for name, digest in expected.items():
        file = path.resolve().parent / name
        with explained("read", file, FIX):
            found = file_sha256(file)
        if found != digest:
            raise damaged(file, digest, found)
    return True


def damaged(path: Path, expected: str, found: str) -> UserError:
    """Return the error for a file that differs from its digest."""
    return UserError(
        f"{path} is damaged: expected SHA-256 {expected}, found {found}; "
        "use an older checkpoint, as --resume auto does"
    )


@functools.cache
def warn_without_digest(path: Path) -> None:
    """Print, once for each file and on rank 0, that damage to the file cannot be detected."""
    if all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID", "LOCAL_RANK")):
        print(
            f"warning: {path} has no digest in {sidecar(path).name}: damage would go unnoticed",
            file=sys.stderr,
        )


def check_regular(path: Path) -> None:
    """Check that a path is a regular file: reading a pipe or a device may never end.

    Raises:
        UserError: The path does not exist, or is a folder, a pipe or a device.
    """
    with explained("read", path, FIX):
        mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if path.is_dir() else "a pipe" if path.is_fifo() else "a device"
        raise UserError(f"{path} is {kind}, not a checkpoint: give a file, or a run folder")
