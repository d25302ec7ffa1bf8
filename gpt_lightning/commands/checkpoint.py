"""The command `gpt-lightning checkpoint`: print and verify checkpoints."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields

if TYPE_CHECKING:
    from gpt_lightning.runs.checkpoint import Checkpoint


def checkpoint(action: Literal["inspect", "verify"], path: str) -> None:
    """Print or verify checkpoints. Nothing in a file is run.

    Args:
        action: inspect: print the content of checkpoints. verify: compare each file with its
            SHA-256.
        path: A checkpoint, a run folder, or a folder of runs.
    """
    files = checkpoint_files(Path(path))
    if action == "verify":
        return verify(files)

    from gpt_lightning.runs.checkpoint import read_checkpoint

    for file in files:
        facts = {"checkpoint": str(file)} | describe(read_checkpoint(file))
        print("\n".join(f"{name:<12}{fact}" for name, fact in facts.items()))


def checkpoint_files(path: Path) -> list[Path]:
    """Return the checkpoints of a file, a run folder or a folder of runs, by run and step.

    Raises:
        UserError: there are none.
    """
    from gpt_lightning.runs.folders import RunPaths, find_checkpoint, run_folders, saved_checkpoints

    if path.exists() and not path.is_dir():
        return [path]
    runs = map(RunPaths, run_folders(path))
    files = [saved.path for run in runs for saved in reversed(run.saved())]
    found = find_checkpoint(path)
    return files or [s.path for s in reversed(saved_checkpoints(found.parent))] or [found]


def verify(files: list[Path]) -> None:
    """Print a line for each whole file.

    Raises:
        UserError: names every damaged file.
    """
    from gpt_lightning.runs.folders import check_digest

    damaged = []
    for file in files:
        try:
            check_digest(file)
        except UserError as error:
            damaged.append(str(error))
        else:
            print(f"ok          {file}: {file.stat().st_size:,} bytes")
    if damaged:
        raise UserError("; ".join(damaged))


def describe(checkpoint: "Checkpoint") -> dict[str, str]:
    """Return the content of a checkpoint as text, by name."""
    record, config = checkpoint.record, checkpoint.record.config
    tied = ["lm_head.weight"] if config.tie_weights else []  # wte.weight counts once
    n_params = sum(t.numel() for name, t in checkpoint.weights.items() if name not in tied)
    return {
        "step": f"{checkpoint.step:,}",
        "model": f"{config.n_layer} layers, {config.n_head} heads, {config.n_embd} wide, block "
        f"{config.block_size}, vocabulary {config.vocab_size}: {n_params:,} parameters",
        "tokenizer": str((record.tokenizer or {}).get("name", "not named")),
        "data": listed(record.data_position),
        "settings": listed(record.settings.hyperparameters()),
        "machine": listed(record.environment),
        "written by": f"gpt_lightning {record.version}",
    }


def listed(facts: Fields) -> str:
    """Return facts as one line."""
    return ", ".join(f"{key} {value}" for key, value in facts.items()) or "not named"
