"""Output of prepare: the present contents of a folder or address, the lock on it, the delivery."""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpt_lightning.data.dataset import load_manifest
from gpt_lightning.data.formats import SHARD_FILE
from gpt_lightning.data.manifest import MANIFEST, Manifest
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, locked, move_into_place, workspace, write_atomic

# Not in the manifest, because it holds the inputs' time stamps: equal texts give equal manifests,
# wherever and whenever they were copied.
INPUTS = ".inputs.json"
OTHER_INPUTS = "other inputs (by their names, sizes and times)"
UPLOADS = 4  # files that are uploaded at a time


@dataclass(frozen=True)
class Target:
    """Output folder of a preparation.

    Attributes:
        out: Folder of the dataset.
        overwrite: True to replace another dataset.
        wanted: Facts that decide its bytes, with the keys of recorded(), as far as they are known.
        sizes: Digest of the inputs' names and sizes.
        contents: Function that reads all inputs and returns the digest of their contents, which is
            called if nothing but their times differs; None: there are no documents.
    """

    out: Path
    overwrite: bool = False
    wanted: dict[str, Any] = field(default_factory=dict)
    sizes: str = ""
    contents: Callable[[], str] | None = None

    @property
    def name(self) -> str:
        """Path or address, for messages."""
        return str(self.out)

    def existing(self) -> Manifest | None:
        """Return the dataset in `out` if it is the wanted one, None if it may be written there.

        Raises:
            UserError: The folder holds something else, or a damaged dataset.
        """
        entries = self._entries()
        if not entries:
            return None
        if MANIFEST not in entries:
            self._check_unfinished(entries)
            return None
        try:
            manifest = self._manifest(entries)
        except UserError:
            if not self.overwrite:
                raise
            differences = ["damage"]
        else:
            inputs = self._inputs()
            found = {"SHA-256 of the text": manifest.source.sha256, "format": manifest.format}
            found |= manifest.settings | {"inputs": inputs.get("inputs", "")}
            differences = [
                OTHER_INPUTS if key == "inputs" else f"{key} {found.get(key)}, not {value}"
                for key, value in self.wanted.items()
                if found.get(key) != value
            ]
            if differences == [OTHER_INPUTS] and self._are_touched(inputs):
                differences = []
        if not differences:
            return manifest
        if not self.overwrite:
            raise UserError(
                f"{self.name} was prepared with {'; '.join(differences)}: "
                f"replace it with `gpt-lightning prepare SOURCE --out {self.name} "
                "--overwrite true`, or choose another folder"
            )
        _check_deletable(self.name, entries)
        return None

    def _are_touched(self, before: dict[str, str]) -> bool:
        """Return whether the contents of the inputs are those in the file INPUTS; update it."""
        if self.contents is None or self.overwrite or before.get("sizes") != self.sizes:
            return False
        if self.contents() != before.get("contents"):
            return False
        # a read-only dataset compares again the next time, and so does one at an address
        with contextlib.suppress(UserError), exclusive_lock(self.out.resolve()):
            if self._inputs() != before:  # another process has replaced it meanwhile
                return False
            if self.out.exists():
                save_inputs(self.out, before | {"inputs": self.wanted["inputs"]})
        return True

    def _inputs(self) -> dict[str, str]:
        """Return the facts in the file INPUTS; none if it is missing or damaged."""
        with contextlib.suppress(ValueError):
            found = json.loads(self._read(INPUTS))
            return found if isinstance(found, dict) else {}
        return {}

    def make_once(self, make: Callable[[], tuple[Manifest, bool]]) -> tuple[Manifest, bool]:
        """Return the dataset in `out`, and whether it was made now.

        Args:
            make: Function that is called under the lock if there is no dataset; it delivers one.

        Raises:
            UserError: The folder holds something else, or the disk is full.
        """
        there = self.existing()
        if there is None or _lock_of(self.out.resolve()).exists():  # or one was killed at its end
            with exclusive_lock(self.out.resolve()), explained("write", self.out):
                there = self.existing()  # the process that held the lock may have made it
                if there is None:
                    self.check_writable()
                    return make()
        return there, False

    def publish(self, write: Callable[[Path], Manifest]) -> tuple[Manifest, bool]:
        """Write a dataset into a temporary folder, and deliver it.

        Args:
            write: Function that makes the folder and writes the dataset into it.
        """
        with workspace(self.out.resolve()) as folder:
            return self.deliver(folder, write(folder / "new"))

    def check_writable(self) -> None:
        """Raise a UserError if the address cannot be written, before the work begins."""

    def deliver(self, folder: Path, manifest: Manifest) -> tuple[Manifest, bool]:
        """Move `folder`/new to `out`.

        Returns:
            The manifest, and True; or, if another process was faster on a file system without
            locks, the manifest of its dataset, which must equal ours, and False.
        """
        if move_into_place(folder, self.out.resolve(), self.overwrite):
            return manifest, True
        there = replace(self, overwrite=False).existing()
        assert there is not None
        return there, False

    def _entries(self) -> dict[str, Any]:
        """Return the names in the folder."""
        if self.out.exists() and not self.out.is_dir():
            raise UserError(f"{self.out} is a file: choose another --out")
        return dict.fromkeys(path.name for path in self.out.iterdir()) if self.out.exists() else {}

    def _check_unfinished(self, entries: dict[str, Any]) -> None:
        raise UserError(f"{self.name} holds {min(entries)} but no {MANIFEST}: choose another --out")

    def _manifest(self, entries: dict[str, Any]) -> Manifest:
        return load_manifest(self.out)

    def _read(self, name: str) -> bytes:
        with contextlib.suppress(OSError):
            return (self.out / name).read_bytes()
        return b""


