"""`gpt-lightning report`: content, escaping and size of the page, without a browser."""

import base64
import hashlib
import json
import re
from pathlib import Path

import pytest
import yaml
from reported import HOSTILE, SAMPLE, data_of, write_run
from tiny_fit import TINY_RUN

from gpt_lightning.cli import main
from gpt_lightning.commands.runs import PAGE_BYTES, SAMPLES, extremes


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def page_of(*options: str) -> str:
    assert main(["report", *options, "--out", "page.html"]) == 0
    return Path("page.html").read_text(encoding="utf-8")


def table(data, title: str) -> dict[str, list[str]]:
    return {key: cells for key, *cells in data["tables"][title]}


def test_a_page_has_the_facts_of_its_runs(capsys):
    for name, rate in (("a", 0.1), ("b", 0.2)):
        write_run(Path("logs", name, "version_0"), [3.0, 2.0, 1.5], {"model": {"lr": rate, "x": 1}})
    assert main(["report", "logs/a", "logs/b"]) == 0
    assert capsys.readouterr().out == "report      logs/a/version_0/compared.html\n"
    data = data_of(Path("logs/a/version_0/compared.html").read_text())
    assert (data["names"], data["runs"]) == (["a", "b"], 2)
    assert table(data, "Results")["best_val_loss"] == ["1.5000", "1.5000"]
    assert table(data, "Settings that differ") == {"model.lr": ["0.1", "0.2"]}
    assert table(data, "All settings")["model.x"] == ["1", "1"]
    facts = table(data, "What was trained, by which command, on which machine")
    assert facts["command"] == ["gpt-lightning fit --config a.yaml"] * 2
    assert facts["software"] == ["gpt_lightning 1.0 (abc1234)"] * 2
    assert table(data, "Wall time")["train"] == ["6.0 s, 75.0%"] * 2
    curves = data["curves"][1]
    assert curves["val"] == [[1, 100, 1.1, 3], [2, 200, 2.1, 2], [3, 300, 3.1, 1.5]]
    assert [key for key, points in curves.items() if points] == ["train", "val", "rate", "mfu"]
    assert data["samples"][0] == [[1, SAMPLE], [3, SAMPLE]]


def test_a_name_a_setting_and_a_sample_end_no_script():
    write_run(Path("logs", HOSTILE, "version_0"), [3.0], {"prompt": HOSTILE}, sample=HOSTILE)
    text = page_of(f"logs/{HOSTILE}")
    data = data_of(text)
    assert data["names"] == [HOSTILE]
    assert data["samples"][0][0][1] == HOSTILE
    assert table(data, "All settings")["prompt"] == [HOSTILE]
    empty = Path(main.__code__.co_filename).with_name("commands") / "report.html"
    for tag in ("<script", "</script", "<img", "<!--"):
        assert text.lower().count(tag) == empty.read_text().lower().count(tag), tag


def test_the_policy_allows_the_style_and_the_script_of_the_page_alone():
    write_run(Path("run"), [3.0])
    text = page_of("run")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)[1]
    assert policy.startswith("default-src 'none'; ")
    for kind in ("style", "script"):
        (inside,) = re.findall(f"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy  # else write it into report.html
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|innerHTML|\son\w+=|style=", text)


def test_a_loss_that_is_no_number_is_null():
    write_run(Path("run"), [3.0, None, 2.0, None])
    data = data_of(page_of("run"))
    assert [point[3] for point in data["curves"][0]["val"]] == [3, None, 2, None]


def test_one_point_and_no_samples_make_a_page_and_no_point_does_not(capsys):
    write_run(Path("one"), [3.0], sample=None)
    assert data_of(page_of("one"))["samples"] == [[]]
    (Path("one") / "timeline.jsonl").unlink()
    command = "What was trained, by which command, on which machine"
    assert "no timeline.jsonl" in table(data_of(page_of("one")), command)["command"][0]
    write_run(Path("none"), [])
    assert main(["report", "none"]) == 2
    assert "metrics.jsonl has no loss yet" in capsys.readouterr().err


@pytest.mark.parametrize("count", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_a_run_of_many_points_keeps_its_spikes_in_a_small_page(count):
    losses: list[float | None] = [3 - step / count for step in range(count)]
    losses[7_777], losses[4_444], losses[5] = 99.0, 0.25, None
    write_run(Path("run"), losses)
    data = data_of(page_of("run"))
    assert Path("page.html").stat().st_size < PAGE_BYTES
    for key in ("train", "val"):
        points = data["curves"][0][key]
        values = [value for *_, value in points]
        assert 500 < len(points) < 5_000
        assert points == sorted(points)
        assert (points[0][0], points[-1][0]) in ((0, count - 1), (1, count))
        assert None in values
        lift = 0 if key == "val" else -0.1
        for spike in (99.0, 0.25):
            assert any(value == pytest.approx(spike + lift) for value in values if value)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 100])
