"""Settings that are read from a run's objects, and the self-test that breaks them."""

import shutil
from dataclasses import replace
from pathlib import Path

import option_breaks
import pytest
import torch
from tiny_fit import TINY_RUN
from torch import nn

import gpt_lightning
from gpt_lightning import files
from gpt_lightning.data.order import WindowOrder
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT
from gpt_lightning.reproduce import command, published, settings
from gpt_lightning.reproduce.cases import CASES, Rung
from gpt_lightning.runs.settings import Settings
from gpt_lightning.tables.rows import Verdict
from gpt_lightning.training import optim
from gpt_lightning.training.callbacks.recorder import RunRecorder
from gpt_lightning.training.fit import run_cli

LECTURE_LADDER = CASES["lecture-ladder"]
RUNGS = {rung.name: rung for rung in LECTURE_LADDER.rungs}
pytestmark = pytest.mark.usefixtures("own_folder")


# ---- comparison ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "same"),
    [
        (0.09, 0.0900004, True),
        (0.09, 0.090001, False),
        (1, 1.0, True),
        (1, True, False),
        ("naive", "naive", True),
        ("naive", ["naive", "sdpa"], False),
        ([0.9, 0.99], [0.9, 0.99], True),
        ([0.9, 0.99], [0.9, 0.95], False),
        ([0.9, 0.99], [[0.9, 0.99], [0.9, 0.95]], False),
        (0.5, None, False),
    ],
)
def test_values_are_equal_to_five_digits(a, b, same):
    assert (settings.text(a) == settings.text(b)) is same


def test_no_published_number_is_so_close_to_the_next_text_that_rounding_decides():
    for case in CASES.values():
        for rung in case.rungs:
            for value in rung.theirs.values():
                for number in value if isinstance(value, list) else [value]:
                    if isinstance(number, float):
                        near = {settings.text(number * (1 + sign * 2e-7)) for sign in (-1, 0, 1)}
                        assert len(near) == 1, (case.name, rung.name, number)


def test_each_setting_that_was_read_is_a_row():
    theirs = {"tie_weights": True, "betas": [0.9, 0.99], "chip": "a chip", "order": "repeat"}
    ours = {"tie_weights": False, "betas": [0.9, 0.99], "order": "repeat", "speed": 1}
    rows = settings.compare_settings(replace(RUNGS["timed"], theirs=theirs), ours)
    assert [(row.setting, row.verdict) for row in rows] == [
        ("tie_weights", Verdict.FAILED), ("betas", Verdict.OK), ("order", Verdict.OK),
    ]  # fmt: skip
    assert (rows[0].ours, rows[0].theirs) == ("False", "True")
    assert (rows[1].rung, rows[1].ours) == ("timed", "0.9, 0.99")


def windows(name: str, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    starts = WindowOrder(name, 1000, 8, seed=1).starts(0, 4 * batch, 4)
    rows = torch.arange(1000).unfold(0, 9, 1)[torch.from_numpy(starts)]
    return rows[:, :-1], rows[:, 1:]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("repeat", "repeat"),
        ("sequential", "sequential"),
        ("random", "random"),
        ("shuffled", "random"),
    ],
)
def test_the_order_is_that_of_the_first_two_batches(name, found):
    batches = [windows(name, 0), windows(name, 1)]
    read = settings.batch_settings(batches)
    assert read["order"] == found
    x, y = batches[0]
    other = (x, y + (torch.arange(8) == 7))  # one target of each row
    assert settings.batch_settings([other, batches[1]])["first_batch"] != read["first_batch"]
    assert settings.batch_settings(batches[:1]) == {"first_batch": read["first_batch"]}
    assert settings.batch_settings([]) == {}
    assert windows("sequential", 0)[0][0, 0] == 0


def test_rows_that_do_not_follow_each_other_are_no_sequence():
    (x, y), following = windows("sequential", 0), windows("sequential", 1)
    assert settings.batch_settings([(x, y), windows("sequential", 2)])["order"] == "random"
    swapped = [1, 0, 2, 3]
    assert settings.batch_settings([(x[swapped], y[swapped]), following])["order"] == "random"


# ---- published settings --------------------------------------------------------------------------


def test_every_rung_has_settings_that_agree_with_each_other():
    for case in CASES.values():
        for rung in case.rungs:
            theirs = rung.theirs
            L, C, V, T = (theirs[key] for key in ("n_layer", "n_embd", "vocab_size", "block_size"))
            block = 12 * C**2 + (13 * C if theirs["bias"] else 2 * C)
            n = L * block + (V + T) * C + (2 * C if theirs["bias"] else C)
            assert theirs["parameters"] == n + (0 if theirs["tie_weights"] else V * C)
            matrices = theirs["parameters"] if theirs["weight_decay"] == 0.01 else n - C - L * 2 * C
            assert theirs["decayed_parameters"] == matrices
            assert ("accelerator" in theirs) == (rung.device != "any" and not rung.losses_anywhere)


