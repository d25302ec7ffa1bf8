"""`gpt-lightning` that is killed before a change of a checkpoint: killed_at.py NUMBER ARGS.

A change is a write of a file's first bytes, an fsync, a rename, or a deletion.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch

from gpt_lightning.cli import main

NUMBER = int(sys.argv[1])
changes = itertools.count(1)


def die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def counted(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of os that kills the process at its turn."""

    def change(target: Any, *args: Any, **kwargs: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else str(target)
        if ".ckpt" in path and next(changes) == NUMBER:
            die()
        return real(target, *args, **kwargs)

    return change


def save(state: Any, file: Any, real: Callable[..., Any] = torch.save) -> None:
    if next(changes) == NUMBER:
        file.write(b"P")
        file.flush()
        die()
    real(state, file)


torch.save = save
for name in ("fsync", "replace", "rename", "unlink", "remove"):
    setattr(os, name, counted(getattr(os, name)))

if __name__ == "__main__":
    sys.exit(main(sys.argv[2:]))
