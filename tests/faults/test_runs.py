"""Changes in and around a run's folder between two sessions: R35, R36, R38, R43 to R47, R56,
R57, R62, R63."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from exact import checkpoints, must_equal, newest, rows, step_of
from folders import STEPS, contents, copied, run_folder
from harness import RESUME, SilentWrong, fit, gpt, refusals, start_fit

pytestmark = pytest.mark.faults
LOGGERS = {
    "none": False,
    "CSV": {"class_path": "CSVLogger", "init_args": {"save_dir": "csv"}},
    "TensorBoard elsewhere": {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "tb"}},
    "two": [
        {"class_path": "TensorBoardLogger", "init_args": {"save_dir": "tb"}},
        {"class_path": "CSVLogger", "init_args": {"save_dir": "csv"}},
    ],
}


def with_logger(folder: Path, name: str, of: str = "") -> tuple[str, str]:
    """Return the options of a logger; `of` is a part of its own folder's name."""
    text = yaml.safe_dump({"trainer": {"logger": LOGGERS[name]}})
    file = folder / f"logger{of}.yaml"
    file.write_text(text.replace("save_dir: csv", f"save_dir: csv{of}"))
    return "--config", file.name


def sidecar(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


# ---- other commands between two sessions ---------------------------------------------------------


@pytest.mark.case("R35")
@pytest.mark.parametrize("command", ["validate", "predict", "test"])
def test_an_evaluation_between_two_sessions(every, stopped, case, command):
    path = str(newest(run_folder(stopped)))
    ended = gpt(stopped, command, "--config", "run.yaml", "--ckpt_path", path)
    if command == "test":
        ended.refused("test")  # there is no such split
    else:
        ended.ok()
    resumed = fit(stopped, *RESUME).ok()
    assert re.search(r"step 10\b", resumed.out), resumed.out[:1500]
    case.saw(f"{command}: auto continued from step 10")
    must_equal(every, stopped)


@pytest.mark.case("R35")
def test_an_evaluation_of_a_finished_run(every, tmp_path, case):
    folder = copied(every, tmp_path / "work")
    gpt(
        folder, "validate", "--config", "run.yaml", "--ckpt_path", str(newest(run_folder(folder)))
    ).ok()
    before = contents(folder)
    assert "nothing to do" in fit(folder, *RESUME).ok().out
    case.saw("validate after the end: nothing to do")
    assert contents(folder) == before


@pytest.mark.case("R36")
def test_the_config_of_a_resumed_run(every, stopped, case):
    fit(stopped, *RESUME).ok()
    config = str(run_folder(stopped).relative_to(stopped) / "config.yaml")
    path = str(newest(run_folder(stopped)))
    gpt(stopped, "validate", "--config", config, "--ckpt_path", path).ok()
    gpt(stopped, "fit", "--config", config, "--run_name", "again").ok()
    must_equal(run_folder(every), run_folder(stopped, "again"))
    gpt(stopped, "fit", "--config", config, "--resume", "auto").ok()
    gpt(stopped, "doctor", "--resume", "--config", config).ok()
    case.saw("fit, fit --resume auto, validate, doctor --resume: exit 0; fit is the same run")


# ---- digests and files that are none -------------------------------------------------------------


SIDECARS = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "not ASCII": lambda path: path.write_bytes(b"\xff" + path.read_bytes()[1:]),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.case("R38")
@pytest.mark.parametrize("kind", SIDECARS)
def test_every_command_sees_a_digest_that_is_none(stopped, case, kind):
    path = newest(run_folder(stopped))
    SIDECARS[kind](sidecar(path))
    name = str(path)
    commands = [
        ["fit", "--config", "run.yaml", "--resume", "auto"],
        ["fit", "--config", "run.yaml", "--resume", str(path.parents[1])],
        ["checkpoint", "verify", name],
    ]  # the others warn: runs/test_unfit_files.py
    codes = refusals(stopped, commands, [path.name] * len(commands))
    assert set(codes) == {2}, codes
    case.saw(f"{kind}: refused by --resume of a folder and by verify, the other commands warn")


@pytest.mark.case("R46")
@pytest.mark.parametrize("kind", ["fifo", "device"])
def test_a_file_that_is_none(every, stopped, case, kind):
    path = newest(run_folder(stopped))
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    line = gpt(stopped, "fit", "--config", "run.yaml", "--resume", str(path)).refused(path.name)
    gpt(stopped, "sample", str(path), "--max_new_tokens", "3").refused(path.name)
    resumed = fit(stopped, *RESUME).ok()
    assert re.search(r"step 9\b", resumed.out), resumed.out[:1500]
    case.saw(f"{kind}: {line.removeprefix('error: ')}")


@pytest.mark.case("R62")
def test_swapped_files_are_seen(every, stopped, case):
    newer, older = checkpoints(run_folder(stopped))[:2]
    content = newer.read_bytes()
    newer.write_bytes(older.read_bytes())
    older.write_bytes(content)
    third = step_of(checkpoints(run_folder(stopped))[2])
    ended = fit(stopped, *RESUME).ok()
    assert newer.name in ended.err
    assert older.name in ended.err
    assert re.search(rf"step {third}\b", ended.out), ended.out[:1500]
    case.saw(f"two swapped: both named, continued from {third}")
    must_equal(every, stopped)


# ---- what belongs to a run -----------------------------------------------------------------------


@pytest.mark.case("R43")
@pytest.mark.parametrize("what", ["the last rows", "the whole file"])
def test_lost_rows_are_named(every, stopped, case, what):
    file = run_folder(stopped) / "metrics.jsonl"
    lines = [x for x in file.read_text().splitlines(keepends=True) if json.loads(x)["step"] <= 6]
    file.write_text("".join(lines)) if what == "the last rows" else file.unlink()
    ended = fit(stopped, *RESUME).ok()
    said = [line for line in ended.err.splitlines() if "metrics.jsonl" in line]
    if not said:
        raise SilentWrong("rows are missing, and nothing says so")
    case.saw(f"{what}: {said[0]}")
    ours = {row["step"]: row for row in rows(run_folder(stopped)) if row["step"] > 10}
    theirs = {row["step"]: row for row in rows(run_folder(every)) if row["step"] > 10}
    assert ours == theirs


@pytest.mark.case("R44")
def test_a_checkpoint_of_another_run(every, stopped, case):
    """The same model, data and seed, another learning rate, and more steps."""
    fit(stopped, "--run_name", "other", "--model.learning_rate", "1e-3",
        "--trainer.max_steps", "20").ok()  # fmt: skip
    foreign = newest(run_folder(stopped, "other"))
    place = run_folder(stopped) / "checkpoints"
    for path in (foreign, sidecar(foreign)):
        shutil.copy(path, place)
    line = fit(stopped, "--resume", str(place / foreign.name)).refused("another run|run_id|of run")
    ended = fit(stopped, *RESUME).ok()
    assert foreign.name in ended.err, ended.err
    assert re.search(r"step 10\b", ended.out), ended.out[:1500]
    case.saw(f"by name: {line.removeprefix('error: ')}; auto passed over it")
    must_equal(every, stopped)


@pytest.mark.case("R63")
def test_a_text_that_was_edited(stopped, case):
    before = contents(run_folder(stopped))
    text = (stopped / "text.txt").read_text()
    (stopped / "text.txt").write_text(text.replace("cat", "dog", 1))
    line = fit(stopped, *RESUME).refused("data/text-char", "SHA-256")
    case.saw(line.removeprefix("error: "))
    after = contents(run_folder(stopped))
    assert {name: after[name] for name in before} == before


# ---- folders -------------------------------------------------------------------------------------


@pytest.mark.case("R47")
@pytest.mark.parametrize("logger", ["none", "CSV", "two"])
def test_runs_that_start_at_once_never_share_a_folder(whole, folder, case, logger):
    one, other = with_logger(folder, logger, "1"), with_logger(folder, logger, "2")
    with start_fit(folder, *one) as first, start_fit(folder, *other) as second:
        first.end().ok()
        second.end().ok()
    runs = sorted((folder / "lightning_logs" / "run").glob("version_*"))
    if len(runs) != 2:
        raise SilentWrong(f"two runs have {len(runs)} folders")
    case.saw(f"logger {logger}: {', '.join(run.name for run in runs)}, each exact")
    for run in runs:
        must_equal(run_folder(whole), run)


@pytest.mark.case("R56")
@pytest.mark.parametrize("logger", LOGGERS)
def test_a_resume_with_every_logger(whole, folder, case, logger):
    args = with_logger(folder, logger)
    with start_fit(folder, *args) as process:
        process.wait_for(15)
        os.kill(process.process.pid, signal.SIGKILL)
        assert process.end().code == -signal.SIGKILL
    ended = fit(folder, *args, *RESUME).ok()
    assert re.search(r"resume +lightning_logs/run/version_0/", ended.out), ended.out[:1500]
    assert len(list((folder / "lightning_logs" / "run").glob("version_*"))) == 1
    case.saw(f"logger {logger}: exact")
    must_equal(whole, folder)
    sampled = gpt(folder, "sample", "lightning_logs/run", "--max_new_tokens", "5").ok()
    assert sampled.out.strip()


@pytest.mark.case("R57")
@pytest.mark.parametrize("left", ["an empty folder", "run.json alone", "a config and no save"])
def test_killed_while_a_folder_is_claimed(whole, folder, case, left):
    claimed = folder / "lightning_logs" / "run" / "version_0"
    claimed.mkdir(parents=True)
    if left != "an empty folder":
        (claimed / "run.json").write_text('{"run_id": "0123456789abcdef"}\n')
    if left == "a config and no save":
        shutil.copy(folder / "run.yaml", claimed / "config.yaml")
        (claimed / "checkpoints").mkdir()
    before = contents(claimed)
    fit(folder, *RESUME).ok()
    runs = sorted((folder / "lightning_logs" / "run").glob("version_*"))
    assert step_of(newest(runs[-1])) == STEPS
    case.saw(f"{left}: the next session trained in {runs[-1].name}")
    must_equal(run_folder(whole), runs[-1])
    if runs[-1] != claimed:
        assert contents(claimed) == before
