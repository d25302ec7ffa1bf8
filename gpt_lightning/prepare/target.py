"""Output folder of prepare: its present contents, and the lock on it."""

import contextlib
import glob
import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.formats import SHARD_FILE
from gpt_lightning.data.manifest import MANIFEST, Manifest
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, locked, move_into_place, workspace

# Not in the manifest, because it holds the inputs' time stamps: equal texts give equal manifests,
# wherever and whenever they were copied.
INPUTS = ".inputs.json"


@dataclass(frozen=True)
class Target:
    """Output folder of a preparation.

    Attributes:
        out: Folder of the dataset.
        wanted: Facts that decide its bytes, with the keys of recorded().
        overwrite: True to replace another dataset.
    """

    out: Path
    wanted: dict[str, Any]
    overwrite: bool

    def existing(self) -> Manifest | None:
        """Return the dataset in `out` if it is the wanted one, None if it may be written there.

        Raises:
            UserError: The folder holds something else, or a damaged dataset.
        """
        out = self.out
        if not out.exists():
            return None
        if not out.is_dir():
            raise UserError(f"{out} is a file: choose another --out")
        entries = sorted(path.name for path in out.iterdir())
        if not entries:
            return None
        if MANIFEST not in entries:
            raise UserError(f"{out} holds {entries[0]} but no {MANIFEST}: choose another --out")
        try:
            manifest = load_manifest(out)
        except UserError:
            if not self.overwrite:
                raise
            differences = ["damage"]
        else:
            differences = _differences(recorded(out, manifest), self.wanted)
        if not differences:
            return manifest
        if not self.overwrite:
            raise UserError(
                f"{out} was prepared with {'; '.join(differences)}: "
                f"replace it with `gpt-lightning prepare SOURCE --out {out} --overwrite true`, "
                "or choose another folder"
            )
        _check_deletable(out, entries)
        return None

    def make_once(self, make: Callable[[], tuple[Manifest, bool]]) -> tuple[Manifest, bool]:
        """Return the dataset in `out`, and whether it was made now.

        Args:
            make: Function that is called under the lock if there is no dataset; it publishes one.

        Raises:
            UserError: The folder holds something else, or the disk is full.
        """
        there = self.existing()
        if there is None:
            with exclusive_lock(self.out.resolve()), explained("write", self.out):
                there = self.existing()  # the process that held the lock may have made it
                if there is None:
                    return make()
        sweep_lock(self.out)
        return there, False

    def publish(self, write: Callable[[Path], Manifest]) -> tuple[Manifest, bool]:
        """Write a dataset into a temporary folder, and move it to `out`.

        Args:
            write: Function that makes the folder and writes the dataset into it.

        Returns:
            The manifest, and True; or, if another process was faster on a file system without
            locks, the manifest of its dataset, which must equal ours, and False.
        """
        with workspace(self.out.resolve()) as folder:
            manifest = write(folder / "new")
            if move_into_place(folder, self.out.resolve(), self.overwrite):
                return manifest, True
        there = replace(self, overwrite=False).existing()
        assert there is not None
        return there, False


def recorded(out: Path, manifest: Manifest) -> dict[str, Any]:
    """Return the facts that decided the bytes of a dataset, from its files."""
    try:
        inputs = json.loads((out / INPUTS).read_bytes())["inputs"]
    except (OSError, ValueError, LookupError, TypeError):  # None differs from every fingerprint
        inputs = None
    found = {"SHA-256 of the text": manifest.source.sha256, "format": manifest.format}
    return {**found, "inputs": inputs, **manifest.settings}


def save_inputs(folder: Path, fingerprint: str) -> None:
    """Write the fingerprint of the inputs, by which a later run recognizes them."""
    (folder / INPUTS).write_text(json.dumps({"inputs": fingerprint}) + "\n")


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [
        "other inputs (by their names, sizes and times)"
        if key == "inputs"
        else f"{key} {found.get(key)}, not {value}"
        for key, value in wanted.items()
        if found.get(key) != value
    ]


def _check_deletable(out: Path, entries: list[str]) -> None:
    """Raise if the folder holds files that `prepare` did not write and must not delete."""
    others = [name for name in entries if name not in (MANIFEST, INPUTS)]
    foreign = [name for name in others if not SHARD_FILE.fullmatch(name)]
    if foreign:
        raise UserError(
            f"{out / foreign[0]} is not part of a dataset and would be deleted with {out}: "
            "move it away, or choose another --out"
        )


# ---- the lock ------------------------------------------------------------------------------------


@contextlib.contextmanager
def exclusive_lock(out: Path) -> Iterator[None]:
    """Let one process at a time work on `out`; the others print that they wait, and wait.

    Raises:
        UserError: The folder cannot be written.
    """

    def waiting() -> None:
        print(f"{out} is being prepared by another process: waiting for it", flush=True)

    with contextlib.ExitStack() as stack:
        with explained("write", out):
            out.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(_lock_of(out), waiting))
        yield


def sweep_lock(out: Path) -> None:
    """Delete the lock file of a process that was killed."""

    def held() -> None:
        raise BlockingIOError

    path = _lock_of(out.resolve())
    # A file that is held, or on a read-only disk, stays.
    with contextlib.suppress(OSError):
        if path.exists():
            with locked(path, held):
                pass


def _lock_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.lock")


def delete_parts(parts: Path) -> None:
    """Delete a folder of parts; rename it first, so that no half of it is taken for a whole."""
    with contextlib.suppress(FileNotFoundError):
        os.rename(parts, parts.with_name(f"{parts.name}.old.{os.getpid()}"))
    delete_renamed(parts)


def delete_renamed(parts: Path) -> None:
    """Delete folders of parts that were renamed, also by a process that was then killed."""
    for dying in parts.parent.glob(f"{glob.escape(parts.name)}.old.*"):
        shutil.rmtree(dying, ignore_errors=True)
