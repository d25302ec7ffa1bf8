"""Rules of a step and a run that need no run: ends, log steps, epochs, whole steps, the reason."""

import math
from types import SimpleNamespace

import lightning as L
import pytest
from lightning.pytorch.loops import _FitLoop

from gpt_lightning.errors import UserError
from gpt_lightning.training import between_steps, step_shape
from gpt_lightning.training.run_state import total_steps


def trainer_of(**changes) -> SimpleNamespace:
    settings = {
        "max_steps": -1,
        "max_epochs": None,
        "num_training_batches": 100,
        "accumulate_grad_batches": 3,
        "limit_train_batches": 1.0,
        "overfit_batches": 0.0,
        "val_check_interval": 1.0,
        "check_val_every_n_epoch": 1,
        "limit_val_batches": 1.0,
        "fast_dev_run": False,
        "log_every_n_steps": 10,
        "callbacks": [],
        "loggers": [],
        "lightning_module": SimpleNamespace(),
    }
    return SimpleNamespace(**settings | changes)


@pytest.mark.parametrize(
    ("max_steps", "max_epochs", "total"),
    [
        (-1, None, 0),
        (-1, -1, 0),
        (0, None, 0),
        (7, None, 7),
        (7, -1, 7),
        (-1, 2, 66),  # 33 whole steps an epoch
        (50, 2, 50),
        (99, 2, 66),
        (50, 0, 0),
        (1, 1, 1),
    ],
)
def test_the_first_end_counts(max_steps, max_epochs, total):
    assert total_steps(trainer_of(max_steps=max_steps, max_epochs=max_epochs)) == total


@pytest.mark.parametrize(
    ("changes", "due"),
    [
        ({}, True),
        ({"stop_requested": False}, False),
        ({"micro_batches": 1}, False),
        ({"min_steps": 7}, False),
        ({"min_epochs": 2}, False),
        ({"min_steps": 6, "min_epochs": 1}, True),
    ],
)
def test_a_stop_is_due_between_two_steps_if_lightning_would_stop(changes, due):
    """Lightning's FitLoop._can_stop_early has the same answer about epochs and steps."""
    state = {"stop_requested": True, "micro_batches": 0, "min_steps": None, "min_epochs": None}
    state = SimpleNamespace(**state | changes)
    loop = _FitLoop(L.Trainer(logger=False), state.min_epochs)
    loop.epoch_loop.min_steps = state.min_steps
    loop.epoch_progress.current.processed = 1
    loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = 6
    trainer = trainer_of(lightning_module=state, fit_loop=loop, global_step=6)
    assert between_steps.stop_due(trainer) is due
    if state.stop_requested and not state.micro_batches:
        assert loop._can_stop_early is due
    assert not between_steps.stop_due(trainer_of(fit_loop=loop, global_step=6))


@pytest.mark.parametrize(
    ("accumulate", "interval", "line"),
    [
        (4, 10, r"val_check_interval 10 .*accumulate_grad_batches 4: set it to 8 or 12$"),
        (4, 1, "set it to 4$"),
        (4, "00:00:01:00", "is a time, which may end in the middle of a step"),
    ],
)
def test_a_validation_within_a_step_is_refused_with_the_nearest_multiple(
    accumulate, interval, line
):
    with pytest.raises(UserError, match=line):
        step_shape.check_accumulation(accumulate, interval)


@pytest.mark.parametrize("interval", [None, 8, 4, 0.25, 1.0, math.inf])
def test_intervals_that_fall_on_whole_steps_pass(interval):
    step_shape.check_accumulation(4, interval)


@pytest.mark.parametrize(
    ("limit", "overfit", "line"),
    [
        (7, 0, r"trainer\.limit_train_batches 7 means epochs of 7 .* has 3: set it to 6 or 9$"),
        (2, 0, r"epochs of 2 micro-batches, and a step has 3: set it to 3$"),
        (4, 4, r"trainer\.overfit_batches 4 means .* set it to 3 or 6$"),
    ],
)
def test_an_epoch_that_ends_within_a_step_is_refused(limit, overfit, line):
    trainer = trainer_of(limit_train_batches=limit, overfit_batches=overfit)
    with pytest.raises(UserError, match=line):
        step_shape.check_epoch(trainer, 99)
    trainer.fast_dev_run = True  # which trains no model to keep
    step_shape.check_epoch(trainer, 99)


@pytest.mark.parametrize("limit", [1.0, 6, 99, 300])
def test_an_epoch_of_whole_steps_passes(limit):
    step_shape.check_epoch(trainer_of(limit_train_batches=limit), 99)


@pytest.mark.parametrize(
    ("changes", "used"),
    [
        ({"overfit_batches": 6, "limit_train_batches": 6}, 6),
        ({"limit_train_batches": 0.5, "accumulate_grad_batches": 1}, 49),
        ({}, 99),
    ],
)
def test_a_validation_that_no_epoch_reaches_is_refused(changes, used):
    line = f"above the {used} micro-batches of an epoch: set --trainer.val_check_interval {used}, "
    trainer = trainer_of(val_check_interval=102, **changes)
    with pytest.raises(UserError, match=line):
        step_shape.check_epoch(trainer, 99)
    for passes in (
        {"val_check_interval": used},
        {"check_val_every_n_epoch": None},
        {"limit_val_batches": 0},
        {"val_check_interval": 1.0},
    ):
        step_shape.check_epoch(trainer_of(**{"val_check_interval": 102, **changes, **passes}), 99)


def test_callbacks_are_called_between_batches_in_their_order():
    called = []

    class Noting(between_steps.StepCallback):
        def __init__(self, name: str) -> None:
            self.name = name

        def between_batches(self, trainer) -> None:
            called.append(self.name)

    between_steps.call_between_batches(
        trainer_of(callbacks=[Noting("a"), L.Callback(), Noting("b")])
    )
    assert called == ["a", "b"]
