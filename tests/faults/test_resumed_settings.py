"""Settings that a resume may change, and settings that it may not: R10, R19, R25, R27, R30."""

import re

import pytest
from exact import checkpoints, must_equal, newest, rows, sequences, step_of
from folders import contents, copied, run_folder
from harness import SilentWrong, fit

pytestmark = pytest.mark.faults
RESUME = ("--resume", "auto")


@pytest.mark.case("R10")
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--model.config.n_embd", "64"), ("n_embd", "32", "64")),
        (("--model.config.n_layer", "3"), ("n_layer", "2", "3")),
        (("--model.config.bias", "false"), ("bias", "[Tt]rue", "[Ff]alse")),
        (("--model.decay", "all"), ("decay", "all", "matrices")),
        (("--model.optimizer", "muon"), ("optimizer", "muon", "adamw")),
    ],
)
def test_another_model_or_other_groups(stopped, case, args, words):
    before = contents(stopped)
    line = fit(stopped, *RESUME, *args).refused(*words)
    case.saw(line.removeprefix("error: "))
    assert contents(stopped) == before


@pytest.mark.case("R19")
def test_the_command_line_wins_and_says_so(stopped, case):
    path = str(newest(run_folder(stopped)))
    ended = fit(stopped, "--resume", path, "--model.learning_rate", "0.5").ok()
    assert re.search(r"changed +model\.learning_rate 0\.003 -> 0\.5", ended.out), ended.out[:2000]
    case.saw("changed model.learning_rate 0.003 -> 0.5")
    rates = [r["optim/lr"] for r in rows(run_folder(stopped)) if "optim/lr" in r]
    assert max(rates[:10]) < 3.1e-3
    if not rates[10] > 0.4:
        raise SilentWrong(f"the rate of step 11 is {rates[10]}")


@pytest.mark.case("R19")
def test_a_setting_of_the_trainer_is_printed_too(stopped, case):
    ended = fit(stopped, *RESUME, "--trainer.gradient_clip_val", "0.1").ok()
    said = [line for line in ended.out.splitlines() if "gradient_clip_val" in line]
    assert said, "gradient_clip_val changed from 1.0 to 0.1, and nothing says so"
    case.saw(said[0])


@pytest.mark.case("R19")
def test_another_number_of_threads_is_printed_once(stopped, case):
    ended = fit(stopped, *RESUME, env={"OMP_NUM_THREADS": "2"}).ok()
    said = re.findall(r"[^\n]*threads 1 -> 2[^\n]*", ended.out + ended.err)
    assert len(said) == 1, ended.out[:1500]
    case.saw(said[0])


@pytest.mark.case("R25")
@pytest.mark.parametrize("workers", ["1", "2", "4"])
def test_workers_change_nothing(whole, folder, case, workers):
    trace = folder / "trace.jsonl"
    fit(folder, "--data.num_workers", workers, faults={"trace": str(trace)}).ok()
    case.saw(f"{workers} workers")
    must_equal(run_folder(whole), run_folder(folder), (whole / "trace.jsonl", trace))


@pytest.mark.case("R25")
def test_workers_may_change_on_resume(every, stopped, case):
    fit(stopped, *RESUME, "--data.num_workers", "4").ok()
    case.saw("0, then 4")
    must_equal(run_folder(every), run_folder(stopped))


@pytest.mark.case("R27")
@pytest.mark.parametrize(
    ("args", "values"),
    [
        (("--data.batch_size", "4"), (8, 4)),
        (("--trainer.accumulate_grad_batches", "4"), (2, 4)),
        (("--data.block_size", "8"), (16, 8)),
        (("--seed_everything", "8"), (7, 8)),
        (("--data.seed", "9"), (7, 9)),
        (("--data.order", "sequential"), ("shuffled", "sequential")),
    ],
)
def test_another_order_is_refused_with_both_values(stopped, case, args, values):
    before = contents(stopped)
    ended = fit(stopped, *RESUME, *args, "--trainer.val_check_interval", "8")
    words = [rf"\b{value}\b" for value in values]
    line = ended.refused(*words, "checkpoint has", "this run has")
    case.saw(line.removeprefix("error: "))
    assert contents(stopped) == before


