"""`python -m experiments.speedrun`: times, rules, nanoGPT beside, page and ledger."""

import json
from pathlib import Path

import pytest
import yaml
from tiny_fit import TINY_FIT

from experiments.speedrun import command as speedrun
from experiments.speedrun import page as speedrun_page
from experiments.speedrun.command import run
from experiments.speedrun.model import SpeedrunGPT
from experiments.speedrun.tracks import RULES, TRACKS, Result, SeedRow, Track
from gpt_lightning.cli import main
from gpt_lightning.reproduce.published import CURVES, read_curve
from gpt_lightning.runs.history import read_events
from gpt_lightning.runs.sources import load_model

TRACK = Track("time-9", "time to 9", 9.0, "config", 100, "shakespeare-small", "config/tiny.py")
SETTINGS = {
    "data": {"corpus": "tinyshakespeare", "tokenizer": "char", "val_fraction": 0.1},
    "trainer": {"max_steps": 6, "overfit_batches": 0.0},
    "model": {"config": {"n_layer": 1, "n_head": 1, "n_embd": 8}},
}
pytestmark = pytest.mark.usefixtures("own_folder")


def write_run(folder, settings=SETTINGS):
    """A run of 6 steps in 10 s, validated after 3 of them for 2 s, and at its end for 3 s."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    seconds = {"start-up": 1.0, "compile and warm-up": 4.0, "train": 4.5, "validation": 5.0}
    events = [
        {"time": 100.0, "event": "begin", "step": 0, "steps": 6},
        {"time": 106.0, "event": "phase", "step": 3, "name": "validation", "seconds": 2.0},
        {"time": 113.0, "event": "phase", "step": 6, "name": "validation", "seconds": 3.0},
        {"time": 113.5, "event": "end", "step": 6, "state": "finished", "reason": ""}
        | {"seconds": seconds | {"wrap-up": 0.5}},
    ]
    rows = [
        {"time": 106.0, "step": 3, "val/loss": 2.5, "perf/tokens": 300.0},
        {"time": 113.0, "step": 6, "val/loss": 1.5, "perf/tokens": 600.0},
    ]
    for name, lines in {"timeline": events, "metrics": rows}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def test_the_time_of_a_run_is_without_its_validations(tmp_path):
    row = speedrun.read_run(3, write_run(tmp_path / "run"), 20.0)
    assert (row.seed, row.loss, row.steps, row.tokens, row.process_s) == (3, 1.5, 6, 600.0, 20.0)
    assert (row.time_s, row.compile_s) == (10.0, 4.0)
    # 1 s of start-up; 4 s until the first validation, 5 s until the second
    assert row.curve == [(5.0, 2.5), (9.0, 1.5)]
    table, pairs, positions, block = 65 * 8, 0, 1024 * 8, 12 * 64 + 13 * 8
    assert row.parameters == table + pairs + positions + block + 2 * 8


def changed(**changes):
    settings = yaml.safe_load(yaml.safe_dump(SETTINGS))
    for key, value in changes.items():
        room, _, name = key.partition("__")
        settings[room][name] = value
    return settings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"data__corpus": "shakespeare-plays"}, ["data.corpus is shakespeare-plays; the rules"]),
        ({"data__eval_batches": 10}, ["data.eval_batches is 10"]),
        ({"trainer__limit_val_batches": 0.5}, ["trainer.limit_val_batches is 0.5"]),
        ({"model__init_from": "run"}, ["model.init_from is run"]),
        ({"trainer__max_steps": 7}, ["the last validation was at step 6"]),
        (
            {"trainer__callbacks": [{"class_path": "lightning.pytorch.callbacks.EarlyStopping"}]},
            ["EarlyStopping is not among EMAWeightAveraging"],
        ),
        ({"trainer__callbacks": [{"class_path": "L.EMAWeightAveraging"}]}, []),
        (
            {"model__config": {"n_layer": 1, "n_head": 1, "n_embd": 2048}},
            ["parameters; at most 11"],
        ),
    ],
)
def test_each_rule_is_checked(tmp_path, changes, named):
    run = write_run(tmp_path / "run", changed(**changes))
    found = speedrun.problems(run, speedrun.read_run(1, run, 1.0))
    assert len(found) == len(named)
    assert all(name in text for name, text in zip(named, found, strict=True)), found


def seed_row(seed=1, loss=8.0, time_s=100.0):
    curve = ((50.0, 10.0), (time_s, loss))
    return SeedRow(seed, loss, time_s, 4.0, time_s + 5.0, 6, 600.0, 1000, curve)


def test_short_records_have_five_seeds_and_long_ones_three():
    def found(n, time_s, loss=8.0, nanogpt=True):
        rows = [seed_row(i, loss, time_s) for i in range(n)]
        return speedrun.shortfalls(TRACK, rows, nanogpt)

    assert found(5, 299.0) == []
    assert found(3, 301.0) == []
    assert found(4, 299.0) == ["4 seeds; a record has 5: give --seeds"]
    assert found(2, 301.0) == ["2 seeds; a record has 3: give --seeds"]
    assert found(5, 9.0, 9.01) == ["the mean loss is 9.0100; the target is 9.0"]
    assert "--nanogpt DIR" in found(5, 9.0, nanogpt=False)[0]


def result(time_s=100.0, breaches=(), step_s=2.0):
    rows = [seed_row(1, 8.0, time_s), seed_row(2, 8.5, time_s + 20)]
    return Result(TRACK, "cpu", rows, step_s, breaches)


def test_records_enter_the_ledger_with_their_gain(tmp_path, capsys):
    for time_s, change in ((90.0, "the first"), (40.0, "half the steps")):
        speedrun_page.write(result(time_s), change, tmp_path / "out", tmp_path / "runs", "speedrun")
    page = (tmp_path / "out/README.md").read_text()
    first, second = (line.split(" | ") for line in page.splitlines()[-2:])
    assert first[0] == "| [time-9](time-9-cpu.md)"
    assert first[4:8] == ["2", "8.2500", "8.5000", "100.0"]
    assert first[9:] == ["200", "2.0", "the first", "the first |"]
    assert second[10:] == ["4.0", "half the steps", "2.00 times faster |"]
    assert (tmp_path / "out/time-9-cpu.png").stat().st_size > 10_000
    page = " ".join((tmp_path / "out/time-9-cpu.md").read_text().split())
    assert "200 s, 4.0 times as long" in page
    assert "[(" not in page  # the curves are in the picture
    assert "no record" not in capsys.readouterr().out


def test_a_result_that_is_no_better_than_the_record_is_none(tmp_path, capsys):
    for time_s in (90.0, 95.0):
        speedrun_page.write(result(time_s), "a change", tmp_path / "out", tmp_path / "runs", "")
    said = "no record   the mean time_s is 105.0000; the record here has 100.0"
    assert said in capsys.readouterr().out
    assert len(yaml.safe_load((tmp_path / "out/ledger.yaml").read_text())) == 1


@pytest.mark.parametrize(
    ("change", "breaches", "named"),
    [(None, [], "give --change TEXT"), ("a change", ["2 seeds; a record has 5"], "2 seeds")],
)
def test_what_is_no_record_stays_out_of_the_ledger(tmp_path, capsys, change, breaches, named):
    speedrun_page.write(result(breaches=breaches), change, tmp_path / "out", tmp_path / "runs", "")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "runs/time-9-cpu.md").exists()
    assert f"no record   {named}" in capsys.readouterr().out


# ---- nanoGPT -------------------------------------------------------------------------------------

PROGRAM = """
import sys
open("called", "w").write(" ".join(sys.argv[1:]))
print("step 0: train loss 4.2, val loss 4.2")
for i, ms in enumerate((900, 800, 10, 30, 20)):
    print(f"iter {i}: loss 4.1, time {ms:.2f}ms, mfu 1%")
