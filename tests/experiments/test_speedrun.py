"""`python -m experiments.speedrun`: times, rules, nanoGPT beside, page and ledger."""

import json
import math
import shutil
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
from gpt_lightning.errors import UserError
from gpt_lightning.reproduce.published import CURVES, read_curve
from gpt_lightning.runs.history import read_events
from gpt_lightning.runs.sources import load_model

TRACK = Track("time-9", "time to 9", 9.0, "time-1.60", 100, "shakespeare-small", "config/tiny.py")
WAYS = {"eager float32": 2.0, "compiled bfloat16": 1.0}
SETTINGS = {
    "data": {"corpus": "tinyshakespeare", "tokenizer": "char", "val_fraction": 0.1},
    "trainer": {"max_steps": 6, "overfit_batches": 0.0, "precision": "bf16-mixed"},
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
    assert (row.time_s, row.compile_s, row.precision) == (10.0, 4.0, "bf16-mixed")
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


def test_a_third_split_is_the_end_of_the_training_text(tmp_path, monkeypatch):
    text = tmp_path / "input.txt"
    text.write_text("".join(map(chr, range(100, 200))), "utf-8")
    monkeypatch.setattr(speedrun, "corpus_file", lambda name, folder: text)
    part = tmp_path / "training_text.txt"
    assert speedrun.third_split(tmp_path) == ["--data.corpus=null", f"--data.text_file={part}"]
    assert part.read_text("utf-8") == "".join(map(chr, range(100, 190)))
    # its last tenth is the third split, by data.val_fraction of the rules; such a run is a trial
    run = write_run(tmp_path / "run", changed(data__corpus=None, data__text_file=str(part)))
    found = speedrun.problems(run, speedrun.read_run(101, run, 1.0))
    assert [text.split()[0] for text in found] == ["data.corpus", "data.text_file"]


def seed_row(seed=101, loss=8.0, time_s=100.0):
    curve = ((50.0, 10.0), (time_s, loss))
    return SeedRow(seed, loss, time_s, 4.0, time_s + 5.0, 6, 600.0, 1000, curve)


def result(time_s=100.0, losses=(8.0, 8.1, 8.2, 8.3, 8.4), first=101, breaches=(), ways=WAYS):
    rows = [seed_row(first + i, loss, time_s + 5 * i) for i, loss in enumerate(losses)]
    return Result(TRACK, "cpu", rows, ways, list(breaches))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({}, []),
        ({"losses": [8.0] * 10}, []),
        ({"losses": [8.0] * 4}, ["the seeds are 101, 102, 103, 104; a record has 101 to 105"]),
        ({"losses": [8.0] * 11}, ["at most to 110"]),
        ({"first": 1}, ["the seeds are 1, 2, 3, 4, 5; a record has 101"]),
        ({"first": 102}, ["the seeds are 102, 103"]),  # the best of many are no record
        ({"losses": [9.01] * 5}, ["the mean loss is 9.0100; the target is 9.0"]),
        ({"losses": [9.0] * 5}, ["below 9.0000 with p < 0.01, not below 9.0"]),
        ({"losses": [8.9, 8.9, 8.9, 8.9, 9.1]}, ["below 9.0899 with p < 0.01, not below 9.0"]),
        (
            {"ways": {}},
            ["eager float32 was not", "compiled bfloat16 was not measured: give --nano"],
        ),
    ],
)
def test_a_record_is_significant_over_seeds_that_tuned_nothing(changes, named):
    found = result(**changes).shortfalls()
    assert len(found) == len(named)
    assert all(name in text for name, text in zip(named, found, strict=True)), found


def test_critical_values_leave_a_hundredth_of_students_t_above():
    step = 1e-3
    for n, critical in RULES["critical_t"].items():
        nu = n - 1  # degrees of freedom
        scale = math.gamma(n / 2) / math.gamma(nu / 2) / math.sqrt(nu * math.pi)
        middles = (step * (i + 0.5) for i in range(round(critical / step)))
        between = step * sum(scale * (1 + t * t / nu) ** (-n / 2) for t in middles)
        assert 0.5 - between == pytest.approx(0.01, abs=1e-5)  # three decimals
    assert min(RULES["critical_t"]) == 2
    assert RULES["first_seed"] + max(RULES["critical_t"]) - 1 == 110


