"""Figures and curves of runs, from files that a run writes and from damaged ones."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from gpt_lightning.errors import UserError
from gpt_lightning.runs.history import (
    COLUMNS,
    Timeline,
    find_run,
    find_runs,
    read_changes,
    read_curves,
    read_events,
    read_rows,
    summarize,
)

ROWS = [
    {"step": 10, "time": 105.0, "train/loss": 3.0, "perf/tokens": 100.0},
    {"step": 10, "time": 106.0, "val/loss": 2.9},
    {"step": 20, "time": 110.0, "train/loss": None, "perf/tokens": 200.0},
    {"step": 20, "time": 111.0, "val/loss": 2.5},
]
RATES = {"perf/tokens_per_sec": (10.0, 30.0, 20.0), "perf/mfu": (0.1, 0.5, 0.2)}


def write_lines(path: Path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path) -> Path:
    """A run without its timeline."""
    run = tmp_path / "name/version_0"
    write_lines(run / "metrics.jsonl", ROWS)
    (run / "config.yaml").write_text(
        yaml.safe_dump({"trainer": {"max_steps": 20}, "model": {"a": 1}})
    )
    return run


def event(kind, time, step, **facts):
    return {"time": time, "event": kind, "step": step, **facts}


def test_figures_are_those_of_the_rows(run, tmp_path):
    rates = [
        {"step": 20, "time": 112.0} | {key: v[i] for key, v in RATES.items()} for i in range(3)
    ]
    write_lines(run / "metrics.jsonl", [*ROWS, *rates])
    found = summarize(run, tmp_path)
    assert list(found) == [*COLUMNS, "folder"]
    expected = {"run": "name/version_0", "state": "finished", "steps": 20, "max_steps": 20}
    expected |= {"best_val_loss": 2.5, "tokens_per_sec": 20.0, "mfu": 0.2, "tokens": 200.0}
    assert found | expected == found


@pytest.mark.parametrize(
    ("max_steps", "state"), [(20, "finished"), (30, "stopped"), (-1, "stopped")]
)
def test_the_state_of_a_run_without_a_timeline(run, max_steps, state):
    (run / "config.yaml").write_text(yaml.safe_dump({"trainer": {"max_steps": max_steps}}))
    assert summarize(run, run.parent)["state"] == state


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, ("finished", "")),
        ("max_time", ("stopped", "max_time")),
        (SystemExit(128 + signal.SIGTERM), ("stopped", "SIGTERM")),
        (SystemExit(1), ("stopped", "SystemExit")),
        (KeyboardInterrupt(), ("stopped", "SIGINT")),
        (UserError("a\nb"), ("failed", "UserError: a b")),
    ],
)
def test_the_end_of_a_session_is_its_state(run, reason, expected):
    timeline = Timeline(run)
    timeline.write("begin", 0, steps=40)
    found = summarize(run, run.parent)
    assert (found["state"], found["max_steps"]) == ("running", 40)
    timeline.end(30, reason, {"train": 1.5})
    found = summarize(run, run.parent)
    assert (found["state"], found["reason"]) == expected
    assert found["steps"] == 30
    assert read_events(run)[-1]["seconds"] == {"train": 1.5}


def test_a_session_without_an_end_was_killed(run):
    write_lines(run / "timeline.jsonl", [event("begin", 100.0, 0, steps=-1)])
    found = summarize(run, run.parent)
    assert (found["state"], found["max_steps"]) == ("killed", None)
    assert found["started"].endswith(":01")  # the begin, 100 s after 1970 began, not the first row


@pytest.mark.parametrize("file", ["metrics.jsonl", "timeline.jsonl"])
@pytest.mark.parametrize(
    "line",
    [
        *("garbage\n", "[1]\n", '{"event": 3}\n', "\xff\n", '{"step": 9, "time": "noon"}\n'),
        *('{"step": 9}\n', '{"time": 3, "event": "phase"}\n', "[" * 9999 + "\n"),
        *('{"step": [9], "time": 3, "event": "end"}\n', '{"step": 9, "time": 3, "x": "much"}\n'),
        '{"step": 9, "time": 3, "event": "phase", "name": "stall"}\n',
    ],
)
def test_a_damaged_run_is_a_row(run, file, line):
    with (run / file).open("a", encoding="latin-1") as stream:
        stream.write(line)
    found = summarize(run, run.parent)
    assert (found["run"], found["state"]) == ("version_0", "damaged")
    number = len((run / file).read_bytes().splitlines())
    with pytest.raises(UserError, match=rf"{file}, line {number} .*remove that line"):
        read_curves(run)


@pytest.mark.parametrize("file", ["metrics.jsonl", "timeline.jsonl", "config.yaml"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(run, file):
    (run / file).unlink(missing_ok=True)
    os.mkfifo(run / file)
    assert summarize(run, run.parent)["state"] == "damaged"
    with pytest.raises(UserError, match=rf"{file}.* (a pipe|no file)"):
        (read_curves if file[-1] == "l" and file[0] != "c" else read_changes)(run)


def test_the_settings_of_a_run_say_what_a_resume_has_changed(run):
    first, second = ({"trainer": {"max_steps": n}, "model": {"a": 1 / n}} for n in (20, 40))
    sessions = [(0, first), (10, second), (10, first), (5, second), (5, second)]
    rows = [event("settings", 100.0, step, settings=settings) for step, settings in sessions]
    begins = [event("begin", 100.0, step, steps=20) for step, _ in sessions]
    lines = [row for pair in zip(begins, rows, strict=True) for row in pair]
    write_lines(run / "timeline.jsonl", lines[:4])
    words = {"trainer.max_steps": "20 -> 40 at step 10", "model.a": "0.05 -> 0.025 at step 10"}
    assert read_changes(run) == words
    write_lines(run / "timeline.jsonl", lines)  # the changes at step 10 are taken back
    assert read_changes(run)["trainer.max_steps"] == "20 -> 40 at step 5"
    (run / "timeline.jsonl").unlink()
    assert read_changes(run) == {"trainer.max_steps": 20, "model.a": 1}


def test_an_incomplete_last_line_is_left_out(run):
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 3')
    assert read_rows(run / "metrics.jsonl") == ROWS
    assert read_rows(run / "missing") == []


def test_a_session_begins_on_a_line_of_its_own(run):
    begin = event("begin", 100.0, 0, steps=40)
    path = run / "timeline.jsonl"
    for cut in ('{"time": 10', "é" * 9000):
        path.write_text(json.dumps(begin) + "\n" + cut)
        timeline = Timeline(run)
        timeline.write("begin", 20, steps=40)
        timeline.end(40, None, {})
        assert [row["event"] for row in read_events(run)] == ["begin", "begin", "end"]
    assert summarize(run, run.parent)["state"] == "finished"


def test_runs_are_found_at_any_depth_and_evaluations_are_none(tmp_path, run):
    for name in ("other/validate_0", "other/predict_12", "deep/case/version_0/rung", "empty/a"):
        (tmp_path / name).mkdir(parents=True)
        if name != "empty/a":
            (tmp_path / name / "run.json").touch()
    (tmp_path / "checked/version_1/checkpoints").mkdir(parents=True)
    (tmp_path / "checked/version_1/kept").mkdir()
    (tmp_path / "checked/version_1/kept/config.yaml").touch()  # inside of a run
    found = {str(path.relative_to(tmp_path)) for path in find_runs(tmp_path)}
    assert found == {"name/version_0", "deep/case/version_0/rung", "checked/version_1"}
    assert find_runs(run) == [run]
    assert find_run(str(run.parent)) == find_run(str(run)) == run
    with pytest.raises(UserError, match=r"has no metrics\.jsonl"):
        find_run(str(tmp_path))


def test_runs_behind_links_are_found_once(tmp_path, run):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/elsewhere").symlink_to(run.parent)
    assert find_runs(tmp_path / "logs") == [tmp_path / "logs/elsewhere/version_0"]
    (tmp_path / "logs/again").symlink_to(run)
    (tmp_path / "logs/up").symlink_to(tmp_path)
    assert [path.resolve() for path in find_runs(tmp_path / "logs")] == [run]


def test_curves_of_a_run(run):
    curves = read_curves(run)
    assert curves["train"][0] == (9, 90.0, 0.0, 3.0)  # before the update of step 10
    step, tokens, seconds, loss = curves["train"][1]
    assert (step, tokens, seconds) == (19, 190.0, 5.0)
    assert math.isnan(loss)
    assert curves["val"] == [(10, 100.0, 1.0, 2.9), (20, 200.0, 6.0, 2.5)]
    assert curves["rate"] == curves["phases"] == []


def test_tokens_after_the_last_count_and_without_one(run):
    write_lines(run / "metrics.jsonl", [*ROWS[:2], {"step": 25, "time": 120.0, "val/loss": 2.0}])
    assert read_curves(run)["val"][1][:2] == (25, 250.0)
    write_lines(run / "metrics.jsonl", [ROWS[1]])
    assert math.isnan(read_curves(run)["val"][0][1])


def test_wall_time_continues_in_a_resumed_run(run):
    events = [
        event("begin", 100.0, 0, steps=20),
        event("phase", 107.0, 10, name="validation", seconds=1.5),
        event("phase", 109.0, 18, name="checkpoint", seconds=1.0),  # its step is taken back
        event("begin", 1000.0, 10, steps=20),
        event("phase", 1004.0, 20, name="stall", seconds=2.0),
        event("end", 1005.0, 20, state="finished", reason=""),
    ]
    later = [row | {"time": row["time"] + 893.0} for row in ROWS[2:]]  # 1003 and 1004
    write_lines(run / "timeline.jsonl", events)
    write_lines(run / "metrics.jsonl", [*ROWS[:2], *later])
    assert len(read_events(run)) == 5
    curves = read_curves(run)
    # the first session lasted from 100 to 107
    assert [point[2] for point in curves["val"]] == [6.0, 7.0 + 4.0]
    assert curves["phases"] == [("validation", 5.5, 1.5), ("stall", 7.0 + 2.0, 2.0)]


def test_the_figures_need_neither_torch_nor_numpy(run):
    code = (
        "import sys; from gpt_lightning.cli import main; assert main(sys.argv[1:]) == 0; "
        "print({'torch', 'numpy', 'lightning', 'matplotlib'} & {*sys.modules})"
    )
    command = [sys.executable, "-c", code, "runs", str(run.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
