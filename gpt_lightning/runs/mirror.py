"""Copy of a run on a shared folder or in an object store: `--checkpoint.folder`.

FOLDER/RUN_NAME/version_N has the run's config.yaml, run.json, metrics.jsonl, timeline.jsonl and
checkpoints, under the names that they have in lightning_logs/RUN_NAME/version_N. The digest of a
checkpoint, NAME.sha256, is uploaded last. A checkpoint without its digest is never used.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning.errors import OutageError, UserError, one_line, warn
from gpt_lightning.files import Fields, explained, file_sha256, locked, sha256, write_atomic
from gpt_lightning.remote import files as remote
from gpt_lightning.runs import folders
from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
from gpt_lightning.runs.folders import SIDECAR, RunPaths, Saved, saved_checkpoints, sort_saved

NAMES = RunPaths(Path())
CHECKPOINTS = NAMES.checkpoints.name
RUN_FILE = NAMES.identity.name
RUN_FILES = (RUN_FILE, NAMES.config.name, NAMES.metrics.name, NAMES.timeline.name)


class MirroredCheckpointIO(DurableCheckpointIO):
    """DurableCheckpointIO that copies each checkpoint of a run, and keeps as many there.

    A copy that fails is a warning, and nothing is deleted there.

    Args:
        url: URL of the copy, FOLDER/RUN_NAME/version_N, on any file system of fsspec.
        kept: Function that returns the names to keep of some checkpoints, the newest first.
    """

    def __init__(self, url: str, kept: Callable[[list[Saved]], set[str]]):
        self.url = url
        self.kept = kept

    def save_checkpoint(self, checkpoint: Fields, path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint(checkpoint, path, storage_options)
        try:
            self.copy(Path(path).parent.parent)
            self._delete_others(Path(path))
        except UserError as error:
            print(f"warning: not in checkpoint.folder: {error}", file=sys.stderr)

    def _delete_others(self, new: Path) -> None:
        """Delete what is no longer kept, and the later steps of a branch that the run has left."""
        there = copied(self.url)
        (saved,) = sort_saved([new])
        kept = self.kept([other for other in there if other.step <= saved.step])
        for other in there:
            if other.path.name not in kept:
                url = f"{self.url}/{CHECKPOINTS}/{other.path.name}"
                remote.delete(url + SIDECAR)  # nobody reads the other without it
                remote.delete(url)

    def copy(self, run: Path) -> None:
        """Copy what a run folder has and the copy has not.

        Raises:
            UserError: The copy belongs to another run, or cannot be written.
        """
        check_owner(self.url, run)
        for name in RUN_FILES:
            if (run / name).exists():
                remote.upload(run / name, f"{self.url}/{name}")
        for saved in saved_checkpoints(run / CHECKPOINTS):
            name, digest = saved.path.name, folders.sidecar(saved.path)
            there = f"{self.url}/{CHECKPOINTS}/{name}"
            if not digest.exists():
                continue
            if remote.read_if_there(there + SIDECAR) != digest.read_bytes():
                remote.upload(saved.path, there)
                remote.upload(digest, there + SIDECAR)


def copy_url(folder: str, run: Path) -> str:
    """Return the URL of the copy of a run folder in `checkpoint.folder`."""
    return f"{folder.rstrip('/')}/{run.parent.name}/{run.name}"


def check_owner(url: str, run: Path) -> None:
    """Raise a UserError if a copy is of another run than a run folder."""
    content = remote.read_if_there(f"{url}/{RUN_FILE}")
    if content is None:
        return
    theirs, ours = content.decode(errors="replace"), str(folders.run_id(run))
    if ours not in theirs:
        raise UserError(
            f"{run} is run {ours}, and {url} is a copy of another run, {one_line(theirs)}: choose "
            "another --run_name or --checkpoint.folder"
        )


# ---- resume, sample, evaluate --------------------------------------------------------------------


def copied(url: str) -> list[Saved]:
    """Return the checkpoints of a copy that have their digests, the highest step first."""
    names = remote.listed(f"{url}/{CHECKPOINTS}")
    return sort_saved(Path(name) for name in names if name + SIDECAR in names)


def fetch(url: str, name: str, folder: Path) -> Path:
    """Fetch a checkpoint of a copy, with its digest, unless the folder has it; return its path.

    Raises:
        UserError: The checkpoint cannot be fetched, or differs from its digest.
    """
    path, there = folder / name, f"{url}/{CHECKPOINTS}/{name}"
    digest = remote.read(there + SIDECAR)[:64].decode(errors="replace")
    # ranks of one machine share the folder
    with explained("write", path), locked(folder / ".fetch.lock"):
        if not path.exists() or file_sha256(path) != digest:

            def write_digest(copy: Path) -> None:
                folders.write_sidecar(path, digest)

            remote.fetch_file(there, path, digest, check=write_digest)
    return path


def restore(folder: str, runs: Path) -> None:
    """Fetch the newest run of a name, unless this machine has a later checkpoint of it.

    Args:
        folder: Value of checkpoint.folder.
        runs: Folder of the runs of this name on this machine.

    Raises:
        UserError: The run of the same number on this machine is another run, or all checkpoints
            of the copy are damaged.
    """
    there = f"{folder.rstrip('/')}/{runs.name}"
    versions = folders.newest_versions(remote.listed(there))
    name = next((name for name in versions if copied(f"{there}/{name}")), None)
    begun = (run.name for run in folders.run_folders(runs)[1:] if (run / CHECKPOINTS).is_dir())
    if name is None or folders.newest_versions([name, *begun])[0] != name:
        return
    url, run = f"{there}/{name}", runs / name
    if (run / CHECKPOINTS).is_dir():
        check_owner(url, run)
    own = saved_checkpoints(run / CHECKPOINTS)
    last = next((saved.step for saved in own if is_whole(saved.path)), -1)
    for saved in copied(url):
        if saved.step <= last:
            return
        for file in RUN_FILES:
            content = remote.read_if_there(f"{url}/{file}")
            if content is not None:
                write_atomic(run / file, content)
        try:
            fetch(url, saved.path.name, run / CHECKPOINTS)
        except OutageError:
            raise
        except UserError as error:
            rank_zero_only(warn)(f"{error}; skipped")
        else:
            rank_zero_only(print)(f"fetched     {url}/{CHECKPOINTS}/{saved.path.name}")
            return
    if last < 0:
        raise UserError(
            f"--resume auto: no checkpoint of {url} is whole: restore one, or begin a new run with "
            "--resume never"
        )


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint matches its digest."""
    try:
        return folders.check_digest(path)
    except UserError:
        return False


def fetch_checkpoint(url: str) -> Path:
    """Fetch a checkpoint to the user's cache; return its path there.

    Args:
        url: Address of a .ckpt, of a run folder, or of a folder of runs.

    Raises:
        UserError: There is no checkpoint, or it differs from its digest.
    """
    folder, _, file = url.rstrip("/").partition(f"/{CHECKPOINTS}/")
    versions = folders.newest_versions(remote.listed(folder))
    for run in (folder, *(f"{folder}/{name}" for name in versions)):
        found = [saved for saved in copied(run) if file in ("", saved.path.name)]
        if found:
            cache = platformdirs.user_cache_path("gpt-lightning") / CHECKPOINTS
            return fetch(run, folders.best_of(found).path.name, cache / sha256(run.encode())[:16])
    raise UserError(
        f"{url} has no {CHECKPOINTS}/*.ckpt with its digest, *.ckpt{SIDECAR}: give the address of "
        "a checkpoint, or of a run folder"
    )
