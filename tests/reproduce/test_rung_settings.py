"""Settings that are read from a run's objects."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_fit import TINY_RUN
from torch import nn

import gpt_lightning
from gpt_lightning import files
from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPT
from gpt_lightning.reproduce import published, settings
from gpt_lightning.reproduce.cases import CASES, Case, Rung, Verdict, fit_arguments
from gpt_lightning.runs.settings import Settings
from gpt_lightning.training import optim
from gpt_lightning.training.callbacks.recorder import RunRecorder
from gpt_lightning.training.fit import run_cli
from gpt_lightning.training.schedule import share_of_peak

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
    theirs = {"tie_weights": True, "betas": [0.9, 0.99], "chip": "a chip", "batch": [4, 32]}
    ours = {"tie_weights": False, "betas": [0.9, 0.99], "batch": [4, 32], "speed": 1}
    rows = settings.compare_settings(replace(RUNGS["timed"], theirs=theirs), ours)
    assert [(row.setting, row.verdict) for row in rows] == [
        ("tie_weights", Verdict.FAILED), ("betas", Verdict.OK), ("batch", Verdict.OK),
    ]  # fmt: skip
    assert (rows[0].ours, rows[0].theirs) == ("False", "True")
    assert (rows[1].rung, rows[1].ours) == ("timed", "0.9, 0.99")


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
                1e-3 * share_of_peak(step, theirs, decay_steps) for step in settings.RATE_STEPS
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


make_gpt, draw_weights = GPT.__init__, GPT._init_normal
make_adamw = optim.AdamW


MODEL = "gpt_lightning.model.gpt"


class ReadError(Exception):
    """Ends a run that was started for its settings alone."""


def wrong_settings(case: Case, rung: Rung, changes: list[str]) -> list[str]:
    """Build a run with changes; return the settings in which it differs from the published one."""
    ours = {}

    def read(module) -> None:
        ours.update(settings.read_settings(module))
        raise ReadError

    probe = RunRecorder(lambda seen: None, each_step=False, begin=read)
    arguments = fit_arguments(case, rung, ["--trainer.enable_checkpointing=false", *changes])
    with pytest.raises(ReadError):
        run_cli(["fit", *arguments], callbacks=[probe])
    rows = settings.compare_settings(rung, ours)
    unread = [f"{name} (not read)" for name in rung.theirs if name not in (*ours, "batches")]
    return [row.setting for row in rows if row.verdict == Verdict.FAILED] + unread


def test_a_head_that_is_not_tied_is_seen(tinyshakespeare, monkeypatch):
    monkeypatch.setattr(f"{MODEL}.GPT.__init__", untied)
    seen = wrong_settings(LECTURE_LADDER, RUNGS["weight-tying"], [])
    assert seen == ["parameters", "tie_weights", "decayed_parameters"]


@pytest.mark.slow
def test_a_program_that_does_something_else_is_seen(tinyshakespeare, monkeypatch):
    monkeypatch.setattr(f"{MODEL}.GPT._init_normal", scaled_once_more)
    monkeypatch.setattr("gpt_lightning.training.optim.AdamW", other_betas)
    seen = wrong_settings(LECTURE_LADDER, RUNGS["timed"], [])
    assert seen == ["init_std", "init_weight", "betas"]


def test_a_run_with_evaluations_has_all_settings(tinyshakespeare):
    case = CASES["shakespeare-char-small"]
    (rung,) = case.rungs
    rung = replace(rung, theirs=rung.theirs | {"tide_weights": True})
    assert wrong_settings(case, rung, []) == ["tide_weights (not read)"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "seen"),
    [
        (
            "--model.weight_decay=0 --model.config.loss_chunk=8 "
            "--trainer.gradient_clip_algorithm=value",
            {"weight_decay", "decayed_parameters", "loss_chunk", "gradient_clip"},
        ),
        ("--trainer.gradient_clip_val=0", {"gradient_clip"}),
    ],
)
def test_options_that_change_a_setting_are_seen(options, seen, tinyshakespeare):
    case = CASES["shakespeare-char-small"]
    assert {*wrong_settings(case, case.rungs[0], options.split())} == seen


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
