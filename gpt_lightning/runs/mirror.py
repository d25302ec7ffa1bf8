"""Copy of a run on a shared folder or in an object store: `--checkpoint.folder`.

FOLDER/RUN_NAME/version_N has the run's config.yaml, run.json, metrics.jsonl, timeline.jsonl and
checkpoints, under the names that they have in lightning_logs/RUN_NAME/version_N. A file is uploaded
under a temporary name, read back, compared by SHA-256, and renamed. In an object store, where a
file appears whole, it has its own name at once. The digest of a checkpoint, NAME.sha256, is
uploaded last. A checkpoint without its digest is never used.
"""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from gpt_lightning.errors import UserError
from gpt_lightning.files import explained
from gpt_lightning.remote.files import create, delete, fetch_file, listed, read, rename, upload
from gpt_lightning.runs.digests import SIDECAR, read_sidecar, sidecar, write_sidecar
from gpt_lightning.runs.folders import RunPaths, Saved, run_id, saved_checkpoints, sort_saved

NAMES = RunPaths(Path())
CHECKPOINTS, RUN_FILE = NAMES.checkpoints.name, NAMES.identity.name
BEGUN = f"{CHECKPOINTS}/.begun"  # marks a run that has begun to train
RUN_FILES = (RUN_FILE, NAMES.config.name, NAMES.metrics.name, NAMES.timeline.name)


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
        upload(b"", f"{self.url}/{BEGUN}")
        names = self.names(CHECKPOINTS)
        self._digests = self.digests(names)
        for name in names:  # uploads that were interrupted
            if ".tmp." in name or (name.endswith(".ckpt") and name not in self._digests):
                delete(f"{self.url}/{CHECKPOINTS}/{name}")

    def claim(self, run: Path) -> bool:
        """Upload run.json unless there is one; return whether the copy is of this run."""
        return create(f"{self.url}/{RUN_FILE}", (run / RUN_FILE).read_bytes())

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints of later steps, as in the run folder."""
        for saved in sort_saved(map(Path, self._digests)):
            if saved.step > step:
                del self._digests[saved.path.name]
                for name in (saved.path.name + SIDECAR, saved.path.name):
                    rename(f"{self.url}/{CHECKPOINTS}/{name}", ".old")

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
                upload((run / name).read_bytes(), f"{self.url}/{name}")
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
                address = f"{self.url}/{CHECKPOINTS}/{name}"
                upload(path, address, digest)
                upload(f"{digest}  {name}\n".encode("ascii"), address + SIDECAR)
                self._digests[name] = digest
        for name in self._digests.keys() - keep:
            for file in (f"{name}{SIDECAR}", name):  # without its digest, nobody reads the second
                delete(f"{self.url}/{CHECKPOINTS}/{file}")
            del self._digests[name]

    # ---- download ------------------------------------------------------------------------------

    def names(self, folder: str = "") -> list[str]:
        """Return the names in a folder of the copy; none if it does not exist."""
        return list(listed(f"{self.url}/{folder}".rstrip("/")))

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return read(f"{self.url}/{name}")

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
