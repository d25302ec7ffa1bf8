"""RunLogger: one run folder with TensorBoard's events and a metrics file."""

import contextlib
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.tensorboard.summary import hparams

from gpt_lightning.files import explained, write_atomic

EVENTS = "events.out.*"  # TensorBoard's files
# curves whose last values TensorBoard's HPARAMS tab compares
COMPARED_METRICS = ("val/loss", "train/loss", "perf/tokens_per_sec", "perf/mfu")


class RunLogger(TensorBoardLogger):
    """Write TensorBoard's events and `metrics.jsonl` to `save_dir/name/version_N/`.

    A row of the file is one JSON object, flushed at once: `step` (1 is the first optimizer step; a
    training loss precedes its step's update, a validation loss follows it), `time` (seconds since
    the epoch) and the metrics that were logged together.

    Args:
        save_dir: Folder of all runs.
        name: Name of the experiment.
        version: Number of the run; None takes the next number.
        resume_step: Step after which a resumed run continues; rows of later steps, logged by a
            session that was killed, are deleted. None: a new run.
    """

    def __init__(
        self,
        save_dir: str = "lightning_logs",
        name: str = "run",
        version: int | str | None = None,
        resume_step: int | None = None,
    ) -> None:
        purge: dict[str, Any] = {} if resume_step is None else {"purge_step": resume_step + 1}
        super().__init__(save_dir, name=name, version=version, default_hp_metric=False, **purge)
        self._is_new = version is None
        self._resume_step = resume_step
        self._found = set(Path(self.log_dir).glob(EVENTS)) if version is not None else set()
        self._has_logged = False

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with explained("write", Path(self.log_dir)):
            super().finalize(status)
        if status == "failed" and self._is_new:
            self._remove_if_nothing_happened()
        elif not self._is_new and not self._has_logged:
            # a resume with an error, or with nothing to do, leaves the folder as it was
            for path in set(Path(self.log_dir).glob(EVENTS)) - self._found:
                path.unlink(missing_ok=True)

    def _remove_if_nothing_happened(self) -> None:
        # Lightning opens the events file before it checks the settings
        run = Path(self.log_dir)
        if all(path.name.startswith("events.out.") for path in run.glob("*")):
            shutil.rmtree(run, ignore_errors=True)
            for parent in (run.parent, run.parent.parent):
                with contextlib.suppress(OSError):  # not empty: other runs are in it
                    parent.rmdir()

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:  # type: ignore[override]
        with explained("write", Path(self.log_dir)):
            super().log_metrics(metrics, step)
        self._has_logged = True
        finite = {k: v if math.isfinite(v) else None for k, v in metrics.items()}  # JSON has no nan
        row = {"step": step, "time": round(time.time(), 3), **finite}
        path = Path(self.log_dir) / "metrics.jsonl"
        with explained("write", path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if self._resume_step is not None:
                drop_rows_after(path, self._resume_step)
                self._resume_step = None
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row, allow_nan=False) + "\n")

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the hyperparameters so that TensorBoard compares runs by their curves.

        Lightning needs a metric's value at the start and invents one, `hp_metric`; the names of the
        curves are enough.
        """
        self.hparams.update(params)  # for hparams.yaml
        scalars = {k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in params.items()}
        experiment, start, _ = hparams(scalars, dict.fromkeys(COMPARED_METRICS, 0.0))
        writer = self.experiment.file_writer
        writer.add_summary(experiment)
        writer.add_summary(start)


def drop_rows_after(path: Path, step: int) -> None:
    """Rewrite a metrics file without the rows of later steps and without an incomplete last line.

    Args:
        path: File with a JSON object a line; a missing file stays missing.
        step: Last step whose rows are kept, byte for byte.
    """
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if is_row(line, step)]
    write_atomic(path, b"".join(kept))


def is_row(line: bytes, step: int) -> bool:
    """Return whether a line is a complete row of a step up to `step`."""
    try:
        return line.endswith(b"\n") and (json.loads(line)["step"] or 0) <= step
    except (ValueError, KeyError, TypeError):
        return False
