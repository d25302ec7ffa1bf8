"""The command `gpt-lightning doctor --resume`: check on this machine that resume is bit-exact.

Two short runs of one configuration are made: one without interruption; the other is killed at
random moments and started again with `--resume auto` each time. Weights, optimizer, metrics and
position in the data must be equal, byte for byte.
"""

import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from gpt_lightning.errors import UserError
from gpt_lightning.files import Fields
from gpt_lightning.parsing import resolve_configs
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.history import read_rows

# metrics of a session, which differ between two equal runs
SESSION = re.compile("time|perf/(?!tokens$).*")
ALONE, KILLED = (f"lightning_logs/{name}/version_0" for name in ("alone", "killed"))


def doctor(
    resume: bool = False,
    json: bool = False,
    steps: int = 20,
    kills: int = 3,
    seed: int | None = None,
    fit_options: list[str] | None = None,
) -> int:
    """Check this machine, or that a killed run of your configuration resumes bit-exactly.

    Without options: a line for each thing that training needs. With --resume: kill a run, resume
    it, and compare it by bytes with an uninterrupted run. Options of `fit` follow: --config
    quickstart --model.config.dropout 0.1.

    Args:
        resume: Check that a killed run resumes bit-exactly.
        json: Print the machine's checks as JSON.
        steps: Optimizer steps of each run.
        kills: Times the second run is killed.
        seed: Seed of the times of the kills; null: a random one.
        fit_options: Options of `fit`, which are given without this word.

    Returns:
        0: training works, or the runs are equal; 1: it does not, or they differ.
    """
    options = fit_options or []
    if not (resume or options) and (steps, kills, seed) == (20, 3, None):
        try:
            from gpt_lightning.commands.doctor import check_machine
        except (ImportError, OSError) as error:
            raise UserError(f"PyTorch cannot be imported ({error}): install it again") from error
        return check_machine(json)
    paths = [word for word in resolve_configs(options) if word.startswith("--config=")]
    if not resume or not paths or json:
        raise UserError(
            "give doctor --resume --config quickstart (or your configuration), doctor --json, or "
            "doctor alone"
        )
    if steps < 4 or kills < 1:
        raise UserError(f"--steps is {steps} and --kills {kills}; they must be at least 4 and 1")
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"{steps} steps of {Path(paths[0]).stem}, killed {kills} times; --seed {seed}")
    with tempfile.TemporaryDirectory(prefix="gpt-lightning-doctor-") as root:
        folder = Path(root)
        command = fit_command(options, steps, folder)
        finish([*command, "--run_name=alone"])
        print("left alone: done", flush=True)
        rng, killed = random.Random(seed), [*command, "--run_name=killed", "--resume=auto"]
        run, silent = folder / KILLED, subprocess.DEVNULL
        for number in range(1, kills + 1):  # some steps later, each time
            target = last_step(run) + rng.randint(1, max(1, steps // 3))
            with subprocess.Popen(killed, stdout=silent, stderr=silent) as process:
                try:
                    while process.poll() is None and last_step(run) < target:
                        time.sleep(0.005)
                    time.sleep(rng.random() * 0.05)
                finally:
                    process.kill()
            if process.returncode > 0:
                finish(killed)  # fails again, with its error
            print(f"kill {number}: after step {last_step(run)}", flush=True)
        finish(killed)
        found = compare(folder / ALONE, folder / KILLED)
    for what, equal in found.items():
        print(f"{what:<10}{'equal, byte for byte' if equal else 'DIFFERENT'}")
    good = all(found.values())
    print("bit-exact: a killed run is the same run here" if good else "not bit-exact here")
    return 0 if good else 1


def fit_command(options: list[str], steps: int, folder: Path) -> list[str]:
    """Return the command of a short `fit` without samples that saves often."""
    return [
        *(sys.executable, "-m", "gpt_lightning", "fit"),
        *options,
        f"--trainer.max_steps={steps}",
        "--model.decay_steps=1000000",  # a schedule of the whole run has its end behind this one
        f"--trainer.default_root_dir={folder}",
        "--trainer.log_every_n_steps=1",
        f"--checkpoint.every_n_steps={max(1, steps // 6)}",
        "--checkpoint.keep_last=3",
        "--samples.max_new_tokens=0",
    ]


def finish(command: list[str]) -> None:
    """Run a command to its end.

    Raises:
        UserError: the exit code is not 0; has the last line of the run.
    """
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise UserError(f"fit failed: {last[0].removeprefix('error: ')}")


def last_step(run: Path) -> int:
    """Return the highest step that has been logged; 0 if none."""
    return max((row["step"] for row in read_rows(RunPaths(run).metrics)), default=0)


# ---- comparison ----------------------------------------------------------------------------------


def compare(first: Path, second: Path) -> dict[str, bool]:
    """Return which parts of two finished runs are equal, by name."""
    a, b = map(parts, (first, second))
    return {name: a[name] == b[name] for name in a}


def parts(run: Path) -> Fields:
    """Return what equal runs have in common, by name."""
    state, rows = as_bytes(final_checkpoint(run)), read_rows(RunPaths(run).metrics)
    return {
        "weights": state["state_dict"],
        "optimizer": state["optimizer_states"],
        "data": state["loops"]["fit_loop"]["state_dict"],
        "metrics": [{k: v for k, v in row.items() if not SESSION.fullmatch(k)} for row in rows],
    }


def final_checkpoint(run: Path) -> Fields:
    """Return the content of a run's last checkpoint."""
    from gpt_lightning.runs.checkpoint_io import DurableCheckpointIO
    from gpt_lightning.runs.resume import newest_checkpoint

    return DurableCheckpointIO().load_checkpoint(newest_checkpoint(run))


def as_bytes(state: Any) -> Any:
    """Return nested values with the bytes of each tensor, for which -0.0 and 0.0 differ."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.dtype, state.shape, state.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(state, dict):
        return {key: as_bytes(value) for key, value in state.items()}
    return [as_bytes(value) for value in state] if isinstance(state, list | tuple) else state
