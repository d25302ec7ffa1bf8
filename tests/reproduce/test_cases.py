"""The published tables as data: complete, and each rung one thing away from the rung before."""

import pytest

from gpt_lightning.parsing import resolve_configs
from gpt_lightning.reproduce.cases import (
    CASES,
    LECTURE_LADDER,
    PRECISION_LADDER,
    SHAKESPEARE_CHAR,
    Case,
    Rung,
)
from gpt_lightning.reproduce.published import read_published
from gpt_lightning.training.fit import training_parser

RUNGS = [(case, rung) for case in CASES.values() for rung in case.rungs]
# what each rung of the lecture changes, and nothing else
LECTURE_STEPS = {
    "sequential-loader": {"data.order"},
    "weight-tying": {"model.config.tie_weights"},
    "gpt2-init": {"model.config.init", "seed_everything"},
    "timed": {"data.block_size"},
    "matmul-high": {"model.matmul_precision"},
    "bf16": {
        "trainer.precision",
        "data.block_size",
        "data.batch_size",
        "model.learning_rate",
    },
    "compile": {"model.compile"},
    "flash": {"model.config.attention"},
    "vocab-50304": {"model.config.vocab_size"},
}
PRECISION_STEPS = {
    "cpu-bf16": {"trainer.precision"},
    "gpu-fp32": {"trainer.precision", "trainer.accelerator"},
    "gpu-tf32": {"model.matmul_precision"},
    "gpu-bf16": {"trainer.precision"},
    "gpu-bf16-compile": {"model.compile"},
}


@pytest.fixture(scope="module")
def parser():
    return training_parser()


def settings(parser, rung: Rung) -> dict:
    options = [*(f"--config={name}" for name in rung.configs), *rung.settings]
    config = parser.parse_args(["fit", *resolve_configs(options)]).fit
    return {key: value for key, value in vars(config.as_flat()).items() if key != "config"}


@pytest.mark.parametrize(("case", "rung"), RUNGS, ids=lambda value: value.name)
def test_a_rung_has_a_configuration_and_published_losses(case: Case, rung: Rung, parser):
    values = settings(parser, rung)
    assert values["seed_everything"] in (1337, 1)
    published = read_published(case, rung)
    last = max(step for step, _ in published.losses)
    last_of_ours = values["trainer.max_steps"] - (case.kind == "steps")
    assert last == last_of_ours
    assert rung.tolerance[0][0] == 0
    assert [step for step, _ in rung.tolerance] == sorted(step for step, _ in rung.tolerance)


@pytest.mark.parametrize(
    ("case", "steps"), [(LECTURE_LADDER, LECTURE_STEPS), (PRECISION_LADDER, PRECISION_STEPS)]
)
def test_a_rung_differs_from_the_one_before_in_what_it_is_about(case: Case, steps: dict, parser):
    before = settings(parser, case.rungs[0])
    for rung in case.rungs[1:]:
        values = settings(parser, rung)
        assert {key for key in values if values[key] != before[key]} == steps[rung.name], rung.name
        before = values


def test_the_ladders_settings_are_the_published_ones(parser):
    for rung in LECTURE_LADDER.rungs:
        values = settings(parser, rung)
        shape = [values[f"model.config.{key}"] for key in ("n_layer", "n_head", "n_embd")]
        assert shape == [6, 6, 6]
        assert values["model.weight_decay"] == 0.01
    for rung in PRECISION_LADDER.rungs:
        values = settings(parser, rung)
        assert values["data.batch_size"] * values["model.config.block_size"] == 16 * 1024
        assert values["model.learning_rate"] == 3.0e-4


def test_tolerances_change_at_their_steps():
    rung = Rung("x", tolerance=((0, 1.0), (5, 2.0)))
    assert [rung.tolerance_at(step) for step in (0, 4, 5, 99)] == [1.0, 1.0, 2.0, 2.0]


def test_published_times_are_medians_without_the_first_step():
    rungs = {rung.name: rung for rung in PRECISION_LADDER.rungs}
    compiled = read_published(PRECISION_LADDER, rungs["gpu-bf16-compile"])
    assert compiled.step_ms == pytest.approx(89.65)  # 26,468 ms of compilation left out
    assert read_published(PRECISION_LADDER, rungs["cpu-bf16"]).step_ms is None  # a rung of ours
    variants = {rung.name: rung for rung in SHAKESPEARE_CHAR.rungs}
    assert read_published(SHAKESPEARE_CHAR, variants["cpu"]).step_ms == pytest.approx(1984.34)
    mps = read_published(SHAKESPEARE_CHAR, variants["mps"])
    assert mps.losses[0, "train"] == 4.2874
    assert mps.losses[0, "val"] == 4.2823
    assert min(loss for (_, split), loss in mps.losses.items() if split == "val") == 1.4673