def test_published_rates_are_those_of_the_programs():
    for case, decay_steps in (("shakespeare-char", 5000), ("shakespeare-char-small", 2000)):
        for rung in CASES[case].rungs:
            theirs = Settings(learning_rate=1e-3, warmup_steps=100)
            rates = [
                optim.learning_rate(step, theirs, decay_steps, 1e-3) for step in settings.RATE_STEPS
            ]
            assert rung.theirs["learning_rates"] == pytest.approx(rates)


def test_a_changed_reference_file_is_an_error(tmp_path, monkeypatch):
    folder = tmp_path / "package"
    shutil.copytree(Path(gpt_lightning.__file__).with_name("reference"), folder / "reference")
    monkeypatch.setattr(files, "__file__", str(folder / "files.py"))
    assert files.reference_rows("precision_ladder.csv", "gpu-bf16")[0]["rung"] == "gpu-bf16"
    table = folder / "reference" / "precision_ladder.csv"
    table.write_text(table.read_text().replace("10.9355", "10.9356", 1))
    with pytest.raises(UserError, match=r"precision_ladder\.csv has been changed: its SHA-256"):
        files.reference_rows("precision_ladder.csv")


# ---- published speed -----------------------------------------------------------------------------


def rung_of(case: str, name: str) -> Rung:
    return next(rung for rung in CASES[case].rungs if rung.name == name)


def speed_of(case: str, name: str) -> tuple[float | None, float | None, str]:
    rung = rung_of(case, name)
    theirs = published.read_published(CASES[case], rung)
    speed, note = published.published_speed(rung, theirs)
    return speed["tokens_per_sec"], speed["mfu"], note


def test_their_mfu_is_of_their_chips_peak():
    rate, mfu, note = speed_of("lecture-ladder", "vocab-50304")
    assert rate == pytest.approx(16 * 1024 / 110.8e-3, rel=1e-3)
    # 6 N + 12 L C T of 6 layers, 6 wide, by 121 TFLOP/s of an L4 in bfloat16
    N = 50304 * 6 + 6 * (12 * 36 + 13 * 6) + 12
    assert mfu == pytest.approx(rate * (6 * N + 12 * 6 * 6 * 1024) / 121e12)
    assert note == "their MFU relative to 121 TFLOP/s: L4 bf16 (dense)"
    rate, mfu, note = speed_of("shakespeare-char", "mps")
    assert rate == pytest.approx(64 * 256 / 232.6e-3, rel=1e-2)
    # nanoGPT's own MFU is of an A100: 220.50 ms are 1.69%
    assert mfu * 14.13e12 / rate == pytest.approx(0.0169 * 312e12 * 0.2205 / (64 * 256), rel=5e-3)
    assert note.startswith("their MFU relative to 14.13 TFLOP/s: Apple M3 Max")


# ---- programs that are not what they are named after ---------------------------------------------


def untied(self, config):
    make_gpt(self, config)
    self.lm_head.weight = nn.Parameter(self.lm_head.weight.detach().clone())


def scaled_once_more(self, residual_std):
    draw_weights(self, residual_std)
    for block in self.transformer.h:
        with torch.no_grad():
            block.mlp.c_proj.weight.mul_(1.01)


def other_betas(groups, **options):
    return make_adamw(groups, **{**options, "betas": (0.9, 0.95)})


def one_window_later(self, *args):
    return window_starts(self, *args) + self.block_size


make_gpt, draw_weights = GPT.__init__, GPT._init_normal
make_adamw, window_starts = optim.AdamW, WindowOrder.starts


MODEL = "gpt_lightning.model.gpt"


def test_a_head_that_is_not_tied_is_seen(tinyshakespeare, monkeypatch):
    monkeypatch.setattr(f"{MODEL}.GPT.__init__", untied)
    seen = option_breaks.wrong_settings(LECTURE_LADDER, RUNGS["weight-tying"], [])
    assert seen == ["parameters", "tie_weights", "decayed_parameters"]


@pytest.mark.slow
def test_a_program_that_does_something_else_is_seen(tinyshakespeare, monkeypatch):
    monkeypatch.setattr(f"{MODEL}.GPT._init_normal", scaled_once_more)
    monkeypatch.setattr("gpt_lightning.training.optim.AdamW", other_betas)
    monkeypatch.setattr("gpt_lightning.data.order.WindowOrder.starts", one_window_later)
    seen = option_breaks.wrong_settings(LECTURE_LADDER, RUNGS["timed"], [])
    assert seen == ["init_std", "init_weight", "betas", "first_batch"]


