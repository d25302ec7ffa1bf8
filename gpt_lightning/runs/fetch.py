"""Checkpoints from a copy of a run on another file system: to resume, to sample, to evaluate."""

import sys
from pathlib import Path

import platformdirs

from gpt_lightning.errors import UserError
from gpt_lightning.files import locked, write_atomic
from gpt_lightning.remote.attempts import DamageError, on_file_system
from gpt_lightning.remote.files import is_local, protocols
from gpt_lightning.runs import folders
from gpt_lightning.runs.digests import SIDECAR, check_digest
from gpt_lightning.runs.mirror import CHECKPOINTS, RUN_FILE, RUN_FILES, Mirror


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
    if "memory" in protocols(system) or "::" in folder:  # a cache would be what is read back
        raise UserError(
            f"checkpoint.folder {folder} would be lost at the end of the process: choose a folder, "
            "or a bucket such as s3://NAME"
        )
    if is_local(system) and Path(path).resolve() == logs.resolve():
        raise UserError(
            f"checkpoint.folder {folder} has the runs themselves: choose another folder"
        )


def restore(folder: str, runs: Path) -> None:
    """Fetch the newest run of a name, unless this machine has a later checkpoint of it.

    Args:
        folder: Value of checkpoint.folder.
        runs: Folder of the runs of this name on this machine.

    Raises:
        UserError: The run of the same number on this machine is another run.
    """
    there = f"{folder.rstrip('/')}/{runs.name}"
    for name in folders.newest_versions(Mirror(there).names()):
        mirror = Mirror(f"{there}/{name}")
        if not mirror.names(CHECKPOINTS):
            continue  # its run ended before its first step
        own = [run.name for run in folders.run_folders(runs)[1:] if (run / CHECKPOINTS).is_dir()]
        if folders.newest_versions([*own, name])[0] == name:
            runs.mkdir(parents=True, exist_ok=True)
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
    own = folders.saved_checkpoints(run / CHECKPOINTS)
    digests = mirror.digests(mirror.names(CHECKPOINTS))
    for saved in folders.sort_saved(map(Path, digests)):
        if any(s.step >= saved.step and is_whole(s.path) for s in own):
            return
        name = saved.path.name
        try:
            for file in filter(mirror.names().__contains__, RUN_FILES):
                write_atomic(run / file, mirror.read(file))
            mirror.fetch(name, digests[name], run / CHECKPOINTS / name)
        except UserError as error:
            if not isinstance(error.__cause__, DamageError):  # no damage: the connection
                raise
            print(f"warning: {error}; skipped", file=sys.stderr)
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
    folder, _, file = url.rstrip("/").partition(f"/{CHECKPOINTS}/")
    mirrors = [Mirror(folder)]
    if not file:
        versions = folders.newest_versions(mirrors[0].names())
        mirrors += [Mirror(f"{folder}/{name}") for name in versions]
    for mirror in mirrors:
        digests = mirror.digests(mirror.names(CHECKPOINTS))
        name = file
        if digests and not file:
            name = folders.best_of(folders.sort_saved(map(Path, digests))).path.name
        if name not in digests:
            continue
        cache = Path(platformdirs.user_cache_dir("gpt-lightning")) / CHECKPOINTS
        path = cache / digests[name][:16] / name
        path.parent.mkdir(parents=True, exist_ok=True)
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
        check_digest(path)
    except UserError:
        return False
    return True