def test_records_enter_the_ledger_with_their_gain(tmp_path, capsys):
    for time_s, change in ((90.0, "the first"), (40.0, "half the steps")):
        speedrun_page.write(result(time_s), change, tmp_path / "out", tmp_path / "runs", "speedrun")
    page = (tmp_path / "out/README.md").read_text()
    first, second = (line.split(" | ") for line in page.splitlines()[-2:])
    assert first[0] == "| [time-9](time-9-cpu.md)"
    assert first[4:8] == ["101, 102, 103, 104, 105", "8.2000", "8.4650", "100.0"]
    assert first[8:] == ["200", "2.0", "100", "1.0", "the first", "the first", " |"]
    assert second[9:14] == ["4.0", "100", "2.0", "half the steps", "2.00 times faster"]
    assert (tmp_path / "out/time-9-cpu.png").stat().st_size > 10_000
    page = (tmp_path / "out/time-9-cpu.md").read_text()
    assert "| eager float32 | 2.0000 | 100 | 200 | 4.0 |" in page
    assert "| compiled bfloat16 | 1.0000 | 100 | 100 | 2.0 |" in page
    assert "below 8.4650 with p < 0.01" in page
    assert "[(" not in page  # the curves are in the picture
    assert "o record" not in capsys.readouterr().out + page


def test_a_result_that_is_no_better_than_the_record_is_none(tmp_path, capsys):
    for time_s in (90.0, 95.0):
        speedrun_page.write(result(time_s), "a change", tmp_path / "out", tmp_path / "runs", "")
    said = "no record   the mean time_s is 105.0000; the record here has 100.0"
    assert said in capsys.readouterr().out
    ledger = yaml.safe_load((tmp_path / "out/ledger.yaml").read_text())
    assert len(ledger) == 1
    # a record of seeds that were used for tuning does not count
    ledger[0]["seeds"] = [1, 2, 3, 4, 5]
    (tmp_path / "out/ledger.yaml").write_text(yaml.safe_dump(ledger))
    speedrun_page.write(result(95.0), "a change", tmp_path / "out", tmp_path / "runs", "")
    assert len(yaml.safe_load((tmp_path / "out/ledger.yaml").read_text())) == 2


# ---- pages and the files of today ----------------------------------------------------------------


def test_a_page_names_what_has_changed_since(tmp_path, monkeypatch):
    """With copies of the model and of the configuration."""
    own = Path(speedrun_page.__file__)
    files = {name: (own.with_name(name)).read_text() for name in ("model.py", "time-1.60.yaml")}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(speedrun_page, "__file__", str(tmp_path / "page.py"))
    out = tmp_path / "out"
    speedrun_page.write(result(), "the first", out, tmp_path / "runs", "speedrun")
    texts = {path: path.read_text() for path in out.glob("*.md")}

    def rewritten(name, text):
        for other, old in files.items():
            (tmp_path / other).write_text(text if other == name else old)
        speedrun_page.rewrite(out)
        return (out / "time-9-cpu.md").read_text(), (out / "README.md").read_text()

    words = '# a comment\n"""A docstring."""\n\n'  # change nothing
    rewritten("model.py", words + files["model.py"])
    assert texts == {path: path.read_text() for path in out.glob("*.md")}
    for name, text, since in (
        ("model.py", files["model.py"].replace("1.5", "1.6"), "the model"),
        ("time-1.60.yaml", files["time-1.60.yaml"] + "seed_everything: 1\n", "the configuration"),
    ):
        page, ledger = rewritten(name, text)
        assert f"**Changed since: {since}.** Commit" in page
        assert ledger.endswith(f" | the first | {since} |\n")


def test_the_pages_of_the_records_are_those_of_the_files_of_today(tmp_path):
    """Red: run `python -m experiments.speedrun.page`, which writes what has changed since."""
    records = Path(speedrun_page.__file__).parent / "records"
    for path in (*records.glob("*-*.json"), records / "ledger.yaml"):
        shutil.copy(path, tmp_path)
    speedrun_page.rewrite(tmp_path)
    pages = sorted(tmp_path.glob("*.md"))
    assert len(pages) >= 5
    for page in pages:
        assert page.read_text() == (records / page.name).read_text(), page.name


@pytest.mark.parametrize(
    ("change", "breaches", "named"),
    [(None, [], "give --change TEXT"), ("a change", ["11,000,001 parameters"], "11,000,001")],
)
def test_what_is_no_record_stays_out_of_the_ledger(tmp_path, capsys, change, breaches, named):
    speedrun_page.write(result(breaches=breaches), change, tmp_path / "out", tmp_path / "runs", "")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "runs/time-9-cpu.md").exists()
    assert f"no record   {named}" in capsys.readouterr().out


