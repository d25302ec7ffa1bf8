"""Comparison and report, without a run."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpt_lightning.errors import UserError
from gpt_lightning.reproduce import runner
from gpt_lightning.reproduce.cases import CASES, Case, Rung, Verdict
from gpt_lightning.reproduce.published import Published, read_published
from gpt_lightning.reproduce.runner import (
    CaseRun,
    RungRow,
    best_row,
    is_timed,
    loss_row,
    missing_losses,
)
from gpt_lightning.training.callbacks.recorder import Observation, RunTimings

CPU = torch.device("cpu")
LECTURE_LADDER, PRECISION_LADDER = CASES["lecture-ladder"], CASES["precision-ladder"]
RUNG = Rung(
    "one",
    tolerance=[[0, 1e-4], [1, 1e-2]],
    drift=[[1, 0.1]],
    below=[2, 0.5],
    theirs={"order": "repeat"},
)
CASE = Case("c", "A case", "somewhere", "steps", "lecture_ladder.csv", (RUNG,))
PUBLISHED = Published({(0, "batch"): 4.0, (1, "batch"): 3.0, (2, "batch"): 0.499}, 100.0, 1280.0)


@pytest.mark.parametrize(
    ("step", "ours", "verdict"),
    [
        (0, 4.00009, Verdict.OK),
        (0, 4.00011, Verdict.FAILED),
        (1, 3.009, Verdict.OK),
        (1, 2.989, Verdict.DRIFT),
        (1, 2.899, Verdict.FAILED),
        (2, 0.4999, Verdict.OK),
        (2, 0.5001, Verdict.FAILED),  # within the tolerance, but not below the bound
        (0, math.nan, Verdict.FAILED),
        (7, 1.0, ""),  # nothing was published
    ],
)
def test_verdicts(step, ours, verdict):
    assert (row_of(step, ours).verdict or "") == verdict


def row_of(step, ours, split="batch", **more):
    theirs = PUBLISHED.losses.get((step, split))
    return loss_row(CASE, RUNG, theirs, Observation(CPU, step, split, ours, **more))


def test_times_stand_only_where_they_are_the_rungs_own():
    seen = Observation(CPU, 0, "batch", 4.0, seconds=0.5, tokens=128)
    row = loss_row(CASE, RUNG, 4.0, seen)
    assert (row.step_ms, row.tokens_per_sec) == (500.0, 256.0)
    on_gpu = replace(RUNG, device="gpu")
    assert loss_row(CASE, on_gpu, 4.0, seen).step_ms is None
    assert is_timed(on_gpu, torch.device("cuda"))


def test_the_best_row_compares_up_to_where_ours_came():
    losses = {(0, "val"): 4.0, (250, "val"): 2.0, (500, "val"): 1.5, (750, "val"): 1.6}
    rung = Rung("v", tolerance=[[0, 0.1]])
    row = best_row(CASE, rung, losses, [row_of(0, 4.0, "val"), row_of(250, 2.05, "val")])
    assert (row.step, row.split, row.theirs, row.ours) == (250, "best", 2.0, 2.05)
    assert row.verdict == Verdict.OK


DATA = {"train_tokens": 338025, "epoch_batches": 2640}


@pytest.fixture
def case_run(tmp_path, monkeypatch):
    # a case that has no published settings
    monkeypatch.setattr(
        runner,
        "published_speed",
        lambda rung, _: ({"tokens_per_sec": None}, f"no chip in {rung.name}"),
    )
    monkeypatch.setattr(runner, "rung_before", lambda case, rung: [])
    return CaseRun(CASE, ["--model.learning_rate=1"], tmp_path, ["reproduce", "c"])


def test_speed_ups_are_over_the_rung_before_in_the_published_table():
    fp32, bf16, gpu = PRECISION_LADDER.rungs[:3]
    run = CaseRun(PRECISION_LADDER, [], Path("unused"), [])
    run.rungs = [
        RungRow(fp32.name, Verdict.OK, tokens_per_sec=100.0),
        RungRow(bf16.name, Verdict.OK, tokens_per_sec=200.0),  # ours alone: nobody's rung before
    ]
    cuda = RunTimings(torch.device("cuda"), 6, {}, tokens_per_sec=3000.0, mfu=0.3)
    published = read_published(PRECISION_LADDER, gpu)
    speeds = run._speeds(gpu, published, cuda)
    assert (speeds["speedup"], speeds["mfu"]) == (30.0, 0.3)
    assert speeds["published_speedup"] == pytest.approx(25.7, abs=0.05)
    run.rungs = []  # not measured in this call
    assert run._speeds(gpu, published, cuda)["speedup"] is None
    moved = run._speeds(gpu.on("cpu"), published, None)  # to a CPU: losses only
    assert moved["published_speedup"] == speeds["published_speedup"]
    assert moved["published_tokens_per_sec"] == published.tokens_per_sec
    assert not {"attention", "step_ms", "tokens_per_sec", "mfu", "peak_memory_gib"} & moved.keys()
    here = run._speeds(gpu, published, RunTimings(CPU, 6, {}))
    assert 0.05 < here["peak_memory_gib"] < 16


# ---- running a rung ------------------------------------------------------------------------------


@pytest.fixture
def training(monkeypatch):
    """A `fit` that calls the recorder with planted observations; its arguments, call by call."""
    calls = []

    class Planted:
        def __init__(self) -> None:
            self.timings = RunTimings(CPU, 3, {}, step_ms=100.0, tokens_per_sec=1280.0)
            self.observations: list[Observation] = []
            self.error: Exception | None = None
            self.found: dict[str, str] = {}

        def __call__(self, argv, callbacks, folder):
            calls.append((argv, folder))
            check, recorder = callbacks
            if isinstance(self.error, UserError) and not self.observations:
                raise self.error  # before the fit starts
            recorder.begin(None)
            check.found.update(self.found)
            for seen in self.observations:
                recorder.show(seen)
            if self.error is not None:
                raise self.error
            recorder.speed = self.timings
            self.each_step, self.steps = recorder.each_step, recorder.steps

    planted = Planted()
    planted.calls = calls
    monkeypatch.setattr(runner.training, "run_cli", planted)
    monkeypatch.setattr(runner, "read_published", lambda case, rung: PUBLISHED)
    monkeypatch.setattr(runner, "read_settings", lambda module: DATA)
    monkeypatch.setattr(runner, "plot_losses", lambda path, *of: path.write_bytes(b"a picture"))
    return planted


@pytest.fixture
def evaluations(training, case_run, monkeypatch):
    """Run a rung of evaluations with planted published losses and observations."""

    def run(losses, observations, max_steps=250, batches=None, **changes) -> Rung:
        monkeypatch.setattr(runner, "read_published", lambda case, rung: Published(losses))
        rung = replace(RUNG, below=[], **changes)
        case_run.case = replace(CASE, kind="evaluations", rungs=(rung,), eval_batches=batches)
        case_run.each_step = False
        training.observations = observations
        training.timings = RunTimings(CPU, max_steps, {})
        case_run.run(rung)

    return run


def steps_of(*losses: float) -> list[Observation]:
    return [Observation(CPU, s, "batch", x, 0.1, 128) for s, x in enumerate(losses)]


def test_a_rung_is_run_with_its_settings_and_compared(training, case_run, capsys):
    rung = replace(RUNG, configs=("a", "b"), settings=("--x=1",), note="as published")
    training.timings.stalls = 2
    training.observations = steps_of(4.0, 2.95, 0.499)
    case_run.run(rung)
    out = capsys.readouterr().out
    machine = "\n".join(f"{name:<9} {fact}" for name, fact in case_run.machine.items())
    assert out.startswith(
        f"{CASE.title}\n{machine}\n\none: a + b; as published\n"
        "loaded 338025 tokens, 1 epoch = 2640 batches\n"
    )
    ((argv, folder),) = training.calls
    assert argv == [
        "fit", "--config=a", "--config=b", "--samples.max_new_tokens=0",
        "--trainer.log_every_n_steps=1", "--trainer.enable_progress_bar=false",
        "--trainer.enable_checkpointing=false", "--x=1", "--model.learning_rate=1",
    ]  # fmt: skip
    assert folder == case_run.folder / "one"
    assert training.each_step
    (row,) = case_run.rungs
    assert (row.verdict, row.losses, row.drifted, row.step_ms) == (Verdict.OK, 3, 1, 100.0)
    assert row.worst_difference == pytest.approx(0.05)
    notes = "as published", "2 stalls", "changed: --model.learning_rate=1", "no chip in one"
    assert all(note in row.note for note in notes)
    case_run.skip(LECTURE_LADDER.rungs[6], "needs an NVIDIA GPU")
    case_run.write()
    page = (case_run.folder / "results.md").read_text()
    assert all(text in page for text in ("| one", "skipped", "needs an NVIDIA GPU", "reproduce c"))
    table = (case_run.folder / "losses.csv").read_text().splitlines()
    assert table[1].startswith("one,0,batch,4.0")
    assert (case_run.folder / "losses.png").is_file()


def test_a_loss_that_misses_fails_the_rung(training, case_run):
    training.observations = steps_of(4.0, 3.2, 0.499)
    case_run.run(RUNG)
    assert [row.verdict for row in case_run.losses] == [Verdict.OK, Verdict.FAILED, Verdict.OK]
    summary = "\n".join(case_run.summary())
    assert "FAIL: one: 1 losses miss, the first at step 1" in summary
    assert summary.endswith("2 of 3 losses within their tolerance")


def test_a_setting_that_differs_fails_the_rung_whatever_its_losses_are(
    training, case_run, monkeypatch, capsys
):
    training.observations = steps_of(4.0, 3.0, 0.499)
    training.found = {"batches": "others"}
    case_run.run(RUNG)
    assert case_run.rungs[0].note.startswith("other settings than theirs: batches; ")
    assert "FAIL: batches is others, theirs is as published" in capsys.readouterr().out
    page = (case_run.folder / "results.md").read_text()
    assert "| one | batches | as published | others | FAIL |" in page
    training.found = {"batches": "as published"}
    case_run.run(replace(RUNG, name="two"))  # the rows of another rung do not count
    assert [row.verdict for row in case_run.rungs] == [Verdict.FAILED, Verdict.OK]
    monkeypatch.setattr(runner, "read_settings", lambda module: DATA | {"order": "random"})
    case_run.run(RUNG)  # these are read before the first step
    assert [row.ours for row in case_run.settings][-2:] == ["random", "as published"]


def test_a_rung_that_diverges_has_failed_and_one_that_breaks_is_an_error(training, case_run):
    training.observations = steps_of(4.0)
    training.error = UserError("gradient norm is nan")
    case_run.run(RUNG)
    training.error = RuntimeError("out of  memory\n" + "x" * 400)
    case_run.run(RUNG)
    assert [row.verdict for row in case_run.rungs] == [Verdict.FAILED, Verdict.ERROR]
    assert case_run.rungs[0].note.startswith("stopped: gradient norm is ")
    assert case_run.rungs[1].note.startswith("RuntimeError: out of memory x")
    assert len(case_run.rungs[1].note) == len("RuntimeError: ") + 300


def test_a_wrong_setting_is_the_users_and_no_row_and_prints_nothing_else(
    training, case_run, capsys
):
    training.error = UserError("no such file")
    with pytest.raises(UserError, match="no such file"):
        case_run.run(RUNG)
    assert case_run.rungs == []
    assert capsys.readouterr().out == ""


def test_evaluations_keep_the_bar_and_checkpoints_and_compare_the_best(
    training, case_run, evaluations
):
    seen = [Observation(CPU, 0, "val", 4.00001), Observation(CPU, 250, "val", 2.005)]
    evaluations({(0, "val"): 4.0, (250, "val"): 2.0}, seen)
    assert not training.each_step
    assert "--trainer.enable_checkpointing=false" not in training.calls[0][0]
    assert [(row.step, row.split, row.theirs) for row in case_run.losses] == [
        (0, "val", 4.0), (250, "val", 2.0), (250, "best", 2.0),
    ]  # fmt: skip
    assert case_run.rungs[0].verdict == Verdict.OK


def test_a_loss_of_fewer_batches_has_no_verdict(case_run, evaluations):
    seen = [Observation(CPU, 0, split, loss, batches=n) for split, loss, n in
            (("train", 9.0, 20), ("val", 4.0, 200))]  # fmt: skip
    evaluations({(0, "train"): 4.0, (0, "val"): 4.0}, seen, 0, batches=200)
    train, val, best = case_run.losses
    assert (train.difference, train.tolerance, train.verdict, train.batches) == (
        5.0,
        None,
        None,
        20,
    )
    assert (val.verdict, val.batches, best.verdict, best.batches) == ("ok", 200, "ok", 200)
    (row,) = case_run.rungs
    assert (row.verdict, row.losses, row.worst_difference) == (Verdict.OK, 2, 0.0)


def test_missing_losses_are_counted_up_to_the_steps_of_the_run():
    steps = {(s, "batch"): 1.0 for s in range(5)}
    rows = [row_of(0, 1.0), row_of(1, 1.0)]
    assert missing_losses(steps, rows, max_steps=2) == 0  # steps 0 and 1
    assert missing_losses(steps, rows, max_steps=3) == 1
    assert missing_losses(steps, rows, max_steps=50) == 3
    evaluations = {(s, "val"): 1.0 for s in range(5)}
    rows = [row_of(0, 1.0, "val"), row_of(1, 1.0, "val")]
    assert missing_losses(evaluations, rows, max_steps=2) == 1  # after step 2, too


def test_losses_of_steps_beside_evaluations_have_a_tolerance_of_their_own(
    training, case_run, evaluations, capsys
):
    seen = [
        Observation(CPU, 0, "val", 4.0, batches=20),
        Observation(CPU, 0, "batch", 4.005),
        Observation(CPU, 10, "batch", 3.2),
    ]
    bands = {"tolerance": [[0, 1e-4]], "iterations": [[0, 1e-2], [5, 0.1]], "drift": []}
    losses = {(0, "val"): 4.0, (0, "batch"): 4.0, (10, "batch"): 3.0}
    evaluations(losses, seen, 11, batches=20, **bands)
    assert training.steps == {0, 10}
    assert [(row.tolerance, row.verdict) for row in case_run.losses[:3]] == [
        (1e-4, Verdict.OK), (1e-2, Verdict.OK), (0.1, Verdict.FAILED),
    ]  # fmt: skip
    printed = capsys.readouterr().out
    assert "4.005" not in printed  # two hundred lines
    assert "3.200000" in printed


def test_a_resumed_run_with_a_wrong_setting_is_the_users_and_writes_nothing(
    training, case_run, evaluations, monkeypatch
):
    case_run.resume = True
    seen = [Observation(CPU, 0, "val", 4.0)]
    monkeypatch.setattr(runner, "earlier", lambda folder, rung: (Path("x.ckpt"), 2, seen))
    training.error = UserError("the checkpoint has another seed")
    with pytest.raises(UserError, match="another seed"):
        evaluations({(0, "val"): 4.0}, [], 20)
    assert not (case_run.folder / "results.json").exists()
    training.error = None
    case_run.losses.clear()
    evaluations({(0, "val"): 4.0}, [], 20)
    assert "--resume=x.ckpt" in training.calls[-1][0]
    assert "continued at step 2" in case_run.rungs[0].note
    assert case_run.settings == []  # its arithmetic is not checked
