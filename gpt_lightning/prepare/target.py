"""Output of prepare: the present contents of a folder or address, the lock on it, the delivery."""

import hashlib
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt_lightning.data.dataset import check_whole, load_manifest
from gpt_lightning.data.formats import SHARD_FILE
from gpt_lightning.data.manifest import MANIFEST, Manifest, prepare_command
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, locked, move_into_place, temporary_path, write_atomic
from gpt_lightning.remote import files as remote

# Not in the manifest, because it holds the inputs' time stamps: equal texts give equal manifests,
# wherever and whenever they were copied.
INPUTS = ".inputs.json"
OTHER_INPUTS = "other inputs (by their names, sizes and times)"
Made = tuple[Manifest, bool]  # dataset, and whether it was made now
UPLOADS = 4  # files that are uploaded at a time


@dataclass(frozen=True)
class Target:
    """Output of a preparation: a folder, or an address of fsspec.

    Attributes:
        out: Folder of the dataset; of an address, the lock and unfinished work are beside it.
        overwrite: True to replace another dataset.
        address: URL of the dataset; "" for a folder.
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
    address: str = ""
    wanted: dict[str, Any] = field(default_factory=dict)
    has_contents: Callable[[dict[str, str]], bool] = lambda facts: False
    source: str = "SOURCE"
    typed: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Path or address, for messages."""
        return self.address or str(self.out)

    def existing(self) -> Manifest | None:
        """Return the dataset at the target if it is the wanted one, None if it may be written.

        Raises:
            UserError: The folder holds something else, or a damaged dataset.
        """
        entries = self._entries()
        if not entries:
            return None
        if MANIFEST not in entries:
            if not self.address or not (self._begun.exists() or self.overwrite):
                found = f"{min(entries)} but no {MANIFEST}"
                raise UserError(f"{self.name} holds {found}: choose another --out")
            _check_deletable(self.name, entries)
            return None
        try:
            if self.address:
                manifest = Manifest.parse(self._read(MANIFEST), f"{self.address}/{MANIFEST}")
            else:
                manifest = load_manifest(self.out)
            missing = {shard.file for shard in manifest.shards()} - entries.keys()
            differences = [f"{min(missing)} missing"] if missing else self._differences(manifest)
            if self.overwrite and not (differences or self.address):
                check_whole(self.out)  # what is damaged is made again
        except UserError:
            if not self.overwrite:
                raise
            differences = ["damage"]
        if not differences:
            return manifest
        if not self.overwrite:
            again = prepare_command(self.source, self.wanted | self.typed, self.name)
            runs = "runs of the same tokens then resume with --data.allow_changes true"
            found = f"{self.name} was prepared with {'; '.join(differences)}"
            raise UserError(f"{found}: {again} replaces it, another folder keeps it; {runs}")
        _check_deletable(self.name, entries)
        return None

    def _differences(self, manifest: Manifest) -> list[str]:
        try:
            inputs = dict(json.loads(self._read(INPUTS)))
        except (ValueError, TypeError):  # it is missing or damaged
            inputs = {}
        found = {"SHA-256 of the text": manifest.source.sha256, "format": manifest.format}
        found |= manifest.settings | {"inputs": inputs.get("inputs")}
        differences = [
            OTHER_INPUTS if key == "inputs" else f"{key} {found.get(key)}, not {value}"
            for key, value in self.wanted.items()
            if found.get(key) != value
        ]
        touched = differences == [OTHER_INPUTS] and not self.overwrite and inputs
        return [] if touched and self.has_contents(inputs) else differences

    def make_once(self, make: Callable[[], Made]) -> Made:
        """Return the dataset at the target, and whether it was made now.

        Args:
            make: Function that is called under the lock if there is no dataset; it delivers one.

        Raises:
            UserError: The folder holds something else, or the disk is full.
        """
        there, out = self.existing(), self.out.resolve()
        lock = out.with_name(f".{out.name}.lock")
        waiting = f"{out} is being prepared by another process: waiting for it"
        if not there or lock.exists():  # or one was killed at its end
            on_wait = partial(print, waiting, flush=True)
            with explained("write", self.out), locked(lock, on_wait):
                temporary_path(out)  # deletes what killed processes have left
                there = self.existing()  # the process that held the lock may have made it
                if not there and self.address:  # fail before the work begins
                    remote.upload(b"probe", f"{self.address}/.probe")
                    remote.delete(f"{self.address}/.probe")
                if not there:
                    return make()
        return there, False

    def deliver(self, folder: Path, manifest: Manifest) -> Made:
        """Write the manifest into `folder`/new, and move that to `out`, or upload it.

        Returns:
            The manifest, and True; or, if another process was faster on a file system without
            locks, the manifest of its dataset, which must equal ours, and False.
        """
        manifest.save(folder / "new")
        if self.address:
            self._upload({path.name: path for path in (folder / "new").iterdir()})
        elif not move_into_place(folder, self.out.resolve(), self.overwrite):
            there = replace(self, overwrite=False).existing()
            assert there
            return there, False
        return manifest, True

    def _upload(self, files: dict[str, Path]) -> None:
        """Upload files, the manifest last, or continue an earlier upload of the same dataset.

        Without a manifest there is no dataset at the address. The shards of another one are deleted
        first: all full shards have the same size, by which a continued upload knows its own.
        """
        there = self._entries()
        digest = hashlib.sha256(files[MANIFEST].read_bytes()).hexdigest()
        if not self._begun.exists() or self._begun.read_text() != digest:
            write_atomic(self._begun, b"")  # a run that is killed now leaves the mark
            for name in [MANIFEST, *filter(SHARD_FILE.fullmatch, there)]:
                remote.delete(f"{self.address}/{name}")
            write_atomic(self._begun, digest.encode())
            there = {}

        def put(name: str) -> None:
            kept = SHARD_FILE.fullmatch(name) and there.get(name, {}).get("size")
            if kept != files[name].stat().st_size:
                remote.upload(files[name], f"{self.address}/{name}")

        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(put, files.keys() - {MANIFEST}))
        remote.upload(files[MANIFEST], f"{self.address}/{MANIFEST}")
        self._begun.unlink(missing_ok=True)

    @property
    def _begun(self) -> Path:
        """File that tells a later run that unfinished shards at the address are its own."""
        return self.out.with_name(f".{self.out.name}.begun")

    def _entries(self) -> dict[str, Any]:
        """Return the names at the target, with what is known about each."""
        if self.address:
            return remote.listed(self.address)
        if os.path.lexists(self.out) and not self.out.is_dir():
            raise UserError(f"{self.out} is no folder: choose another --out")
        return {path.name: {} for path in self.out.iterdir()} if self.out.exists() else {}

    def _read(self, name: str) -> bytes:
        """Return the content of a file at the target; b"" if it is missing."""
        if self.address:
            return remote.read_if_there(f"{self.address}/{name}") or b""
        return (self.out / name).read_bytes() if (self.out / name).exists() else b""


def _check_deletable(out: str, entries: dict[str, Any]) -> None:
    """Raise if the folder holds files that `prepare` did not write and must not delete."""
    for name in sorted(entries.keys() - {MANIFEST, INPUTS}):
        if not SHARD_FILE.fullmatch(name):
            fix = "move it away, or choose another --out"
            raise UserError(f"{out}/{name} is not part of a dataset and would be deleted: {fix}")
