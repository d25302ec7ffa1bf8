"""Run `fit` on the null GPU and count what a step does: python counted.py JSON fit --config ...

Counted are two steps that are no log steps, by part: between (before a micro-batch), micro (forward
and backward of all micro-batches) and update. JSON is the file for the result. The other arguments
are those of `fit`.
"""

import collections
import ctypes
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import lightning as L
import torch

from gpt_lightning.training import fit

LIBRARY = ctypes.CDLL(None)  # with LD_PRELOAD
STEPS = (5, 6)


def counts() -> collections.Counter[str]:
    """Return the counters by name since the last call, and set them to zero."""
    with tempfile.NamedTemporaryFile() as file:
        LIBRARY.ng_dump(file.name.encode())
        lines = Path(file.name).read_text().splitlines()
    LIBRARY.ng_reset()
    found = (line.split("\t", 1) for line in lines)
    return collections.Counter({name: int(number) for number, name in found})


class Counted(L.Callback):
    """Counters of STEPS, by part of a step."""

    def __init__(self) -> None:
        self.parts = {part: collections.Counter[str]() for part in ("between", "micro", "update")}

    def _until_now(self, step: int, part: str) -> None:
        found = counts()
        if step in STEPS:
            self.parts[part] += found

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._until_now(trainer.global_step, "between")
        if trainer.global_step == STEPS[0]:
            torch.cuda.reset_peak_memory_stats()

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        self._until_now(trainer.global_step, "micro")

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        whole = not trainer.lightning_module.micro_batches
        if trainer.global_step == STEPS[0]:  # before the counted ones
            for callback in trainer.checkpoint_callbacks:
                callback._saver.wait()  # its thread copies once, to have the memory, from step 1 on
        self._until_now(trainer.global_step - whole, "update" if whole else "micro")


def main() -> None:
    """Train, and write the counters."""
    counted = Counted()
    fit.run_cli(sys.argv[2:], callbacks=[counted, *fit.default_callbacks("fit")])
    result: dict[str, Any] = {part: dict(found) for part, found in counted.parts.items()}
    result["graph_breaks"] = sum(torch._dynamo.utils.counters["graph_break"].values())
    result["peak"] = torch.cuda.max_memory_allocated()
    Path(sys.argv[1]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
