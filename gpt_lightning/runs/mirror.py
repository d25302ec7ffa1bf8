"""Copy of a run on a shared folder or in an object store: `--checkpoint.folder`.

FOLDER/RUN_NAME/version_N has the run's config.yaml, run.json, metrics.jsonl, timeline.jsonl and
checkpoints, under the names that they have in lightning_logs/RUN_NAME/version_N. A file is uploaded
under a temporary name, read back, compared by SHA-256, and renamed. In an object store, where a
file appears whole, it has its own name at once. The digest of a checkpoint, NAME.sha256, is
uploaded last. A checkpoint without its digest is never used.
"""

import contextlib
import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from gpt_lightning.data.transfer import attempts, fetch_file
from gpt_lightning.errors import UserError
from gpt_lightning.files import explained, sync_folder
from gpt_lightning.runs.digests import SIDECAR, read_sidecar, sidecar, write_sidecar
from gpt_lightning.runs.folders import RUN_FILE, Saved, run_id, saved_checkpoints, sort_saved

CHECKPOINTS = "checkpoints"
BEGUN = f"{CHECKPOINTS}/.begun"  # marks a run that has begun to train
RUN_FILES = (RUN_FILE, "config.yaml", "metrics.jsonl", "timeline.jsonl")
# no folders, and no cheap rename; an object appears when it is complete
OBJECT_STORES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "r2"}


