"""The folder that a run happens in: a text, a configuration, and what is there afterwards."""

import hashlib
import random
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

STEPS = 30
EPOCH_STEPS = 12  # 200 windows of 16 tokens, 16 of them a step
VALIDATE, SAVE = 6, 4  # optimizer steps from one to the next

CONFIG: dict[str, Any] = {
    "seed_everything": 7,
    "trainer": {
        "accelerator": "cpu",
        "devices": 1,
        "max_steps": STEPS,
        "accumulate_grad_batches": 2,
        "val_check_interval": 2 * VALIDATE,  # micro-batches
        "check_val_every_n_epoch": None,
        "log_every_n_steps": 1,
        "gradient_clip_val": 1.0,
    },
    "model": {
        # dropout, or lost random numbers would show nowhere
        "config": {
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            "block_size": 16,
            "vocab_size": None,
            "dropout": 0.2,
        },
        "learning_rate": 3.0e-3,
        "warmup_steps": 5,
        "decay_steps": STEPS,
    },
    "data": {"text_file": "text.txt", "tokenizer": "char", "batch_size": 8},
    "samples": {"max_new_tokens": 0},
    "speed": {"warmup_steps": 1},
    "progress": {"plain_every_n_steps": 1},
    "checkpoint": {"every_n_steps": SAVE},
}


def write_inputs(folder: Path) -> Path:
    """text.txt, of a small language that a tiny model can learn, and run.yaml."""
    rng = random.Random(0)
    words = ["the", "cat", "sat", "on", "a", "mat", "and", "then", "it", "slept", "rain", "fell"]
    text = "".join(rng.choice(words) + rng.choice(" \n") for _ in range(1000))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text[:3600])  # 3,240 tokens for training
    (folder / "run.yaml").write_text(yaml.safe_dump(CONFIG))
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
