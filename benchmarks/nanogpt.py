"""nanoGPT's train.py, whose steps nanogpt_speed.py, nanogpt_gpu.py and the speedrun measure."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

CPU_CONTEXT = "nullcontext() if device_type == 'cpu' else "  # text of train.py
# a line a step, and one evaluation, of one batch
UNSEEN = ("--eval_iters=1", "--log_interval=1", "--eval_interval=1000000")


def train(folder: Path, options: Sequence[str], autocast: bool = False) -> str:
    """Train in a process of its own; return what it prints.

    Args:
        folder: Folder of nanoGPT with its prepared data.
        options: Options of train.py.
        autocast: Use --dtype on a CPU, too, for which a line is changed in a copy of train.py.

    Raises:
        CalledProcessError: train.py failed; `stderr` has the reason, and so has a traceback.
    """
    program = (folder / "train.py").read_text("utf-8")
    if autocast:
        assert CPU_CONTEXT in program, f"another nanoGPT: {folder}"
        program = program.replace(CPU_CONTEXT, "")
    path = os.pathsep.join([str(folder.resolve()), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryDirectory() as out:
        script = Path(out, "train.py")
        script.write_text(program)
        try:
            done = subprocess.run(
                [sys.executable, str(script), *options, *UNSEEN, f"--out_dir={out}"],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=True,
            )
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise
    return done.stdout


def step_ms(printed: str) -> list[float]:
    """Return the milliseconds of each step that train.py printed."""
    return [float(ms) for ms in re.findall(r"^iter \d+: .* time ([\d.]+)ms", printed, re.M)]