def test_few_points_are_all_kept_and_many_keep_their_extremes(count):
    points = [(i, i, i, (i * 37 % 100) / 7) for i in range(count)]
    assert [p[0] for p in extremes(points, 400)] == list(range(count))
    kept = extremes(points, 10)
    assert len(kept) <= 14
    for take in (min, max):
        assert not points or take(p[3] for p in kept) == pytest.approx(take(p[3] for p in points))


def test_more_runs_than_a_page_has_room_for_are_an_error(monkeypatch, capsys):
    write_run(Path("run"), [3.0] * 50)
    monkeypatch.setattr("gpt_lightning.commands.runs.PAGE_BYTES", 10_000)
    assert main(["report", "run"]) == 2
    assert "give fewer runs" in capsys.readouterr().err
    assert not Path("run/report.html").exists()


def test_an_earlier_page_is_replaced_and_no_other_file(capsys):
    write_run(Path("run"), [3.0])
    Path("mine.html").write_text("mine")
    Path("link.html").symlink_to("page.html")
    Path("folder").mkdir()
    for _ in range(2):
        page_of("run")
        assert main(["report", "run", "--out", "folder"]) == 0
    assert Path("folder/report.html").read_text() == Path("page.html").read_text()
    for name in ("mine.html", "link.html", "page.pdf", "s3://bucket/page.html"):
        assert main(["report", "run", "--out", name]) == 2
        assert f"--out {name}" in capsys.readouterr().err
    assert Path("mine.html").read_text() == "mine"


def test_a_published_curve_is_drawn_and_compared():
    losses = {250: 2.0776, 500: 1.6826, 1000: 1.5}
    rows = [
        {"step": step, "time": float(step), "val/loss": loss, "perf/tokens": step * 16384.0}
        for step, loss in losses.items()
    ]
    Path("run").mkdir()
    Path("run/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_of(page_of("run", "--reference", "shakespeare-mps", "--reference", "llm.c"))
    assert data["names"][1:] == ["shakespeare-mps", "llm.c"]
    assert [len(curve["val"]) > 3 for curve in data["curves"]] == [False, True, True]
    verdicts = table(data, "Beside published curves")
    assert "at 16.38 M tokens (validation loss 1.5000" in verdicts["shakespeare-mps"][0]
    assert "no loss within the tokens of llm.c" in verdicts["llm.c"][0]


def test_a_session_without_an_end_has_the_time_of_its_phases():
    begin = {"event": "begin", "step": 0, "steps": 9}
    phase = {"event": "phase", "step": 1, "name": "validation", "seconds": 3.0}
    end = {"event": "end", "step": 2, "state": "finished", "reason": "", "seconds": {"train": 1.0}}
    write_run(Path("run"), [3.0], events=[begin, phase, begin | {"step": 1}, phase, end, phase])
    times = table(data_of(page_of("run")), "Wall time")
    assert times == {"validation": ["6.0 s, 85.7%"], "train": ["1.0 s, 14.3%"]}


def test_many_samples_are_spread_and_the_last_is_kept():
    samples = [{"event": "sample", "step": step, "text": "é" * 9999} for step in range(500)]
    write_run(Path("run"), [3.0], events=samples)
    (found,) = data_of(page_of("run"))["samples"]
    steps = [step for step, _ in found]
    assert SAMPLES / 2 < len(steps) <= SAMPLES
    assert steps == sorted(steps)
    assert (steps[0] < 50, steps[-1]) == (True, 499)
    assert {len(text) for _, text in found} == {2000}


def test_settings_are_those_of_the_configuration():
    write_run(Path("run"), [3.0], {"infinite": float("inf"), "text": "é\u2028"}, events=[])
    assert yaml.safe_load(Path("run/config.yaml").read_text())["infinite"] == float("inf")
    settings = table(data_of(page_of("run")), "All settings")
    assert settings == {"infinite": ["inf"], "text": ["é\u2028"]}


@pytest.mark.slow
def test_a_run_writes_its_command_its_machine_and_its_samples():
    Path("my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    own = ["--data.text_file=my.txt", "--samples.max_new_tokens=4", "--run_name=mine"]
    own += ["--trainer.max_steps=4", "--trainer.limit_val_batches=1"]
    assert main(["fit", *TINY_RUN, *own]) == 0
    data = data_of(page_of("lightning_logs/mine"))
    facts = table(data, "What was trained, by which command, on which machine")
    assert facts["command"][0].startswith("gpt-lightning fit ")
    assert facts["software"][0].startswith("gpt_lightning ")
    assert "parameters" in facts["model"][0]
    assert facts["devices"] == ["1"]
    assert data["samples"][0][-1][1]