class Mirror:
    """Copy of one run folder.

    Args:
        url: URL of the copy, FOLDER/RUN_NAME/version_N, on any file system of fsspec.

    Attributes:
        failure: Reason why the last sync has failed; None if it has not.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.failure: str | None = None
        self._digests: dict[str, str] = {}  # of the uploaded checkpoints, by name

    # ---- upload --------------------------------------------------------------------------------

    def open(self, run: Path) -> None:
        """Claim the copy's folder for a run, check that it can be written, and clean it up.

        Args:
            run: Run folder.

        Raises:
            UserError: The copy belongs to another run, or cannot be written.
        """
        if not (run / RUN_FILE).exists():
            raise UserError(
                f"{run} has no {RUN_FILE}, which checkpoint.folder needs: begin a new run with "
                "`gpt-lightning fit`, from a checkpoint with --ckpt_path"
            )
        self.claim(run)
        self.check_run(run)
        self._put(BEGUN, b"")
        names = self.names(CHECKPOINTS)
        self._digests = self.digests(names)
        for name in names:  # uploads that were interrupted
            if ".tmp." in name or (name.endswith(".ckpt") and name not in self._digests):
                self._remove(f"{CHECKPOINTS}/{name}")

    def claim(self, run: Path) -> bool:
        """Upload run.json unless there is one; return whether the copy is of this run."""
        content = (run / RUN_FILE).read_bytes()

        def create(system: Any, path: str) -> bool:
            make_parent(system, path)
            try:
                with contextlib.suppress(FileExistsError), system.open(path, "xb") as file:
                    file.write(content)
            except (NotImplementedError, ValueError):  # a file system without exclusive creation
                if not system.exists(path):
                    system.pipe_file(path, content)
            return bool(system.cat_file(path) == content)

        return attempts(f"{self.url}/{RUN_FILE}", create, "write")

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints of later steps, as in the run folder."""
        for saved in sort_saved(map(Path, self._digests)):
            if saved.step > step:
                del self._digests[saved.path.name]
                for name in (saved.path.name + SIDECAR, saved.path.name):
                    path = f"{self.url}/{CHECKPOINTS}/{name}"
                    attempts(path, lambda system, old: system.mv(old, f"{old}.old"), "rename")

    def sync(self, run: Path, kept: Callable[[list[Saved]], set[str]]) -> None:
        """Upload what is new in a run folder, then delete checkpoints that are no longer kept.

        An error does not end the run; `failure` has its message.

        Args:
            run: Run folder.
            kept: Function that returns the names to keep of some checkpoints.
        """
        try:
            self._sync(run, kept)
        except (UserError, OSError) as error:
            self.failure = str(error)
        else:
            self.failure = None

    def _sync(self, run: Path, kept: Callable[[list[Saved]], set[str]]) -> None:
        for name in RUN_FILES:
            if (run / name).exists():
                self._put(name, (run / name).read_bytes())
        here = {saved.path.name: saved.path for saved in saved_checkpoints(run / CHECKPOINTS)}
        keep = kept(sort_saved(map(Path, here | self._digests)))
        for name, path in here.items():  # the newest first
            digest, shards = (*read_sidecar(path), ("", {}))[0]
            if name in keep and shards:
                raise UserError(
                    f"{path} is in shards, which are not copied: write it to one file with "
                    f"`gpt-lightning checkpoint convert {path} --out whole.ckpt`, or leave out "
                    "checkpoint.folder"
                )
            if name in keep and digest and self._digests.get(name) != digest:
                self._put(f"{CHECKPOINTS}/{name}", path, digest)
                line = f"{digest}  {name}\n".encode("ascii")
                self._put(f"{CHECKPOINTS}/{name}{SIDECAR}", line)
                self._digests[name] = digest
        for name in self._digests.keys() - keep:
            for file in (f"{name}{SIDECAR}", name):  # without its digest, nobody reads the second
                self._remove(f"{CHECKPOINTS}/{file}")
            del self._digests[name]

    def _put(self, name: str, content: Path | bytes, digest: str = "") -> None:
        """Upload a file, or bytes, and compare what is read back with its SHA-256."""
        if isinstance(content, bytes):
            digest = hashlib.sha256(content).hexdigest()

        def put(system: Any, path: str) -> None:
            parent, _, base = path.rpartition("/")
            mark = f".tmp.{socket.gethostname()}.{os.getpid()}"
            temporary = path if is_object_store(system) else f"{parent}/.{base}{mark}"
            make_parent(system, path)
            try:
                if isinstance(content, bytes):
                    system.pipe_file(temporary, content)
                else:
                    system.put_file(str(content), temporary)
                found = remote_sha256(system, temporary)
                if found != digest:
                    raise ValueError(f"sent SHA-256 {digest}, read back {found}")
            except BaseException:
                with contextlib.suppress(Exception):
                    system.rm_file(temporary)
                raise
            if temporary != path:
                system.mv(temporary, path)
                if is_local(system):
                    sync_folder(Path(parent))

        attempts(f"{self.url}/{name}", put, "write")

    def _remove(self, name: str) -> None:
        def remove(system: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                system.rm_file(path)

        attempts(f"{self.url}/{name}", remove, "delete")

    # ---- download ------------------------------------------------------------------------------

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder of the copy; none if it does not exist."""

        def listed(system: Any, path: str) -> list[str]:
            system.invalidate_cache()
            try:
                return [name.rstrip("/").rpartition("/")[2] for name in system.ls(path, False)]
            except FileNotFoundError:
                return []

        return attempts(f"{self.url}/{folder}".rstrip("/"), listed)

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return attempts(f"{self.url}/{name}", lambda system, path: system.cat_file(path))

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        """Return the digests of the complete checkpoints by name, the newest first."""
        found = sort_saved(Path(name) for name in names if name + SIDECAR in names)
        lines = {s.path.name: self.read(f"{CHECKPOINTS}/{s.path.name}{SIDECAR}") for s in found}
        return {
            name: match[0].decode()
            for name, line in lines.items()
            if (match := re.match(rb"[0-9a-f]{64}", line)) and b"/" not in line  # whole ones
        }

    def fetch(self, name: str, digest: str, path: Path) -> None:
        """Download a checkpoint, and write its digest beside it.

        Args:
            name: File name of the checkpoint.
            digest: SHA-256 of the checkpoint.
            path: File to write.

        Raises:
            UserError: The checkpoint cannot be fetched, or differs from its digest.
        """
        with explained("write", path):
            fetch_file(f"{self.url}/{CHECKPOINTS}/{name}", path, digest)
            sidecar(path).unlink(missing_ok=True)
            write_sidecar(path, digest)

    def check_run(self, run: Path) -> None:
        """Raise a UserError if the copy is of another run than a run folder."""
        try:
            theirs = json.loads(self.read(RUN_FILE))["run_id"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.url}/{RUN_FILE} is damaged: restore it") from error
        if theirs != run_id(run):
            raise UserError(
                f"{run} is run {run_id(run)}, and {self.url} is a copy of run {theirs}: choose "
                "another --run_name or --checkpoint.folder"
            )


def mirror_of(folder: str, run: Path) -> Mirror:
    """Return the copy of a run folder in `checkpoint.folder`."""
    return Mirror(f"{folder.rstrip('/')}/{run.parent.name}/{run.name}")


# ---- file systems --------------------------------------------------------------------------------


def protocols(system: Any) -> set[str]:
    """Return the protocols of a file system of fsspec."""
    return {system.protocol} if isinstance(system.protocol, str) else set(system.protocol)


def is_object_store(system: Any) -> bool:
    """Return whether a file system has objects instead of files and folders."""
    return not protocols(system).isdisjoint(OBJECT_STORES)


def is_local(system: Any) -> bool:
    """Return whether a file system is that of this machine, including mounted disks."""
    return "file" in protocols(system)


def make_parent(system: Any, path: str) -> None:
    """Make the folder of a file, where there are folders."""
    if not is_object_store(system):
        system.makedirs(path.rpartition("/")[0], exist_ok=True)


def remote_sha256(system: Any, path: str) -> str:
    """Read a file back and return its SHA-256; a local file is synced before."""
    with system.open(path, "rb") as file:
        if is_local(system):
            os.fsync(file.fileno())
        return hashlib.file_digest(file, "sha256").hexdigest()
