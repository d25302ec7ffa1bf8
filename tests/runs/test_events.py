"""RunEvents: each point once, over steps and over tokens, with charts, units and columns."""

import json
import math
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import (
    EventAccumulator as ServersAccumulator,
)
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.summary.writer import event_file_writer
from tensorboard.util import tensor_util
from torch.utils.tensorboard import SummaryWriter

from gpt_lightning.runs.folders import RunPaths
from gpt_lightning.runs.logger import CHARTS, OVER_TOKENS, RunEvents, RunLogger

NUMBERS = {"scalars": 0, "tensors": 0}  # keep all


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    # files of one second are read in the order of a number in their names, and 10 precedes 9
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    return tmp_path / "logs" / "run"


def session(runs: Path, first: int, last: int, **resume) -> Path:
    """Log the losses of some steps of 100 tokens, and end as a killed run does."""
    folder = runs / "version_0" if resume else None
    run = RunLogger(runs, folder=folder, **resume)
    events = RunEvents(run)
    for step in range(first, last + 1):
        for metrics in (
            {"train/loss": 1 / step, "perf/tokens": step * 100.0, "other": 1.0},
            {"val/loss": 2 / step, "perf/tokens": step * 100.0},
        ):
            for logger in (events, run):
                logger.log_metrics(metrics, step)
    events.experiment.flush()
    return run.folder


def loaded(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance=NUMBERS).Reload()


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in loaded(folder).Scalars(tag)]


@pytest.mark.parametrize("resumed_at", [0, 3, 5])
def test_a_resumed_run_has_each_point_once_over_steps_and_over_tokens(runs, resumed_at):
    session(runs, 1, 5)
    resume = {"resume_step": resumed_at, "resume_rows": 2 * resumed_at}
    folder = session(runs, resumed_at + 1, 8, **resume)
    for tag, y in (("train/loss", 1), ("val/loss", 2)):
        expected = [(step, pytest.approx(y / step)) for step in range(1, 9)]
        assert points(folder, tag) == expected
        over_tokens = [(100 * step, loss) for step, loss in expected]
        assert points(folder, OVER_TOKENS[tag]) == over_tokens
        # what TensorBoard itself shows without its fast loader
        server = ServersAccumulator(str(folder), size_guidance=NUMBERS).Reload()
        assert [point.step for point in server.Tensors(tag)] == [step for step, _ in expected]
        assert [p.step for p in server.Tensors(OVER_TOKENS[tag])] == [x for x, _ in over_tokens]
    lines = RunPaths(folder).metrics.read_text().splitlines()[: 2 * resumed_at : 2]
    times = [point.wall_time for point in loaded(folder).Scalars(OVER_TOKENS["train/loss"])]
    assert times[:resumed_at] == [json.loads(line)["time"] for line in lines]


def test_points_up_to_the_save_of_a_step_stay(runs):
    session(runs, 1, 3)
    folder = session(runs, 1, 0, resume_step=3, resume_rows=6)  # ends before its first row
    assert points(folder, OVER_TOKENS["train/loss"]) == [
        (100 * step, pytest.approx(1 / step)) for step in (1, 2, 3)
    ]
    # the validation of step 3 came after this save, and the next session repeats it
    session(runs, 4, 4, resume_step=3, resume_rows=5)
    assert [x for x, _ in points(folder, OVER_TOKENS["val/loss"])] == [100, 200, 400]


def test_a_resume_replaces_the_hyperparameters(runs):
    for session_number, rate in enumerate((0.008, 0.004)):
        folder = runs / "version_0" if session_number else None
        run = RunLogger(runs, folder=folder, resume_step=session_number or None)
        events = RunEvents(run)
        events.log_hyperparams({"learning_rate": rate})
        events.finalize("success")
    metadata = loaded(run.folder).summary_metadata["_hparams_/session_start_info"]
    start = HParamsPluginData.FromString(metadata.plugin_data.content).session_start_info
    assert start.hparams["learning_rate"].number_value == 0.004
    assert yaml.safe_load((run.folder / "hparams.yaml").read_text()) == {"learning_rate": 0.004}
    assert len([*run.folder.glob("*hparams")]) == 1


def test_a_validation_adds_no_point_to_the_count_of_tokens(runs):
    folder = session(runs, 1, 2)
    assert points(folder, "perf/tokens") == [(1, 100.0), (2, 200.0)]
    assert points(folder, "other") == [(1, 1.0), (2, 1.0)]  # a callback's metric


def test_a_loss_that_is_no_number_is_drawn_as_none(runs):
    session(runs, 1, 1)
    run = RunLogger(runs, folder=runs / "version_0")
    run.log_metrics({"train/loss": math.nan, "perf/tokens": 200.0}, 2)
    folder = session(runs, 3, 3, resume_step=2, resume_rows=3)
    found = points(folder, OVER_TOKENS["train/loss"])
    assert [x for x, _ in found] == [100, 200, 300]
    assert math.isnan(found[1][1])


def test_the_charts_begin_with_both_losses(runs):
    events = loaded(session(runs, 1, 1))
    (tensor,) = events.Tensors("custom_scalars__config__")
    layout = layout_pb2.Layout.FromString(tensor_util.make_ndarray(tensor.tensor_proto).item())
    assert [category.title for category in layout.category] == list(CHARTS)
    first = layout.category[0].chart[0]
    assert list(first.multiline.tag) == ["train/loss$", "val/loss$"]


def test_hyperparameters_have_the_curves_to_compare_and_no_false_point(runs):
    run = RunLogger(runs)
    events = RunEvents(run)
    events.log_hyperparams({"a": 1, "optimizer": "muon", "seed": 1337, "fused": False, "b": None})
    events.experiment.flush()
    found = loaded(run.folder)
    assert found.Tags()["scalars"] == []  # Lightning's own method would draw 0.0 at step 0
    experiment, start = (
        HParamsPluginData.FromString(
            found.summary_metadata[f"_hparams_/{name}"].plugin_data.content
        )
        for name in ("experiment", "session_start_info")
    )
    metrics = experiment.experiment.metric_infos
    assert [metric.name.tag for metric in metrics][:2] == ["val/loss", "train/loss"]
    values = start.session_start_info.hparams
    assert (values["fused"].string_value, values["seed"].number_value) == ("False", 1337)
    assert values["b"].string_value == "None"


def test_events_are_flushed_every_second_and_before_a_checkpoint(runs, monkeypatch):
    run, options = RunLogger(runs), {}
    real = SummaryWriter.__init__
    monkeypatch.setattr(
        SummaryWriter, "__init__", lambda *args, **kw: options.update(kw) or real(*args, **kw)
    )
    events = RunEvents(run)
    events.log_metrics({"train/loss": 1.0}, 1)
    assert options["flush_secs"] == 1
    run.sync()
    assert points(run.folder, "train/loss") == [(1, 1.0)]