def test_a_run_with_evaluations_has_all_settings(tinyshakespeare):
    case = CASES["shakespeare-char-small"]
    (rung,) = case.rungs
    rung = replace(rung, theirs=rung.theirs | {"tide_weights": True})
    assert option_breaks.wrong_settings(case, rung, []) == ["tide_weights (not read)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (
            "--model.weight_decay=0 --model.config.loss_chunk=8 --model.skip_spikes=6 "
            "--trainer.gradient_clip_algorithm=value",
            {"weight_decay", "decayed_parameters", "loss_chunk", "skip_spikes", "gradient_clip"},
        ),
        ("--trainer.gradient_clip_val=0", {"gradient_clip"}),
    ],
)
def test_options_that_change_a_setting_are_seen(options, seen, tinyshakespeare):
    case = CASES["shakespeare-char-small"]
    assert {*option_breaks.wrong_settings(case, case.rungs[0], options.split())} == seen


@pytest.mark.slow
def test_a_resumed_run_has_no_initial_weights(text_file):
    read = []

    def begin(module) -> None:
        read.append(settings.read_settings(module))

    probe = RunRecorder(lambda seen: None, each_step=False, begin=begin)
    for more in (["--trainer.max_steps=1"], ["--trainer.max_steps=2", "--resume=auto"]):
        run_cli(["fit", *TINY_RUN, *more], callbacks=[probe])
    new, resumed = read
    assert new.keys() - resumed.keys() == {"init_std", "init_weight"}
    assert new == new | resumed


# ---- the self-test -------------------------------------------------------------------------------


@pytest.fixture
def quick(parser, monkeypatch):
    """The parser of `fit`, which takes a second to make, made once."""
    monkeypatch.setattr(option_breaks.training, "training_parser", lambda: parser)


@pytest.mark.parametrize(
    ("case", "breaks"),
    [
        pytest.param("lecture-ladder --rungs sequential-loader,bf16", 5, marks=pytest.mark.slow),
        pytest.param("lecture-ladder", 37, marks=pytest.mark.long),
        pytest.param("precision-ladder", 26, marks=pytest.mark.long),
        pytest.param("shakespeare-char-small", 26, marks=pytest.mark.long),
        pytest.param("shakespeare-char", 30, marks=pytest.mark.long),
    ],
)
def test_every_break_of_every_rung_is_seen(case, breaks, tinyshakespeare, capsys):
    name, _, rungs = case.partition(" --rungs ")
    chosen = CASES[name], command.named_rungs(CASES[name], rungs or None)
    assert option_breaks.run_selftest([(chosen[0], rung) for rung in chosen[1]]) == 0
    out = capsys.readouterr().out
    assert "FAIL" not in out
    rows = [line.split() for line in out.splitlines() if line.startswith(tuple(CASES))]
    assert sum("red" in row for row in rows) >= breaks
    skipped = {row[2] for row in rows if "skipped" in row}
    assert skipped or "--rungs" in case
    assert skipped <= settings.TABLE["whole"].keys()


def refuse(case: object, rung: object, changes: list[str]) -> list[str]:
    if changes:
        raise UserError("no such window")
    return []


@pytest.mark.parametrize(
    ("wrong", "code", "line"),
    [
        (lambda *_: [], 1, "FAIL     nothing"),  # a break that stays green
        (lambda *_: ["seed"], 1, "1 FAIL, 1 red"),  # a rung that differs unbroken
        (refuse, 0, "red      no such window"),  # a break that cannot run
    ],
)
def test_the_selftest_fails_for_what_it_cannot_tell(quick, wrong, code, line, monkeypatch, capsys):
    monkeypatch.setattr(option_breaks, "wrong_settings", wrong)
    assert option_breaks.run_selftest([(LECTURE_LADDER, RUNGS["weight-tying"])]) == code
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "value", "before", "wrong"),
    [
        ("model.fused", False, {}, "true"),
        ("model.config.n_layer", 6, {}, "7"),
        ("model.weight_decay", 0.5, {}, "0.505"),
        ("data.order", "sequential", {}, "random"),
        ("data.order", "nanogpt", {}, "sequential"),
        ("data.order", "nanogpt", {"data.order": "repeat"}, "repeat"),
        ("model.compile", True, {"model.compile": False}, "false"),
        ("data.eval_batches", 20, {"data.eval_batches": None}, "null"),
        ("trainer.accelerator", "gpu", {"trainer.accelerator": "mps"}, "cpu"),
    ],
)
def test_a_wrong_value_is_another_one(key, value, before, wrong):
    assert option_breaks.wrong_value(key, value, before) == wrong


@pytest.mark.parametrize(
    ("key", "theirs", "whole"),
    [
        ("trainer.accelerator", {}, True),
        ("trainer.accelerator", {"accelerator": "cpu"}, True),
        ("trainer.accelerator", {"accelerator": "gpu"}, False),
        ("trainer.val_check_interval", {}, True),
        ("trainer.val_check_interval", {"val_check_interval": 250, "accelerator": "cpu"}, False),
        ("trainer.max_steps", {"accelerator": "gpu"}, True),
        ("model.betas", {}, False),
    ],
)
def test_only_keys_without_a_number_are_left_whole(key, theirs, whole):
    reason = option_breaks.why_whole(key, theirs)
    assert reason if whole else reason == ""
