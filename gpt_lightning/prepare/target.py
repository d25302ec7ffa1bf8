"""Output of prepare: the present contents of a folder, the lock on it, the delivery."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gpt_lightning.data.dataset import check_whole, load_manifest
from gpt_lightning.data.formats import SHARD_FILE
from gpt_lightning.data.manifest import MANIFEST, Manifest, prepare_command
from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields, explained, locked, move_into_place, temporary_path

# Not in the manifest, because it holds the inputs' time stamps: equal texts give equal manifests,
# wherever and whenever they were copied.
INPUTS = ".inputs.json"
OTHER_INPUTS = "other inputs (by their names, sizes and times)"
Made = tuple[Manifest, bool]  # dataset, and whether it was made now


@dataclass(frozen=True)
class Target:
    """Output folder of a preparation.

    Attributes:
        out: Folder of the dataset.
        overwrite: True to replace another dataset.
        wanted: Facts that decide the dataset's bytes, as they stand in manifests, and a digest of
            the inputs.
        has_contents: Function of an existing dataset's facts about its inputs, which returns
            whether these are the contents of the present inputs. It is called if their digests
            alone differ.
        source: SOURCE of the command, for messages.
        typed: Options of the command that `wanted` has in another form, for messages.
    """

    out: Path
    overwrite: bool = False
    wanted: Fields = field(default_factory=dict)
    has_contents: Callable[[dict[str, str]], bool] = lambda facts: False
    source: str = "SOURCE"
    typed: dict[str, str] = field(default_factory=dict)

    def existing(self) -> Manifest | None:
        """Return the dataset in the folder if it is the wanted one, None if it may be written.

        Raises:
            UserError: The folder holds something else, or a damaged dataset.
        """
        names = self._names()
        if not names:
            return None
        if MANIFEST not in names:
            found = f"{min(names)} but no {MANIFEST}"
            raise UserError(f"{self.out} holds {found}: choose another --out")
        try:
            manifest = load_manifest(self.out)
            differences = self._differences(manifest, names)
            if self.overwrite and not differences:
                check_whole(self.out)  # what is damaged is made again
        except UserError:
            if not self.overwrite:
                raise
            differences = ["damage"]
        if not differences:
            return manifest
        if not self.overwrite:
            again = prepare_command(self.source, self.wanted | self.typed, str(self.out))
            runs = "runs of the same tokens then resume with --data.allow_changes true"
            found = f"{self.out} was prepared with {'; '.join(differences)}"
            raise UserError(f"{found}: {again} replaces it, another folder keeps it; {runs}")
        _check_deletable(self.out, names)
        return None

    def _differences(self, manifest: Manifest, names: set[str]) -> list[str]:
        missing = {shard.file for shard in manifest.shards()} - names
        if missing:
            return [f"{min(missing)} missing"]
        try:
            inputs = dict(json.loads((self.out / INPUTS).read_bytes()))
        except (OSError, ValueError, TypeError):  # it is missing or damaged
            inputs = {}
        found = {"SHA-256 of the text": manifest.source.sha256, "format": manifest.format}
        found |= manifest.settings | {"inputs": inputs.get("inputs")}
        differences = [
            OTHER_INPUTS if key == "inputs" else f"{key} {found.get(key)}, not {value}"
            for key, value in self.wanted.items()
            if found.get(key) != value
        ]
        touched = differences == [OTHER_INPUTS] and not self.overwrite and inputs
        if touched and self.has_contents(inputs):
            return []
        return differences

    def make_once(self, make: Callable[[], Made]) -> Made:
        """Return the dataset in the folder, and whether it was made now.

        Args:
            make: Function that is called under the lock if there is no dataset; it delivers one.

        Raises:
            UserError: The folder holds something else, or the disk is full.
        """
        there = self.existing()
        out = self.out.resolve()
        lock = out.with_name(f".{out.name}.lock")
        waiting = f"{out} is being prepared by another process: waiting for it"
        if not there or lock.exists():  # or one was killed at its end
            on_wait = partial(print, waiting, flush=True)
            with explained("write", self.out), locked(lock, on_wait):
                temporary_path(out)  # deletes what killed processes have left
                there = self.existing()  # the process that held the lock may have made it
                if not there:
                    return make()
        return there, False

    def deliver(self, folder: Path, manifest: Manifest) -> Made:
        """Write the manifest into `folder`/new, and move that to `out`.

        Returns:
            The manifest, and True; or, if another process was faster on a file system without
            locks, the manifest of its dataset, which must equal ours, and False.
        """
        manifest.save(folder / "new")
        if not move_into_place(folder, self.out.resolve(), self.overwrite):
            there = replace(self, overwrite=False).existing()
            assert there
            return there, False
        return manifest, True

    def _names(self) -> set[str]:
        """Return the names in the folder."""
        if os.path.lexists(self.out) and not self.out.is_dir():
            raise UserError(f"{self.out} is not a folder: choose another --out")
        return {path.name for path in self.out.iterdir()} if self.out.exists() else set()


def _check_deletable(out: Path, names: set[str]) -> None:
    """Raise if the folder holds files that `prepare` did not write and must not delete."""
    for name in sorted(names - {MANIFEST, INPUTS}):
        if not SHARD_FILE.fullmatch(name):
            fix = "move it away, or choose another --out"
            raise UserError(f"{out}/{name} is not part of a dataset and would be deleted: {fix}")
