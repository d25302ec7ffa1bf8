"""The folder that a run happens in: a text, a configuration, and what is there afterwards."""

import hashlib
import random
import re
import shutil
from pathlib import Path

# Values of run.yaml
STEPS = 30
EPOCH_STEPS = 12
VALIDATE, SAVE = 6, 4  # optimizer steps from one to the next


def write_inputs(folder: Path) -> Path:
    """text.txt, of a small language that a tiny model can learn, and run.yaml."""
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept", "rain", "fell"]
    text = "".join(rng.choice(words) + rng.choice(" \n") for _ in range(1000))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text[:3600])  # 3,240 tokens for training
    shutil.copy(Path(__file__).with_name("run.yaml"), folder)
    return folder


def run_folder(folder: Path, name: str = "run") -> Path:
    """Return the newest run: one that was killed before its first save begins anew in the next."""
    runs = folder / "lightning_logs" / name
    versions = [int(path.name.removeprefix("version_")) for path in runs.glob("version_*")]
    return runs / f"version_{max(versions, default=0)}"


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file below a folder, by name."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def leftovers(folder: Path) -> list[str]:
    """Return temporary files and locks that a run has left below a folder."""
    names = (str(path.relative_to(folder)) for path in folder.rglob("*"))
    return sorted(n for n in names if re.search(r"\.tmp|\.lock|\.probe|\.spool", n))


def rewind(run: Path, step: int) -> None:
    """Remove the checkpoints past a step, as if the run had been killed right after its save."""
    for path in (run / "checkpoints").iterdir():
        match = re.match(r"step-(\d+)", path.name)
        if match and int(match[1]) > step:
            path.unlink()


def copied(source: Path, folder: Path, step: int | None = None) -> Path:
    """A copy of a folder with its run, as if killed right after the save at a step."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    if step is not None:
        rewind(run_folder(folder), step)
    return folder
