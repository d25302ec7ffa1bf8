"""`gpt-lightning runs` and `plot`: what they print and draw."""

import json
import os
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from matplotlib.image import imread

from gpt_lightning.cli import main


def make_run(folder: Path, time: float, losses, settings=None, **facts) -> None:
    """Write a run whose training loss is 0.1 below its validation loss, NaN for None."""
    folder.mkdir(parents=True)
    rows = []
    for step, loss in enumerate(losses, 1):
        train = {"train/loss": loss and loss - 0.1, "perf/tokens": step * 1e5, **facts}
        rows.append({"step": step, "time": time + step, **train})
        rows.append({"step": step, "time": time + step + 0.1, "val/loss": loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(yaml.safe_dump(settings or {}))


DAY = 86400.0
SETTINGS = {"trainer": {"max_steps": 3}, "model": {"learning_rate": 0.1, "bias": True}}
OTHER = {"trainer": {"max_steps": 3}, "model": {"learning_rate": 0.2, "bias": True}}
SPEED = {"perf/tokens_per_sec": 12345.0, "perf/mfu": 0.25}


@pytest.fixture
def logs(tmp_path, monkeypatch) -> Path:
    """Three runs, the oldest last by name, and one damaged run."""
    monkeypatch.chdir(tmp_path)
    logs = tmp_path / "lightning_logs"
    make_run(logs / "new/version_0", 40 * DAY, [3.0, 2.0, 1.5], SETTINGS, **SPEED)
    make_run(logs / "new/version_1", 30 * DAY, [3.0, 2.5], OTHER)
    make_run(logs / "zoé/version_0", 20 * DAY, [])
    make_run(logs / "bad/version_0", 10 * DAY, [])
    (logs / "bad/version_0/metrics.jsonl").write_text("garbage\n")
    return logs


def printed(capsys, *options) -> str:
    assert main(["runs", *options]) == 0
    return capsys.readouterr().out


def test_the_list_is_sorted_by_the_time_of_the_start(logs, capsys):
    lines = printed(capsys).splitlines()
    titles = "run state steps of val/loss tokens/s started bits/byte MFU peak tokens reason"
    assert lines[0].split() == titles.split()
    assert [line.split()[0] for line in lines[1:3]] == ["new/version_1", "new/version_0"]
    assert lines[1].split()[:5] == ["new/version_1", "stopped", "2", "3", "2.5000"]
    expected = ["new/version_0", "finished", "3", "3", "1.5000", "12,345", "1970-02-10"]
    assert lines[2].split()[:7] == expected
    assert lines[2].split()[-2:] == ["25.0%", "300,000"]
    assert lines[2].startswith("new/version_0  finished      3   3    1.5000    12,345  1970")
    assert any(line.startswith("bad/version_0") and "line 1 is damaged" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--state=finished"], ["new/version_0"]),
        (["--name=new"], ["new/version_1", "new/version_0"]),
        (["--name=n*_1"], ["new/version_1"]),
        (["--name=nothing"], []),
        (["lightning_logs/zoé"], ["version_0"]),
    ],
)
def test_filters(logs, capsys, options, names):
    assert [run["run"] for run in json.loads(printed(capsys, "--json", *options))] == names


@pytest.mark.parametrize("content", [b"a: [1, {\n", b"\xff\xfe\x00\x01", b"[1, 2]"])
def test_a_damaged_configuration_of_a_compared_run_is_named(logs, capsys, content):
    (logs / "new/version_1/config.yaml").write_bytes(content)
    assert main(["runs", "lightning_logs/new/version_0", "lightning_logs/new/version_1"]) == 2
    assert "lightning_logs/new/version_1/config.yaml" in capsys.readouterr().err


def test_a_name_may_have_brackets(logs, capsys):
    make_run(logs / "[a] b/version_0", 50 * DAY, [])
    for name in ("[a] b", "[a]*", "[a] b/version_0"):
        (found,) = json.loads(printed(capsys, "--json", "--name", name))
        assert found["run"] == "[a] b/version_0"


@pytest.mark.parametrize(
    ("columns", "last"),
    [(20, "val/loss"), (50, "val/loss"), (60, "tokens/s"), (80, "started"), (200, "reason")],
)
def test_a_narrow_terminal_has_the_first_columns(logs, columns, last, monkeypatch, capsys):
    end = {"event": "end", "time": 1e6, "step": 3, "state": "failed", "reason": "no memory " * 30}
    (logs / "new/version_1/timeline.jsonl").write_text(json.dumps(end) + "\n")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    lines = printed(capsys, "--name=new").splitlines()
    assert len(lines) == 3 + lines[-1].endswith("reason; --json has all")
    assert lines[0].split()[-1] == last
    assert max(map(len, lines[:3])) <= max(columns, 48)  # five columns at least
    assert any(line.endswith("no memory") for line in lines) == (columns == 200)


def test_two_runs_are_compared(logs, capsys):
    both = ["lightning_logs/new/version_0", "lightning_logs/new/version_1"]
    lines = [line.split() for line in printed(capsys, *both).splitlines()]
    assert ["run", *both] in lines
    assert ["best_val_loss", "1.5000", "2.5000"] in lines
    assert ["model.learning_rate", "0.1", "0.2"] in lines
    assert not any(line[0] in ("model.bias", "trainer.max_steps", "reason") for line in lines)
    assert lines[-1][1:] == [f"{both[0]}/compared.png,", f"{both[0]}/compared.svg"]
    text = (logs / "new/version_0/config.yaml").read_text()
    (logs / "new/version_0/config.yaml").write_text(text + "infinite: .inf\n")
    printed_json = printed(capsys, *both, "--json")
    assert '"infinite": null' in printed_json
    settings = [run["settings"] for run in json.loads(printed_json)]
    assert [each.pop("infinite") for each in settings] == [None, None]
    assert settings == [{"model.learning_rate": 0.1}, {"model.learning_rate": 0.2}]


# ---- plot ----------------------------------------------------------------------------------------


def texts_of(path: Path) -> str:
    """The comments of an SVG, which are its texts."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.parse(path, parser).getroot()
    return "\n".join(node.text for node in root.iter() if node.tag is ElementTree.Comment)


@pytest.mark.slow
def test_any_run_can_be_drawn(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, losses in {"a": [3.0], "b": [3.0, None, 2.0], "c": [None, None], "d": []}.items():
        make_run(tmp_path / name, 100.0, losses)
    assert main(["plot", *"abcd"]) == 0
    assert capsys.readouterr().out == "curves      a/compared.png, a/compared.svg\n"
    assert imread(tmp_path / "a/compared.png").shape[1] == 864  # pixels, a README's width
    texts = texts_of(tmp_path / "a/compared.svg")
    for text in ("loss (nats per token)", "optimizer step", "tokens (millions)", "tokens/s", " d "):
        assert text in texts


@pytest.mark.slow
def test_several_runs_phases_and_a_published_curve(logs, capsys):
    for name in ("new/version_0", "new/version_1"):
        (logs / name / "run.json").write_text("{}")
    os.utime(logs / "new/version_1/run.json", (0, 0))
    begin = {"time": 40 * DAY, "event": "begin", "step": 0, "steps": 3}
    phase = {"time": 40 * DAY + 300, "event": "phase", "step": 3, "name": "stall", "seconds": 2.0}
    rows = [begin, phase]
    path = logs / "new/version_0/timeline.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = ["lightning_logs/new/version_0", "lightning_logs/new/version_1"]
    references = ["--reference", "nanogpt-shakespeare-char", "--reference", "llm.c"]
    assert main(["plot", *runs, "--out", "new/picture", *references]) == 0
    assert Path("new/picture.png").exists()
    texts = texts_of(Path("new/picture.svg"))
    names = ("new/version_0", "new/version_1", *references[1::2])
    for text in (*names, "stall", "wall time (minutes)"):
        assert text in texts
    assert main(["plot", "lightning_logs/new"]) == 0
    assert Path(runs[1], "curves.svg").exists()
    for _ in range(2):  # an earlier picture is replaced
        assert main(["plot", *runs, "--out", "one.SVG"]) == 0
    assert not Path("one.png").exists()
    assert main(["plot", "lightning_logs", "--out", "new"]) == 0
    assert capsys.readouterr().err.startswith(
        "run         lightning_logs/new/version_0, the newest"
    )
    assert Path("new/curves.png").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["lightning_logs/bad"], "metrics.jsonl, line 1"),
        (["lightning_logs/zoé"], "metrics.jsonl has no loss"),
        (["lightning_logs/new", "--out=mine.png"], "mine.png exists"),
        (["lightning_logs/new", "--out=mine"], "mine.png exists"),
        (["lightning_logs/new", "--out=link.svg"], "link.svg exists"),
    ],
)
def test_what_cannot_be_drawn_is_an_error(logs, capsys, options, words):
    Path("mine.png").write_text("mine")
    Path("link.svg").symlink_to("mine.svg")
    assert main(["plot", *options]) == 2
    assert words in capsys.readouterr().err
    assert Path("mine.png").read_text() == "mine"
    assert not Path("mine.svg").exists()
