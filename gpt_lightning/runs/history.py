"""Timeline of a run, and figures and curves of runs from the files in their folders.

Neither a checkpoint nor torch is read.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from itertools import pairwise
from math import nan
from pathlib import Path
from typing import Any

from gpt_lightning.errors import UserError, one_line, reason_of
from gpt_lightning.files import Fields, check_regular, explained, is_held, yaml_beside
from gpt_lightning.parsing import read_config
from gpt_lightning.runs.folders import RunPaths, choose_run, lock_folder

COLUMNS: dict[str, Fields] = yaml_beside(__file__)
NAMES = RunPaths(Path())
# types of the values of rows and events, and keys that an event has; other values are numbers
KINDS: Fields = dict.fromkeys(("event", "name", "state", "reason", "text"), str)
KINDS |= {"time": int | float, "seconds": int | float | dict, "steps": int}
KINDS |= dict.fromkeys(("settings", "facts"), dict)
NEEDED = {"begin": "steps", "settings": "settings", "phase": "name seconds", "end": "state reason"}
NEEDED |= {"sample": "text"}
TAKE: Fields = {"min": min, "median": statistics.median, "max": max}


# ---- written by a run ---------------------------------------------------------------------------


class Timeline:
    """Events of a session in the run's `timeline.jsonl`, one JSON object a line.

    Each has `time` (seconds since the epoch), `event` and `step`. Events: `begin` with `steps`, the
    steps of the whole run, or 0, and `peak_flops`, to which MFU is relative, or null; `settings`
    with all `settings` of the session, and `facts`, its command, machine and banner; `sample` with
    a generated `text`; `phase` with `name` and `seconds`, at the end of each time that is no
    training, and for a stall; `tokens` with `perf/tokens`, those of the whole run; `end` with
    `state`, `reason`, and `seconds` by phase. The run's lock is held while the session lives, so
    that one without an end is known to run or to be killed.

    Args:
        folder: Run folder.

    Raises:
        UserError: Another process is training there.
    """

    def __init__(self, folder: Path):
        self._lock = contextlib.ExitStack()
        self._lock.enter_context(lock_folder(folder))
        self._file = RunPaths(folder).timeline.open("ab+")
        # a full disk may have cut the last line
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)

    def write(self, event: str, step: int, **facts: Any) -> None:
        """Append an event of this moment.

        Raises:
            UserError: The file cannot be written.
        """
        row = {"time": round(time.time(), 3), "event": event, "step": step, **facts}
        with explained("write", self._file.name):
            self._file.write(json.dumps(row).encode() + b"\n")
            self._file.flush()

    def end(
        self, step: int, reason: BaseException | str | None, seconds: Mapping[str, float]
    ) -> None:
        """Append the end of the session, and close and unlock the file.

        Args:
            step: Optimizer steps done.
            reason: Exception, or name of the setting, that has stopped the run; None: it is
                finished.
            seconds: Wall seconds of the session by phase.

        Raises:
            UserError: The file cannot be written.
        """
        state = "finished" if reason is None else "stopped"
        if isinstance(reason, KeyboardInterrupt):
            reason = "SIGINT"
        elif isinstance(reason, SystemExit):  # StopSignals adds 128 to the number of the signal
            names = {str(128 + number): number.name for number in signal.Signals}
            reason = names.get(str(reason.code), "SystemExit")
        elif isinstance(reason, BaseException):
            state, reason = "failed", one_line(f"{type(reason).__name__}: {reason}")
        self.write("end", step, state=state, reason=reason or "", seconds=seconds)
        self._file.close()
        self._lock.close()


# ---- files ---------------------------------------------------------------------------------------


def find_runs(folder: Path) -> list[Path]:
    """Return the folders of training runs in a folder, at any depth; its own if it is a run."""
    found, seen = [], set()
    marks = {file.name for file in (NAMES.metrics, NAMES.identity, NAMES.config)}
    for path, names, files in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(path)) in seen:  # a link may lead upwards
            names.clear()
        elif marks & {*files} or NAMES.checkpoints.name in names:
            names.clear()
            if not re.fullmatch(r"(validate|test|predict)_\d+", Path(path).name):
                found.append(Path(path))
        seen.add(real)
    return found


def find_run(address: str) -> Path:
    """Return the folder of the run that `choose_run` finds.

    Raises:
        UserError: There is no run with logged metrics.
    """
    found = choose_run(Path(address), lambda run: run.metrics.exists()) if address else None
    if not found:
        raise UserError(f"{address!r} has no {NAMES.metrics}: give a run, lightning_logs/NAME")
    return found.run


def read_rows(path: Path, needed: tuple[str, ...] = ("time",)) -> list[Fields]:
    """Return the objects in a file of JSON lines; none if it is missing.

    An incomplete last line is left out, as the run may go on.

    Args:
        path: Metrics file or timeline of a run.
        needed: Keys that all lines have, beside `step`.

    Raises:
        UserError: A line is no JSON object, or has not the keys and types of `checked_row`; or the
            file is a folder or a pipe.
    """
    if not path.exists():
        return []
    check_regular(path, "restore the file, or move it away")
    rows, decode = [], json.JSONDecoder(parse_constant=lambda word: None).decode
    for number, line in enumerate(path.read_bytes().splitlines(True), 1):
        try:
            rows.append(checked_row(decode(line.decode()), needed))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            if line.endswith(b"\n"):
                raise UserError(
                    f"{path}, line {number} is damaged ({reason_of(error)}): remove that line"
                ) from error
    return rows


def checked_row(row: Any, needed: tuple[str, ...]) -> Fields:
    """Return a row of a metrics file or of a timeline.

    Args:
        row: Value of a line.
        needed: Keys that all lines have.

    Raises:
        TypeError, KeyError, ValueError: It is no object, or a key is missing or of another type.
    """
    row = dict(row)
    row["step"] = row["step"] or 0  # a logger may have been called without one
    is_event = "event" in needed  # a metric may have any name
    more = NEEDED.get(str(row.get("event")), "").split() if is_event else []
    for key in [*needed, *more, *row]:
        kind = KINDS.get(key) if is_event or key in needed else None
        if not isinstance(row[key], kind or int | float | None):
            raise ValueError(f"{key} is {row[key]!r}"[:80])
    return row


def read_settings(run: Path) -> Fields:
    """Return the settings in a run's config.yaml by key, such as model.learning_rate.

    Raises:
        UserError: The file is no YAML, or has no keys.
    """
    path = RunPaths(run).config
    return flat(read_config(path)) if path.exists() else {}


def flat(settings: Any, prefix: str = "") -> Fields:
    """Return the values of nested settings by key, with dots."""
    if not isinstance(settings, dict):
        return {prefix[:-1]: settings}
    return {k: v for name in settings for k, v in flat(settings[name], f"{prefix}{name}.").items()}


def read_changes(run: Path, kind: str = "settings") -> Fields:
    """Return the settings of a run; `0.008 -> 0.004 at step 280` for what a resume has changed.

    Args:
        run: Run folder.
        kind: `facts` returns the facts of its sessions instead.

    Raises:
        UserError: config.yaml or timeline.jsonl is damaged.
    """
    events = [event for event in read_events(run) if event["event"] == "settings"]
    sessions = [(event["step"], flat(event.get(kind) or {})) for event in events]
    sessions = sessions or [(0, read_settings(run) if kind == "settings" else {})]
    words = sessions[0][1]
    for (_, last), (step, settings) in pairwise(sessions):
        changed = {key for key in settings if key in last and settings[key] != last[key]}
        texts = {key: f"{words[key]} -> {settings[key]} at step {step}" for key in changed}
        words = settings | words | texts
    return words


def read_events(run: Path) -> list[Fields]:
    """Return the events of a run, without those of steps that a resume has taken back."""
    kept: list[Fields] = []
    for event in read_rows(RunPaths(run).timeline, ("time", "event")):
        if event["event"] == "begin":
            kept = [row for row in kept if row["step"] <= event["step"]]
        kept.append(event)
    return kept


# ---- figures -------------------------------------------------------------------------------------


def summarize(run: Path, root: Path) -> Fields:
    """Return the figures of a run: those of COLUMNS, and its folder; None: unknown.

    Args:
        run: Run folder. If a file in it cannot be read, its state is `damaged`.
        root: Folder that its name is relative to.
    """
    name = run.resolve().name if run == root else os.path.relpath(run, root)
    known = dict.fromkeys(COLUMNS) | {"run": name, "folder": str(run)}
    known["started"] = in_words(run.stat().st_mtime)
    try:
        return known | figures(run)
    except Exception as error:  # any content may raise any error
        return known | {"state": "damaged", "reason": reason_of(error)}


def in_words(time: float) -> str:
    """Return a time since the epoch as local date and minute."""
    return datetime.fromtimestamp(time).isoformat(" ", "minutes")


def figures(run: Path) -> Fields:
    """Return the figures of a run whose files are whole."""
    rows, events = read_rows(RunPaths(run).metrics), read_events(run)
    begins = [event for event in events if event["event"] == "begin"]
    total = begins[-1]["steps"] if begins else read_settings(run).get("trainer.max_steps") or 0
    ends = events + rows[:1] + rows[-1:]
    saved = RunPaths(run).saved()[:1]
    steps = max([row["step"] for row in ends] + [file.step for file in saved], default=0)
    found = {"steps": steps, "max_steps": total if total > 0 else None}
    found["state"], found["reason"] = state_of(run, events, steps >= total > 0)
    for name, column in COLUMNS.items():
        metric = column.get("metric", "")
        values = [float(row[metric]) for row in rows + events if row.get(metric)]
        if values:
            found[name] = TAKE[column["take"]](values)
    return found | ({"started": in_words(min(row["time"] for row in ends))} if ends else {})


def state_of(run: Path, events: list[Fields], complete: bool) -> tuple[str, str]:
    """Return the state of a run (finished, stopped, failed, running, killed, unknown), and why.

    Args:
        run: Run folder.
        events: Events of the run.
        complete: True if all steps are done.
    """
    if events and events[-1]["event"] == "end":
        return events[-1]["state"], events[-1]["reason"]
    lock = RunPaths(run).lock
    try:
        if is_held(lock):
            return "running", ""
    except OSError as error:  # a run of another user
        return "unknown", f"{lock}: {error.strerror}"
    ended = "killed" if events else "stopped"
    return ("finished" if complete else ended), ""


# ---- curves --------------------------------------------------------------------------------------


def read_curves(run: Path) -> Fields:
    """Return the curves of a run.

    A training loss precedes its step's update, a validation loss follows it. Wall time begins with
    the first step; the pauses between sessions are left out.

    Returns:
        `train`, `train_eval`, `val`, `bits` per byte, `mfu`, and `rate` in tokens/s: tuples of
        step, tokens, wall seconds, value (NaN where unknown). `phases`: name, begin and duration in
        wall seconds.

    Raises:
        UserError: A file is damaged.
    """
    rows, events = read_rows(RunPaths(run).metrics), read_events(run)
    elapsed = wall_clock(rows, events)

    def points(key: str, updates: int = 0) -> list[tuple[float, ...]]:
        found = [row for row in rows if key in row]
        steps = [row["step"] - updates for row in found]
        seconds = [elapsed(row["time"]) for row in found]
        values = [nan if row[key] is None else row[key] for row in found]
        return list(zip(steps, tokens_at(steps, rows), seconds, values, strict=True))

    return {
        "train": points("train/loss", updates=1),
        "train_eval": points("train/eval_loss"),
        "val": points("val/loss"),
        "bits": points("val/bits_per_byte"),
        "rate": points("perf/tokens_per_sec"),
        "mfu": points("perf/mfu"),
        "phases": [
            (event["name"], elapsed(event["time"]) - event["seconds"], event["seconds"])
            for event in events
            if event["event"] == "phase"
        ],
    }


def tokens_at(steps: list[int], rows: list[Fields]) -> list[float]:
    """Return the tokens until each step, by the logged counts; NaN without counts.

    After the last count, each step has the mean number of tokens.
    """
    import numpy as np  # only curves need it

    counts = {0: 0.0} | {row["step"]: row["perf/tokens"] for row in rows if row.get("perf/tokens")}
    last, end = max(counts), max(0, *counts, *steps)
    counts[end] = counts[last] / last * end if last else nan
    return np.interp(steps, list(counts), list(counts.values())).tolist()


def wall_clock(rows: list[Fields], events: list[Fields]) -> Callable[[float], float]:
    """Return the function from a time to the wall seconds of the run's sessions until then."""
    marks = sorted((row["time"], row.get("event") == "begin") for row in rows + events)
    # time at which a session begins, and seconds to take away from its times
    sessions = [(marks[0][0], marks[0][0])] if marks else []
    for (last, _), (now, begins) in pairwise(marks):
        if begins:
            sessions.append((now, sessions[-1][1] + now - last))
    return lambda now: now - max(away for begin, away in sessions if begin <= now)
