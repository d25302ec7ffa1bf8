"""Copy of a run on a shared folder or in an object store: `--checkpoint.folder`.

FOLDER/RUN_NAME/version_N has the run's config.yaml, run.json, metrics.jsonl, timeline.jsonl and
checkpoints, under the names that they have in lightning_logs/RUN_NAME/version_N. A file is uploaded
under a temporary name, read back, compared by SHA-256, and renamed. In an object store, where a
file appears whole, it has its own name at once. The digest of a checkpoint, NAME.sha256, is
uploaded last. A checkpoint without its digest is neither used nor deleted.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

from gpt_lightning.errors import OutageError, UserError, warn
from gpt_lightning.files import explained, locked, write_atomic
from gpt_lightning.remote import files as remote
from gpt_lightning.remote.attempts import on_file_system
from gpt_lightning.runs import folders
from gpt_lightning.runs.folders import SIDECAR, RunPaths, Saved, saved_checkpoints, sort_saved

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

    def __init__(self, url: str):
        self.url, self.checkpoints = url, f"{url}/{CHECKPOINTS}"
        self.failure: str | None = None

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
                f"{run} has no {RUN_FILE}, which checkpoint.folder needs: begin a new run with fit"
            )
        self.claim(run)
        self.check_run(run)
        remote.upload(b"", f"{self.url}/{BEGUN}")
        for name in remote.listed(self.checkpoints):  # uploads that were interrupted
            if ".tmp." in name:
                remote.delete(f"{self.checkpoints}/{name}")

    def claim(self, run: Path) -> bool:
        """Upload run.json unless there is one; return whether the copy is of this run."""
        return remote.create(f"{self.url}/{RUN_FILE}", (run / RUN_FILE).read_bytes())

    def set_aside(self, step: int) -> None:
        """Rename the checkpoints of later steps, as in the run folder."""
        for saved in sort_saved(map(Path, self.digests())):
            if saved.step > step:
                for name in (saved.path.name + SIDECAR, saved.path.name):
                    remote.rename(f"{self.checkpoints}/{name}", ".old")

    def sync(self, run: Path, kept: Callable[[list[Saved]], set[str]]) -> None:
        """Upload what is new in a run folder, then delete checkpoints that are no longer kept.

        An error does not end the run; `failure` has its message.

        Args:
            run: Run folder.
            kept: Function that returns the names to keep of some checkpoints.
        """
        self.failure = None
        try:
            for name in RUN_FILES:
                if (run / name).exists():
                    remote.upload((run / name).read_bytes(), f"{self.url}/{name}")
            here = {}
            for saved in saved_checkpoints(run / CHECKPOINTS):
                if known := folders.read_sidecar(saved.path):
                    here[saved.path.name] = (saved.path, known[0])
            there = self.digests()
            keep = kept(sort_saved(map(Path, here | there)))
            for name, (path, digest) in here.items():  # the newest first
                if name in keep and there.get(name) != digest:
                    remote.upload(path, f"{self.checkpoints}/{name}", digest)
                    line = f"{digest}  {name}\n".encode("ascii")
                    remote.upload(line, f"{self.checkpoints}/{name}{SIDECAR}")
            for name in there.keys() - keep:
                for file in (f"{name}{SIDECAR}", name):  # nobody reads the second without the first
                    remote.delete(f"{self.checkpoints}/{file}")
        except (UserError, OSError) as error:
            self.failure = str(error)

    # ---- download ------------------------------------------------------------------------------

    def digests(self) -> dict[str, str]:
        """Return the digests of the complete checkpoints by name, the newest first."""
        names = remote.listed(self.checkpoints)
        found = sort_saved(Path(name) for name in names if name + SIDECAR in names)
        files = {s.path.name: f"{self.checkpoints}/{s.path.name}{SIDECAR}" for s in found}
        return {
            name: match[0].decode()
            for name, url in files.items()
            if (match := re.match(rb"[0-9a-f]{64}", remote.read(url)))
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
            remote.fetch_file(f"{self.checkpoints}/{name}", path, digest)
            folders.sidecar(path).unlink(missing_ok=True)
            folders.write_sidecar(path, digest)

    def check_run(self, run: Path) -> None:
        """Raise a UserError if the copy is of another run than a run folder."""
        try:
            theirs = json.loads(remote.read(f"{self.url}/{RUN_FILE}"))["run_id"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.url}/{RUN_FILE} is damaged: restore it") from error
        ours = folders.run_id(run)
        if theirs != ours:
            raise UserError(
                f"{run} is run {ours}, and {self.url} is a copy of run {theirs}: choose another "
                "--run_name or --checkpoint.folder"
            )


def mirror_of(folder: str, run: Path) -> Mirror:
    """Return the copy of a run folder in `checkpoint.folder`."""
    return Mirror(f"{folder.rstrip('/')}/{run.parent.name}/{run.name}")


# ---- resume, sample, evaluate --------------------------------------------------------------------


def check_folder(folder: str, logs: Path) -> None:
    """Check an address before anything is written.

    Args:
        folder: Value of checkpoint.folder.
        logs: Folder of the runs of this machine.

    Raises:
        UserError: The file system needs a package that is missing, is memory or a cache, or
            the address is that of the runs themselves.
    """
    system, path = on_file_system(folder)
    if "memory" in remote.protocols(system) or "::" in folder:  # a cache would be what is read back
        raise UserError(
            f"checkpoint.folder {folder} would be lost with the process: give one such as s3://NAME"
        )
    unfit = Path(path).is_file() or Path(path).resolve() == logs.resolve()
    if remote.is_local(system) and unfit:
        raise UserError(f"checkpoint.folder {folder} is a file, or has the runs: choose another")


def restore(folder: str, runs: Path) -> None:
    """Fetch the newest run of a name, unless this machine has a later checkpoint of it.

    Args:
        folder: Value of checkpoint.folder.
        runs: Folder of the runs of this name on this machine.

    Raises:
        UserError: The run of the same number on this machine is another run.
    """
    there = f"{folder.rstrip('/')}/{runs.name}"
    for name in folders.newest_versions(remote.listed(there)):
        mirror = Mirror(f"{there}/{name}")
        if not remote.listed(mirror.checkpoints):
            continue  # its run ended before its first step
        own = [run.name for run in folders.run_folders(runs)[1:] if (run / CHECKPOINTS).is_dir()]
        if folders.newest_versions([*own, name])[0] == name:
            with locked(runs / f".{name}.fetch.lock"):  # ranks of one machine share the folder
                restore_run(mirror, runs / name)
        return


def restore_run(mirror: Mirror, run: Path) -> None:
    """Fetch the newest checkpoint to a run folder whose own checkpoints are older or damaged.

    Args:
        mirror: Copy of the run.
        run: Run folder on this machine, which may be missing.

    Raises:
        UserError: The folder belongs to another run, or all checkpoints of the copy are damaged.
    """
    if (run / RUN_FILE).exists() or (run / CHECKPOINTS).exists():
        mirror.check_run(run)
    own = saved_checkpoints(run / CHECKPOINTS)
    digests = mirror.digests()
    for saved in sort_saved(map(Path, digests)):
        if any(s.step >= saved.step and is_whole(s.path) for s in own):
            return
        name = saved.path.name
        try:
            for file in remote.listed(mirror.url).keys() & set(RUN_FILES):
                write_atomic(run / file, remote.read(f"{mirror.url}/{file}"))
            mirror.fetch(name, digests[name], run / CHECKPOINTS / name)
        except UserError as error:
            if isinstance(error, OutageError):
                raise
            warn(f"{error}; skipped")
        else:
            print(f"fetched     {mirror.url}/{CHECKPOINTS}/{name}")
            return
    if digests and not own:
        raise UserError(
            f"--resume auto: no checkpoint of {mirror.url} is whole: restore one, or begin a new "
            "run with --resume never"
        )


def fetch_checkpoint(url: str) -> Path:
    """Fetch a checkpoint to the user's cache; return its path there.

    Args:
        url: Address of a .ckpt, of a run folder, or of a folder of runs.

    Raises:
        UserError: There is no checkpoint, or it differs from its digest.
    """
    import platformdirs

    folder, _, file = url.rstrip("/").partition(f"/{CHECKPOINTS}/")
    versions = [] if file else folders.newest_versions(remote.listed(folder))
    for mirror in [Mirror(folder), *(Mirror(f"{folder}/{name}") for name in versions)]:
        digests = mirror.digests()
        if saved := [s for s in sort_saved(map(Path, digests)) if file in ("", s.path.name)]:
            name = folders.best_of(saved).path.name
            cache = platformdirs.user_cache_path("gpt-lightning") / CHECKPOINTS
            path = cache / digests[name][:16] / name
            with locked(path.with_name(".lock")):
                if not is_whole(path):
                    mirror.fetch(name, digests[name], path)
            return path
    raise UserError(
        f"{url} has no {CHECKPOINTS}/*.ckpt with its digest, *.ckpt{SIDECAR}: give the address of "
        "a checkpoint, or of a run folder"
    )


def is_whole(path: Path) -> bool:
    """Return whether a checkpoint exists and matches its digest."""
    try:
        return folders.check_digest(path)
    except UserError:
        return False