"""


@pytest.fixture
def nanogpt(tmp_path):
    folder = tmp_path / "nanoGPT"
    (folder / "data/shakespeare_char").mkdir(parents=True)
    (folder / "data/shakespeare_char/train.bin").touch()
    (folder / "train.py").write_text(PROGRAM)
    return folder


def test_nanogpts_steps_are_those_after_the_first_two(nanogpt):
    speedrun.check_nanogpt(nanogpt)
    assert speedrun.nanogpt_steps_s(nanogpt, TRACK, "cpu") == [0.01, 0.03, 0.02]
    called = (nanogpt / "called").read_text()
    assert called.startswith("config/tiny.py --eval_iters=1")
    assert "--device=cpu --compile=False --max_iters=20" in called
    assert speedrun.nanogpt_steps_s(None, TRACK, "cpu") == []


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", ["1,", "a", "1-5"])
def test_seeds_are_numbers(seeds, capsys):
    assert main(["--track=best", f"--seeds={seeds}"], run) == 2
    assert "expected numbers with commas" in capsys.readouterr().err


def test_the_command_trains_each_seed(tmp_path, monkeypatch, capsys, nanogpt):
    """With the process of `fit` replaced by a function."""

    trained = []

    def fake(command, env):
        name = next(word for word in command if word.startswith("--trainer.default_root_dir="))
        assert env["TORCHINDUCTOR_CACHE_DIR"]
        folder = tmp_path / name.partition("=")[2]
        trained.append(folder.name)
        write_run(folder / "lightning_logs/run/version_0")
        return type("Ended", (), {"returncode": 0})

    started = speedrun.subprocess.run
    monkeypatch.setattr(
        speedrun.subprocess,
        "run",
        lambda command, **how: fake(command, **how) if "env" in how else started(command, **how),
    )
    arguments = ["--track=time-1.60", "--seeds=4,7,7"]
    assert main([*arguments, f"--nanogpt={nanogpt}"], run) == 0
    out = capsys.readouterr().out
    assert "no record   2 seeds; a record has 5" in out
    assert out.count("nanoGPT     median step 20.0 ms") == 2  # before and after
    root = "lightning_logs/speedrun/time-1.60/version_0"
    page = (tmp_path / root / "time-1.60-cpu.md").read_text()
    assert "| 4 | 1.5000 | 10.0 |" in page
    assert "750 steps of its published log, 0.0200 s each" in page
    assert trained == ["seed_4", "seed_7"]
    # an interrupted seed begins anew, a finished one stays
    write_run(tmp_path / root / "seed_9/lightning_logs/half/version_0")
    more = ["--track=time-1.60", "--seeds=4,7,9", f"--resume={root}"]
    assert main(more, run) == 0
    assert trained == ["seed_4", "seed_7", "seed_9"]
    assert "no record   3 seeds" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "named"), [("--config=nope", "--config nope"), ("--device=cuda", "--device cuda")]
)
def test_what_cannot_run_is_an_error_before_nanogpt_is_measured(nanogpt, capsys, option, named):
    assert main(["--track=best", f"--nanogpt={nanogpt}", option], run) == 2
    assert named in capsys.readouterr().err
    assert not (nanogpt / "called").exists()


def test_the_tracks_have_configurations_and_curves():
    for track in TRACKS.values():
        assert Path(speedrun.__file__).with_name(f"{track.config}.yaml").is_file()
        tokens = track.steps * CURVES[track.curve].tokens_per_step
        assert tokens in dict(read_curve(CURVES[track.curve])["val"])
    assert RULES["vocabulary"] == 65


def test_a_run_of_the_network_is_sampled_validated_and_not_exported(text_file, tmp_path, capsys):
    network = "--model.network=experiments.speedrun.model.SpeedrunGPT"
    shape = [network, "--model.config.tie_weights=false"]
    short = ["--trainer.max_steps=8", "--run_name=run", "--trainer.val_check_interval=8"]
    assert main(["fit", *TINY_FIT, *shape, *short, "--model.optimizer=muon"]) == 0
    run = "lightning_logs/run/version_0"
    assert read_events(Path(run))[-1]["seconds"]["train"] >= 0.0
    model, _ = load_model(run)
    assert isinstance(model, SpeedrunGPT)
    assert main(["sample", run, "--max_new_tokens=20", "--device=cpu"]) == 0
    assert main(["validate", run]) == 0
    capsys.readouterr()
    assert main(["export", run, "--to", "out"]) == 2
    assert "experiments.speedrun.model.SpeedrunGPT" in capsys.readouterr().err
    assert main(["fit", *TINY_FIT, *short, "--model.init_from", run]) == 2
    assert f"{run}" in capsys.readouterr().err