# ---- nanoGPT -------------------------------------------------------------------------------------

PROGRAM = """
import sys
device_type, nullcontext, autocast = "cpu", lambda: "float32", lambda: "autocast"
context = nullcontext() if device_type == 'cpu' else autocast()
open("called", "a").write(f"{context} " + " ".join(sys.argv[1:]) + "\\n")
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
    times = [0.01, 0.03, 0.02]
    assert speedrun.nanogpt_steps_s(nanogpt, TRACK, "cpu") == dict.fromkeys(WAYS, times)
    eager, compiled = (nanogpt / "called").read_text().splitlines()
    assert eager.startswith("float32 config/tiny.py --device=cpu")
    assert "--compile=False --eval_iters=1" in eager
    assert compiled.startswith("autocast config/tiny.py --device=cpu")
    assert "--compile=True --dtype=bfloat16 --eval_iters=1" in compiled
    assert all(" --max_iters=20 " in line for line in (eager, compiled))
    assert (nanogpt / "train.py").read_text() == PROGRAM
    assert speedrun.nanogpt_steps_s(None, TRACK, "cpu") == {}


def test_another_nanogpt_is_an_error(nanogpt):
    (nanogpt / "train.py").write_text(PROGRAM.replace("if device_type", "if  device_type"))
    with pytest.raises(UserError, match=r"or one without `nullcontext\(\) if device_type"):
        speedrun.check_nanogpt(nanogpt)


# ---- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", ["1,", "a", "1-5"])
def test_seeds_are_numbers(seeds, capsys):
    assert main(["--track=best", f"--seeds={seeds}"], run) == 2
    assert "expected numbers with commas" in capsys.readouterr().err


def test_the_command_trains_each_seed(tmp_path, monkeypatch, capsys, nanogpt):
    """With the process of `fit` replaced by a function."""

    trained = []

    def fake(command, **how):
        if "fit" not in command:
            return started(command, **how)
        name = next(word for word in command if word.startswith("--trainer.default_root_dir="))
        assert how["env"]["TORCHINDUCTOR_CACHE_DIR"].startswith(how["env"]["TMPDIR"])
        folder = tmp_path / name.partition("=")[2]
        trained.append(folder.name)
        write_run(folder / "lightning_logs/run/version_0")
        return type("Ended", (), {"returncode": 0})

    started = speedrun.subprocess.run
    monkeypatch.setattr(speedrun.subprocess, "run", fake)
    arguments = ["--track=time-1.60", "--seeds=4,7,7"]
    assert main([*arguments, f"--nanogpt={nanogpt}"], run) == 0
    out = capsys.readouterr().out
    assert "no record   the seeds are 4, 7; a record has 101 to 105" in out
    for way in WAYS:
        assert out.count(f"nanoGPT     median step 0.0200 s, {way}") == 2  # before and after
    root = "lightning_logs/speedrun/time-1.60/version_0"
    page = (tmp_path / root / "time-1.60-cpu.md").read_text()
    assert "| 4 | 1.5000 | 10.0 |" in page
    assert "| eager float32 | 0.0200 | 750 | 15 | 1.5 |" in page
    assert trained == ["seed_4", "seed_7"]
    # an interrupted seed begins anew, a finished one stays
    write_run(tmp_path / root / "seed_9/lightning_logs/half/version_0")
    file = Path(speedrun.__file__).with_name("time-1.88.yaml")
    more = ["--track=time-1.60", "--seeds=4,7,9", f"--resume={root}", f"--config={file}"]
    assert main(more, run) == 0
    assert trained == ["seed_4", "seed_7", "seed_9"]
    out = capsys.readouterr().out
    assert "no record   the seeds are 4, 7, 9" in out
    assert f"no record   the configuration is {file}, not the track's" in out


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
    model, _ = load_model(run, network=SpeedrunGPT)
    assert isinstance(model, SpeedrunGPT)
    assert main(["sample", run, network, "--max_new_tokens=20", "--device=cpu"]) == 0
    assert main(["validate", run, network]) == 0
    capsys.readouterr()
    assert main(["export", run, "--to", "out"]) == 2
    assert "experiments.speedrun.model.SpeedrunGPT" in capsys.readouterr().err
    assert main(["fit", *TINY_FIT, *short, "--model.init_from", run]) == 2
    assert f"{run}" in capsys.readouterr().err
