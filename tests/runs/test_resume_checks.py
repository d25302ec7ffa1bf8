"""Facts that a checkpoint and the run that resumes it must share, by the records alone."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities import GradClipAlgorithmType

from gpt_lightning.errors import UserError
from gpt_lightning.model.gpt import GPTConfig
from gpt_lightning.runs import resume
from gpt_lightning.runs.checkpoint import RunRecord, environment, run_identity
from gpt_lightning.runs.settings import Settings

CONFIG = GPTConfig(n_layer=2, n_head=2, n_embd=8, block_size=8, vocab_size=10, dropout=0.2)
OURS = RunRecord(
    config=CONFIG,
    settings=Settings(learning_rate=1e-3),
    tokenizer={"name": "char", "chars": "ab"},
    data_identity={"data.order": "shuffled", "dataset": "d1", "sequences a micro-batch": 8},
    run_identity={"seed_everything": 7, "gradient_clip_val": 1.0, "decay_steps": 30},
    environment={"torch": "2.13", "threads": 1, "ranks": 1, "precision": "32-true"},
)


def check(theirs: RunRecord, ours: RunRecord = OURS, fitting=True, allow_changes=False):
    return resume.check(theirs, ours, "text.txt", fitting, allow_changes)


def test_the_same_run_has_no_changes():
    assert check(OURS) == []
    assert check(OURS, fitting=False) == []


@pytest.mark.parametrize("key", resume.SHAPE)
@pytest.mark.parametrize("fitting", [True, False])
def test_another_shape_is_refused_with_both_values(key, fitting):
    theirs = getattr(CONFIG, key)
    other = not theirs if isinstance(theirs, bool) else theirs * 2
    changed = replace(OURS, config=replace(CONFIG, **{key: other}))
    with pytest.raises(
        UserError,
        match=rf"model\.config\.{key} is {theirs}, the checkpoint's {other}: "
        rf"set --model\.config\.{key}={str(other).lower()}, or",
    ):
        check(changed, fitting=fitting)


@pytest.mark.parametrize(("key", "other"), [("optimizer", "muon"), ("decay", "all")])
def test_another_optimizer_is_refused(key, other):
    changed = replace(OURS, settings=replace(OURS.settings, **{key: other}))
    with pytest.raises(
        UserError, match=rf"cannot resume .* model\.{key} is .* checkpoint's {other}"
    ):
        check(changed)


def test_other_tokens_are_refused_and_unknown_ones_are_not():
    with pytest.raises(UserError, match=r"other tokens than those of text\.txt \(gpt2 and char"):
        check(replace(OURS, tokenizer={"name": "gpt2"}))
    assert check(replace(OURS, tokenizer=None)) == []
    assert check(OURS, replace(OURS, tokenizer=None)) == []


@pytest.mark.parametrize(
    ("place", "key", "other", "line"),
    [
        ("data_identity", "data.order", "random", "data.order random, this run has shuffled"),
        ("data_identity", "sequences a micro-batch", 4, "micro-batch 4, this run has 8"),
        ("data_identity", "dataset", "d2", "has another dataset: resume"),
        ("run_identity", "seed_everything", 8, "seed_everything 8, this run has 7"),
    ],
)
def test_another_order_is_refused_unless_it_is_allowed(place, key, other, line):
    changed = replace(OURS, **{place: {**getattr(OURS, place), key: other}})
    with pytest.raises(UserError, match=line):
        check(changed)
    (allowed,) = check(changed, allow_changes=True)
    assert allowed.startswith(f"{key} {other} -> ")
    assert check(changed, fitting=False) == []  # an evaluation has no order


def test_an_order_that_one_of_the_two_does_not_record_is_not_compared():
    for blank in ({"data_identity": {}}, {"run_identity": {}}):
        assert check(replace(OURS, **blank)) == []
        assert check(OURS, replace(OURS, data_identity={})) == []


def test_changes_that_are_allowed_are_listed():
    changed = replace(
        OURS,
        settings=replace(OURS.settings, learning_rate=0.5),
        run_identity={**OURS.run_identity, "gradient_clip_val": 0.1},
        environment={**OURS.environment, "threads": 2, "precision": "bf16-mixed"},
    )
    inexact = ": equal to rounding errors, with other dropout masks, not bit for bit"
    assert check(changed) == [
        "model.learning_rate 0.5 -> 0.001",
        "gradient_clip_val 0.1 -> 1.0",
        f"threads 2 -> 1{inexact}",
        f"precision bf16-mixed -> 32-true{inexact}",
    ]
    assert check(changed, fitting=False)[1:] == ["precision bf16-mixed -> 32-true"]
    without = replace(OURS, config=replace(CONFIG, dropout=0.0))
    theirs = replace(changed, config=without.config)
    assert check(theirs, without)[2] == "threads 2 -> 1: equal to rounding errors, not bit for bit"


def test_a_checkpoint_from_the_middle_of_a_step_is_refused():
    with pytest.raises(UserError, match="after 3 of its micro-batches"):
        check(replace(OURS, micro_batches=3))
    assert check(replace(OURS, micro_batches=3), fitting=False) == []


def test_nested_settings_are_compared_by_their_keys():
    theirs = {"a": {"b": 1, "c": 2}, "d": 3, "old": 4}
    ours = {"a": {"b": 1, "c": 5}, "d": 6, "new": 7}
    assert resume.differences(theirs, ours, "x.") == ["x.a.c 2 -> 5", "x.d 3 -> 6"]


def test_the_keys_of_a_trainer_that_checkpoints_have():
    """They are in every checkpoint; under another name a change would not be noticed."""
    trainer = SimpleNamespace(
        gradient_clip_val=0.5,
        gradient_clip_algorithm=GradClipAlgorithmType.NORM,
        world_size=4,
        precision="32-true",
        strategy=SimpleNamespace(root_device=torch.device("cuda")),
        lightning_module=1.5,
        datamodule=Path(),
    )
    assert run_identity(trainer, 7, 30) == {
        "model.class_path": "builtins.float",
        "data.class_path": f"pathlib.{type(Path()).__name__}",
        "seed_everything": 7,
        "gradient_clip_val": 0.5,
        "gradient_clip_algorithm": "norm",
        "decay_steps": 30,
    }
    assert environment(trainer, compiled=True, attention="flash") == {
        "torch": torch.__version__,
        "device": "cuda",
        "threads": torch.get_num_threads(),
        "ranks": 4,
        "sharded": False,
        "precision": "32-true",
        "compile": True,
        "attention": "flash",
        "deterministic": False,
    }