@pytest.mark.case("R27")
def test_the_override_is_the_one_that_the_line_names(stopped, case):
    other = (*RESUME, "--data.batch_size", "4")
    option = re.search(r"(--[\w.]+) true", fit(stopped, *other).refused("--"))
    assert option, "the line names no way out"
    ended = fit(stopped, *other, option[1], "true").ok()
    assert "step 30/30" in ended.out
    case.saw(f"{option[1]} true goes on")


@pytest.mark.case("R27")
def test_other_micro_batches_can_be_allowed_and_have_the_same_order(whole, folder, case):
    """4 sequences x 4 micro-batches are 8 x 2; dropout off, for its masks are by micro-batch."""
    off = ("--model.config.dropout", "0.0")
    stop = {"signal_at": [15, 10, 1], "trace": str(folder / "trace.jsonl")}
    assert fit(folder, *off, faults=stop).code == 143
    other = ("--data.batch_size", "4", "--trainer.accumulate_grad_batches", "4",
             "--trainer.val_check_interval", "24")  # fmt: skip
    fit(folder, *RESUME, *off, *other).refused("checkpoint has", "this run has", "allow_changes")
    other += ("--data.allow_changes", "true")
    fit(folder, *RESUME, *off, *other, faults={"trace": str(folder / "trace.jsonl")}).ok()
    assert sequences(folder / "trace.jsonl") == sequences(whole / "trace.jsonl")
    case.saw("4 x 4 for 8 x 2: refused; allowed, the same order")


@pytest.mark.case("R30")
def test_nothing_there_is_said_and_the_run_begins(whole, folder, case):
    ended = fit(folder, *RESUME).ok()
    said = [line for line in ended.out.splitlines() if "step 0" in line]
    assert len(said) == 1, ended.out[:1000]
    case.saw(said[0])
    must_equal(run_folder(whole), run_folder(folder))


@pytest.mark.case("R30")
@pytest.mark.parametrize("how", ["auto", "folder", "file"])
def test_a_finished_run_stays_as_it_is(every, tmp_path, case, how):
    folder = copied(every, tmp_path / "work")
    run = run_folder(folder)
    before = contents(folder)
    path = {"auto": "auto", "folder": str(run), "file": str(newest(run))}[how]
    ended = fit(folder, "--resume", path).ok()
    said = [line for line in ended.out.splitlines() if "nothing to do" in line]
    assert len(said) == 1, ended.out
    case.saw(said[0])
    changed = {k for k, v in contents(folder).items() if before.get(k) != v} | (
        before.keys() - contents(folder).keys()
    )
    assert not changed, f"changed: {sorted(changed)}"


@pytest.mark.case("R30")
def test_a_path_that_is_missing(stopped, case):
    before = contents(stopped)
    line = fit(stopped, "--resume", "nowhere/step-0000001.ckpt").refused("nowhere/step-0000001")
    case.saw(line.removeprefix("error: "))
    assert contents(stopped) == before


@pytest.mark.case("R30")
def test_a_path_is_what_it_says(every, tmp_path, case):
    """An older checkpoint by name: the run continues from there, not from the newest."""
    folder = copied(every, tmp_path / "work", 20)
    older = next(p for p in checkpoints(run_folder(folder)) if step_of(p) == 14)
    ended = fit(folder, "--resume", str(older)).ok()
    assert re.search(r"step 14\b", ended.out)
    case.saw("an older checkpoint by name")
    must_equal(run_folder(every), run_folder(folder))


@pytest.mark.case("R30")
def test_a_future_that_was_left_is_not_taken_up_again(every, tmp_path, case):
    """Resumed from an older file and stopped early: auto continues there, not from a later file."""
    folder = copied(every, tmp_path / "work", 20)
    older = next(p for p in checkpoints(run_folder(folder)) if step_of(p) == 14)
    stop = {"signal_at": [15, 16, 1]}
    assert fit(folder, "--resume", str(older), faults=stop).code == 143
    ended = fit(folder, *RESUME).ok()
    went_on = re.search(r"step (\d+),", ended.out)
    case.saw(f"back to 14, stopped at 16, auto went on from {went_on and went_on[1]}")
    must_equal(run_folder(every), run_folder(folder))
