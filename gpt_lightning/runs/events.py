"""RunEvents: TensorBoard's files in the folder of a run."""

import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from gpt_lightning.files import explained
from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.logger import EVENTS, RunLogger, rows_until

# events.yaml: charts by category, descriptions by curve, first hyperparameters, compared metrics
_TABLES: Any = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
CHARTS: dict[str, dict[str, Any]] = _TABLES["charts"]
DESCRIPTIONS: dict[str, str] = _TABLES["descriptions"]
FLUSH_S = 1.0  # shortest time between two flushes: each waits for the writer's thread
# curves over tokens; their group precedes the others, so TIME SERIES shows the losses first
OVER_TOKENS = {"train/loss": "loss_by_tokens/train", "val/loss": "loss_by_tokens/val"}
# address of the charts in a browser, without smoothing, which would hide where a curve ends
PAGE = "http://localhost:6006/?smoothing=0#custom_scalars&_smoothingWeight=0"


class RunEvents(TensorBoardLogger):
    """TensorBoard's events in the folder of a run.

    Each loss is written twice, over steps and over tokens, since TensorBoard has one x-axis.

    Args:
        run: Owner of the folder.
    """

    def __init__(self, run: RunLogger) -> None:
        step = run.resume_step
        super().__init__(
            run.runs.parent,
            name=run.runs.name,
            default_hp_metric=False,
            # drop points of a killed session; --load_fast=false needs such a mark in every file
            purge_step=0 if step is None else step + 1,
        )
        self._run, self._begun = run, False
        self._resumed = None if step is None else (step, run.resume_rows)
        self._found = set() if step is None else set(run.folder.glob(EVENTS))
        self._described: set[str] = set()
        self._flushed_s = -math.inf
        run.on_sync = self.flush

    @property
    def log_dir(self) -> str:
        return self._run.save_dir or self.root_dir

    @property
    def version(self) -> str:
        return Path(self.log_dir).name

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        with explained("write", self.log_dir):
            if not self._begun:
                self._begun = True
                self.experiment.add_custom_scalars(CHARTS)
                if self._resumed is not None:
                    # a resume makes TensorBoard drop all points with an x above its step
                    for line in rows_until(RunPaths(self._run.folder).metrics, *self._resumed):
                        self._write_over_tokens(json.loads(line))
            described = {}
            for tag, value in metrics.items():
                if tag not in DESCRIPTIONS:
                    super().log_metrics({tag: value}, step)
                # a validation has the count of its step for loss_by_tokens alone
                elif tag != "perf/tokens" or "val/loss" not in metrics:
                    described[tag] = value
            if described:
                self._write(described, step)
            self._write_over_tokens(metrics)

    def _write(self, points: dict[str, float], x: int | None, time_s: float | None = None) -> None:
        """Write points as one event, the first of each curve with the curve's description.

        The writer's thread wakes up for each event, and this thread waits for it.
        """
        from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR, Summary
        from tensorboard.plugins.scalar.metadata import create_summary_metadata

        summary = Summary()
        for tag, y in points.items():
            point = summary.value.add(tag=tag, simple_value=float(y))
            if tag not in self._described:
                self._described.add(tag)
                point.metadata.CopyFrom(create_summary_metadata(tag, DESCRIPTIONS[tag]))
                point.metadata.data_class = DATA_CLASS_SCALAR
        self.experiment.file_writer.add_summary(summary, x, time_s)

    def _write_over_tokens(self, row: Mapping[str, float | None]) -> None:
        tokens = row.get("perf/tokens")
        for tag, over_tokens in OVER_TOKENS.items():
            if tokens is not None and tag in row:
                y = math.nan if (value := row[tag]) is None else value  # JSON has no NaN
                self._write({over_tokens: y}, int(tokens), row.get("time"))

    def save(self) -> None:
        """Flush the events, once a second; RunLogger.sync flushes all of them."""
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self.flush()

    @rank_zero_only
    def flush(self) -> None:
        """Write all events so far to the file."""
        self._flushed_s = time.monotonic()
        super().save()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        with explained("write", self.log_dir):
            super().finalize(status)
        if self._run.resume_step is not None:
            # a resume with an error, or with nothing to do, leaves the folder as it was
            for path in set(self._run.folder.glob(EVENTS)) - self._found:
                path.unlink(missing_ok=True)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any], *args: Any, **kwargs: Any) -> None:  # type: ignore[override]
        """Write the hyperparameters so that TensorBoard compares runs by their curves.

        Lightning needs a metric's value at the start and invents one, `hp_metric`; the names of the
        curves are enough.
        """
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
        from torch.utils.tensorboard.summary import hparams  # imports TensorBoard

        self.hparams.update(params)  # for hparams.yaml
        # a bool would be shown as a number
        scalars = {k: v if type(v) in (int, float) else str(v) for k, v in params.items()}
        experiment, start, _ = hparams(scalars, dict.fromkeys(_TABLES["metrics"], 0.0))
        plugin = experiment.value[0].metadata.plugin_data
        columns = HParamsPluginData.FromString(plugin.content)
        for column in columns.experiment.hparam_infos:
            column.differs = column.name in _TABLES["hyperparameters"]  # the first columns
        for metric in columns.experiment.metric_infos:
            metric.description = DESCRIPTIONS[metric.name.tag]
        plugin.content = columns.SerializeToString()
        writer = self.experiment.file_writer
        writer.add_summary(experiment)
        writer.add_summary(start)