@dataclass(frozen=True)
class RemoteTarget(Target):
    """Output at an address of fsspec; locks and unfinished work are beside `out`, a local path.

    The manifest is uploaded last: without it there is no dataset.

    Attributes:
        address: URL of the folder.
    """

    address: str = ""

    @classmethod
    def of(cls, address: str, data_dir: Path, overwrite: bool) -> "RemoteTarget":
        """Return the target at an address, with its unfinished work in data_dir."""
        address = address.rstrip("/")
        digest = hashlib.sha256(address.encode()).hexdigest()[:8]
        name = f"{address.rpartition('/')[2]}-{digest}"
        return cls(data_dir / name, overwrite, address=address)

    @property
    def name(self) -> str:
        return self.address

    def check_writable(self) -> None:
        from gpt_lightning.remote.files import delete, upload  # need fsspec

        upload(b"probe", f"{self.address}/.probe")
        delete(f"{self.address}/.probe")

    def deliver(self, folder: Path, manifest: Manifest) -> tuple[Manifest, bool]:
        """Upload the files in `folder`/new, the manifest last, and delete older shards.

        An upload that was interrupted is continued.
        """
        from gpt_lightning.remote.files import delete, upload  # need fsspec

        files = {path.name: path for path in (folder / "new").iterdir()}
        digest = hashlib.sha256(files[MANIFEST].read_bytes()).hexdigest()
        there = self._entries()
        if not self._begun.exists() or self._begun.read_text() != digest:
            delete(f"{self.address}/{MANIFEST}")  # the shards of that dataset are replaced
            write_atomic(self._begun, digest.encode())
            there = {}

        def put(name: str) -> None:
            if there.get(name, {}).get("size") != files[name].stat().st_size:
                upload(files[name], f"{self.address}/{name}")

        with ThreadPoolExecutor(UPLOADS) as pool:
            list(pool.map(put, files.keys() - {MANIFEST}))
        upload(files[MANIFEST], f"{self.address}/{MANIFEST}")
        for name in self._entries():
            if name not in files and SHARD_FILE.fullmatch(name):
                delete(f"{self.address}/{name}")
        self._begun.unlink(missing_ok=True)
        return manifest, True

    @property
    def _begun(self) -> Path:
        """File that tells a later run that unfinished shards at the address are its own."""
        return self.out.with_name(f".{self.out.name}.begun")

    def _entries(self) -> dict[str, Any]:
        from gpt_lightning.remote.files import listed  # needs fsspec

        return listed(self.address)

    def _check_unfinished(self, entries: dict[str, Any]) -> None:
        if not self._begun.exists() and not self.overwrite:
            super()._check_unfinished(entries)
        _check_deletable(self.name, entries)

    def _manifest(self, entries: dict[str, Any]) -> Manifest:
        manifest = Manifest.parse(self._read(MANIFEST), f"{self.address}/{MANIFEST}")
        missing = {shard.file for shard in manifest.shards()} - entries.keys()
        if missing:
            raise UserError(
                f"{self.address} lacks {min(missing)}: make it again: `gpt-lightning prepare "
                f"SOURCE --out {self.address} --overwrite true`"
            )
        return manifest

    def _read(self, name: str) -> bytes:
        from gpt_lightning.remote.files import read_if_there  # needs fsspec

        return read_if_there(f"{self.address}/{name}") or b""


def save_inputs(folder: Path, facts: dict[str, str]) -> None:
    """Write what later runs compare: inputs, sizes and contents, digests of the inputs."""
    write_atomic(folder / INPUTS, json.dumps(facts).encode() + b"\n")


def _check_deletable(out: str, entries: dict[str, Any]) -> None:
    """Raise if the folder holds files that `prepare` did not write and must not delete."""
    for name in sorted(entries.keys() - {MANIFEST, INPUTS}):
        if not SHARD_FILE.fullmatch(name):
            raise UserError(
                f"{out}/{name} is not part of a dataset and would be deleted with {out}: "
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


def _lock_of(out: Path) -> Path:
    return out.with_name(f".{out.name}.lock")
