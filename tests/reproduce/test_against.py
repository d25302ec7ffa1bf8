"""`gpt-lightning reproduce --against`: a run beside a published curve, by tokens."""

import json
from types import SimpleNamespace

import pytest

from gpt_lightning.cli import main
from gpt_lightning.reproduce import against, command
from gpt_lightning.reproduce.cases import CURVES
from gpt_lightning.reproduce.published import interpolate, read_curve

STEP = 64 * 256  # tokens
pytestmark = pytest.mark.usefixtures("own_folder")


def write_run(folder, rows):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps({"time": 0.0} | row) + "\n" for row in rows))
    return path


def of_evaluations(losses):
    """Rows of a run with nanoGPT's batch: a training row and an evaluation at each step."""
    return [
        row
        for step, loss in losses.items()
        for row in (
            {"step": step, "train/loss": 3.0, "perf/tokens": float(step * STEP)},
            {"step": step, "val/loss": loss, "train/eval_loss": loss - 0.1},
        )
    ]


def test_curves_are_the_published_ones():
    mps = read_curve(CURVES["shakespeare-mps"])
    assert mps["val"][:2] == [(0.0, 4.2823), (250.0 * STEP, 2.0676)]
    assert mps["train"][1] == (250.0 * STEP, 1.9639)
    assert mps["batch"][:2] == [(0.0, 4.2639), (10.0 * STEP, 3.1459)]
    assert [len(read_curve(CURVES["shakespeare-cpu"])[split]) for split in ("val", "batch")] == [
        1, 6,
    ]  # fmt: skip
    assert read_curve(CURVES["shakespeare-small"])["val"][-1] == (2000.0 * 12 * 64, 1.8857)
    lecture, llm_c = (read_curve(CURVES[name])["val"] for name in ("build-nanogpt", "llm.c"))
    assert (len(lecture), lecture[-1]) == (78, (19072.0 * 2**19, 3.0663))
    assert (len(llm_c), llm_c[-1]) == (80, (19552.0 * 2**19, 3.2731))
    assert {curve.tokenizer for curve in CURVES.values()} == {"char", "gpt2"}
    for name, curve in CURVES.items():
        points = read_curve(curve)
        assert all(tokens == sorted(tokens) for tokens in map(list, points.values())), name
        assert points["val"][0][0] == 0.0


def test_a_curve_is_linear_in_the_logarithm_of_tokens_and_ends_at_its_points():
    points = [(0.0, 4.0), (100.0, 3.0), (400.0, 1.0)]
    assert interpolate(points, 200.0) == pytest.approx(2.0)
    assert interpolate(points, 100.0) == 3.0
    assert interpolate(points, 400.0) == 1.0
    assert interpolate(points, 0.0) == 4.0
    assert interpolate(points, 99.0) is None  # the fall from the untrained model has no points
    assert interpolate(points, 401.0) is None
    assert interpolate(points[1:], 0.0) is None
    assert interpolate(points[:1], 5.0) is None


def test_the_command_says_how_far_off_a_run_is(tmp_path, capsys):
    run = tmp_path / "lightning_logs" / "mine" / "version_3"
    losses = {100: 3.0, 250: 2.0676 + 0.0100, 500: 1.7326 - 0.0500, 1000: 1.5 + 0.0400}
    write_run(run, of_evaluations(losses))
    # tokens of the last evaluation: 1,000 steps
    assert main(["reproduce", "--against", str(run.parent), "shakespeare-mps"]) == 0
    out, err = capsys.readouterr()
    theirs = dict(read_curve(CURVES["shakespeare-mps"])["val"])[1000.0 * STEP]
    off = 1.54 - theirs
    assert f"you are {off:+.4f} at 16.38 M tokens (validation loss 1.5400, theirs {theirs}" in out
    lines = [line.split() for line in out.splitlines() if line.startswith("val ")]
    assert [line[1] for line in lines] == ["4,096,000", "8,192,000", "16,384,000"]
    assert [line[-1] for line in lines][:2] == ["+0.0100", "-0.0500"]
    assert not any(line.startswith("batch ") for line in out.splitlines())
    assert "per token of char" in err  # no checkpoint names the run's own
    folder = command.ROOT / "against" / "version_0"
    assert "batch," in (folder / "losses.csv").read_text()
    assert (folder / "curves.png").stat().st_size > 10_000
    page = (folder / "results.md").read_text()
    assert str(run) in page
    assert "you are" in page


def test_a_run_of_another_tokenizer_is_an_error(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    write_run(run, of_evaluations({250: 2.0}))
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "step-0000250.ckpt").touch()
    record = SimpleNamespace(tokenizer={"name": "gpt2"})
    monkeypatch.setattr(
        against, "read_checkpoint", lambda *path, check: SimpleNamespace(record=record)
    )
    assert main(["reproduce", "--against", "run", "shakespeare-mps"]) == 2
    line = capsys.readouterr().err
    assert "tokens of gpt2" in line
    assert "token of char" in line
    record.tokenizer = {"name": "char", "characters": "a" * 65}
    assert main(["reproduce", "--against", "run", "shakespeare-mps"]) == 0
    assert not capsys.readouterr().err
    record.tokenizer = {"name": "char", "characters": "ab"}  # not tiny Shakespeare
    assert main(["reproduce", "--against", "run", "shakespeare-mps"]) == 2
    assert "another text than the curve's" in capsys.readouterr().err


@pytest.mark.parametrize(
    "row", [{"step": 1, "val/loss": 2.0}, {"step": 1, "val/loss": 2.0, "perf/tokens": 5.0}]
)
def test_a_run_before_the_first_point_of_a_curve_is_an_error(row, tmp_path, capsys):
    write_run(tmp_path / "run", [row])
    assert main(["reproduce", "--against", "run", "llm.c"]) == 2
    assert "the tokens of llm.c" in capsys.readouterr().err.splitlines()[-1]
    assert not command.ROOT.exists()
